"""What the ranks make of it when they meet at a standby store, and their own store is lost. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a rank knows when it comes to a meeting."""

    initial_rank: int
    iteration: int
    world_size: int
    """Of that iteration."""
    has_returned: bool
    """Its function has, in that iteration, and it is not known whether those of all others have."""
    is_certain: bool
    """The store's server is dead; else it was silent."""

    def encode(self) -> str:
        return json.dumps([self.initial_rank, self.iteration, self.world_size, self.has_returned, self.is_certain])

    @classmethod
    def decode(cls, text: str) -> Arrival:
        initial_rank, iteration, world_size, has_returned, is_certain = json.loads(text)
        return cls(
            initial_rank=initial_rank,
            iteration=iteration,
            world_size=world_size,
            has_returned=has_returned,
            is_certain=is_certain,
        )


def count_expected(arrivals: Collection[Arrival]) -> int:
    """How many ranks there were at the last that is known."""
    return max(arrivals, key=lambda each: each.iteration).world_size


def objection(arrivals: Collection[Arrival]) -> str:
    """Why those who came must not go on; "" where they may."""
    expected = count_expected(arrivals)
    if not any(each.is_certain for each in arrivals) and 2 * len(arrivals) <= expected:
        return f"the store's server is silent, and only {len(arrivals)} of {expected} ranks are here: others may go on"
    if len(arrivals) < expected and all(each.has_returned for each in arrivals):
        return "the function has returned on all ranks that are left: whether the call was over can't be known"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What all that came have agreed on."""

    iteration: int
    """The next one."""
    present: tuple[int, ...]
    """Initial ranks."""
    objection: str = ""

    def encode(self) -> str:
        return json.dumps([self.iteration, self.present, self.objection])

    @classmethod
    def decode(cls, text: str) -> Meeting:
        iteration, present, why = json.loads(text)
        return cls(iteration=iteration, present=tuple(present), objection=why)


def decide(arrivals: Collection[Arrival]) -> Meeting:
    """Args: arrivals: of all who came; at least one."""
    return Meeting(
        iteration=max(each.iteration for each in arrivals) + 1,
        present=tuple(sorted(each.initial_rank for each in arrivals)),
        objection=objection(arrivals),
    )


def may_stay(*, silent: int, left: int) -> bool:
    """Whether those who still have their store may go on: else they are few enough for the others to go on elsewhere.

    Args:
        silent: Ranks that were declared dead in this call for their silence alone.
        left: How many are left.
    """
    return silent <= left
