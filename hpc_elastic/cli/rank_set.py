"""``0-3,7``: sets of ranks, rounds and attempts as people write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_elastic.errors import UsageError

_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?\Z", re.ASCII)
_MOST_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class NumberSet:
    """Numbers from 0 on, as ranges."""

    ranges: tuple[tuple[int, int], ...]
    text: str

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(first <= number <= last for first, last in self.ranges)

    @property
    def largest(self) -> int:
        return max(last for _, last in self.ranges)

    def within(self, numbers: Iterable[int]) -> list[int]:
        """Those of `numbers` that are in it."""
        return [number for number in numbers if number in self]


def parse_numbers(text: str, *, option: str) -> NumberSet:
    """Read ``3``, ``0-3,7``.

    Raises:
        UsageError: anything else.
    """
    ranges = []
    items = text.replace(" ", "").split(",")
    for item in items[:_MOST_ITEMS]:
        match = _ITEM.match(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if match is None or first > last:
            raise UsageError(f"{option} {text}: {item or 'nothing'} is no number and no range; write it as 0-3,7")
        ranges.append((first, last))
    if len(items) > _MOST_ITEMS:
        raise UsageError(f"{option} {text[:40]}...: more than {_MOST_ITEMS} ranges; write neighbours as 0-3")
    return NumberSet(tuple(ranges), text)


def check_ranks(ranks: NumberSet, world_size: int, *, option: str, where: str) -> None:
    """Refuse ranks that are nowhere.

    Args:
        ranks: What was asked for.
        world_size: How many there are; 0: not known.
        option: What the user gave.
        where: Of what: ``round 2 of attempt 0``.

    Raises:
        UsageError: with the range that is valid.
    """
    if world_size and ranks.largest >= world_size:
        valid = f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0 alone"
        raise UsageError(f"{option} {ranks.text}: {where} has {valid}")
