"""Ranks × last collectives of a process group, by their dumps of the flight recorder: what a picture shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from hpc_elastic.failures.flight_analysis import waiting_groups
from hpc_elastic.failures.flight_differences import differing, signature
from hpc_elastic.failures.flight_dump import RankDump
from hpc_elastic.failures.flight_groups import Group, sized
from hpc_elastic.run.flight_tail import Call

COLUMNS = 8
_BEYOND = 2
"""Columns after the first collective that a rank waits in."""
MOST_GRIDS = 4
MOST_ROWS = 24


class CallState(str, Enum):
    """What a rank did with one collective."""

    COMPLETED = "completed"
    WAITS = "waits"
    OTHER = "other"
    """It called something else than most."""
    NEVER_ENTERED = "never_entered"
    NOT_KNOWN = "not_known"
    """It is gone from the ring, or the rank left no dump."""


class GridRow(Struct, frozen=True, kw_only=True):
    """The ranks that did the same."""

    ranks: tuple[int, ...]
    states: tuple[CallState, ...]
    """One for each of the grid's numbers."""
    called: str = ""
    """What they called where they called something else: ``broadcast (28 B fp32)``."""


class CallGrid(Struct, frozen=True, kw_only=True):
    """One group's."""

    group: str
    backend: str
    numbers: tuple[int, ...]
    calls: tuple[str, ...]
    """What most ranks called with each number; empty: not known."""
    rows: tuple[GridRow, ...]
    """The rarest first; at most `MOST_ROWS`."""
    left_out: int = 0
    """Ranks in rows that are left out."""


def draw_grids(dumps: Iterable[RankDump], *, world_size: int | None = None) -> tuple[CallGrid, ...]:
    """The groups in which ranks wait or differ, those with most ranks that wait first; at most `MOST_GRIDS`.

    Args:
        dumps: As `analyse` takes them.
        world_size: Where it is known.
    """
    groups, _ = waiting_groups(sorted(dumps, key=lambda dump: dump.rank), world_size)
    for group in groups:
        if not group.waiting and not group.is_live and differing(group):  # gloo has closed what does not fit together
            group.waiting = {rank: last for rank, last in group.last.items() if last == group.reached}
    broken = [group for group in groups if group.waiting or len(set(group.last.values())) > 1]
    broken.sort(key=lambda group: (-len(group.waiting), group.label, group.name))
    return tuple(_draw(group) for group in broken[:MOST_GRIDS])


def _draw(group: Group) -> CallGrid:
    at = min(group.waiting.values(), default=max(group.last.values()))
    last = min(max(group.last.values()), at + _BEYOND)
    first = max(last - COLUMNS + 1, min(track.sequences[0] for _, track in group.tracks.values()))
    numbers = tuple(range(first, last + 1))
    called = {rank: [group.call(rank, number) for number in numbers] for rank in group.tracks}
    most = [_usual([calls[place] for calls in called.values()]) for place in range(len(numbers))]
    rows: dict[tuple[tuple[CallState, ...], str], list[int]] = {}
    for rank in group.members:
        calls = called.get(rank) or [None] * len(numbers)
        states = tuple(
            _state(group, rank, number, is_other=not _alike(call, usual))
            for number, call, usual in zip(numbers, calls, most, strict=True)
        )
        others = (call for call, state in zip(calls, states, strict=True) if state is CallState.OTHER)
        rows.setdefault((states, _text(next(others, None))), []).append(rank)
    drawn = [
        GridRow(ranks=tuple(ranks), states=states, called=other)
        for (states, other), ranks in sorted(rows.items(), key=lambda item: (len(item[1]), item[1]))
    ]
    return CallGrid(
        group=group.label,
        backend=group.backend,
        numbers=numbers,
        calls=tuple(map(_text, most)),
        rows=tuple(drawn[:MOST_ROWS]),
        left_out=sum(len(row.ranks) for row in drawn[MOST_ROWS:]),
    )


def _usual(calls: Iterable[Call | None]) -> Call | None:
    counts = Counter(call for call in calls if call is not None and call.name)
    return min(counts, key=lambda call: (-counts[call], repr(call))) if counts else None


def _alike(call: Call | None, usual: Call | None) -> bool:
    return call is None or not call.name or call is usual or usual is None or signature(call) == signature(usual)


def _text(call: Call | None) -> str:
    return f"{call.name}{sized(call)}" if call is not None else ""


def _state(group: Group, rank: int, number: int, *, is_other: bool) -> CallState:
    if is_other:
        return CallState.OTHER
    if rank not in group.last or (rank in group.tracks and number < group.tracks[rank][1].sequences[0]):
        return CallState.NOT_KNOWN
    if number > group.last[rank]:
        return CallState.NEVER_ENTERED
    return CallState.WAITS if number >= group.waiting.get(rank, number + 1) else CallState.COMPLETED
