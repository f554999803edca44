"""Hooks that give the ranks that are left their new numbers."""

from __future__ import annotations

import abc
import itertools
from bisect import bisect_left
from collections.abc import Callable, Set
from datetime import timedelta
from typing import ClassVar

from hpc_elastic.inprocess.state import RestartError, State


class RankDiscarded(RestartError):
    """The others do not need this rank any more, or take it for dead."""


class RankAssignment(abc.ABC):
    """Runs on every rank that is left: once as the call begins, with no terminated ranks, then after each fault.

    All must come to the same world size, and to ranks from 0 without gaps.
    """

    @abc.abstractmethod
    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Args:
            state: Its rank and world size are those of the iteration that ended.
            terminated_ranks: In that iteration's numbers, the same on every rank.

        Returns:
            The state, with new rank and world size, and the terminated ranks that it still counts: a set that is not
            empty ends this rank with `RestartError`.
        """


def filled_gaps(rank: int, world_size: int, terminated: Set[int]) -> int:
    """The new number of `rank`: the last ranks move into the gaps, in order; all others keep theirs."""
    left = world_size - len(terminated)
    if rank < left:
        return rank
    healthy_before = rank - left - sum(left <= each < rank for each in terminated)
    return sorted(terminated)[healthy_before]


def shifted(rank: int, terminated: Set[int]) -> int:
    """The new number of `rank`: all close up, in order."""
    return rank - bisect_left(sorted(terminated), rank)


class FillGaps(RankAssignment):
    """The last ranks take the places of those that are gone; most keep their numbers.

    ``0 X 2 3 X X 6 7`` becomes ``0 6 2 3 7``.
    """

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: RankDiscarded: this rank is one of `terminated_ranks`."""
        _check_alive(state, terminated_ranks)
        state.rank = filled_gaps(state.rank, state.world_size, terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()


class ShiftRanks(RankAssignment):
    """All close up and keep their order: ``0 X 2 3 X X 6 7`` becomes ``0 2 3 6 7``."""

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: RankDiscarded: this rank is one of `terminated_ranks`."""
        _check_alive(state, terminated_ranks)
        state.rank = shifted(state.rank, terminated_ranks)
        state.world_size -= len(terminated_ranks)
        return state, set()


class FilterGroupedByKey(RankAssignment):
    """Ranks with the same key stay or leave together: all of a node, for instance.

    It counts each key's ranks that are alive, and adds those whose count does not satisfy `condition` to the terminated
    ones. Another assignment, which discards them, comes after it: ``Compose(ShiftRanks(), FilterGroupedByKey(…))``.
    """

    instance_count: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(
        self,
        key_or_fn: str | Callable[[int, int], str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        """Args:
        key_or_fn: This rank's key, or a function that gives it for rank and world size.
        condition: Decides from a key's number of ranks that are alive whether they stay.
        timeout: Limit for all ranks to publish their key.
        """
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self.name = f"{type(self).__name__}_{next(self.instance_count)}"

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: BarrierTimeout: a rank has not published its key in time."""
        if state.rank in terminated_ranks:
            return state, terminated_ranks
        key = self.key_or_fn(state.rank, state.world_size) if callable(self.key_or_fn) else self.key_or_fn
        alive = state.world_size - len(terminated_ranks)
        # Iterations share the base store before the first and after the last: the call is part of the name.
        store, name = state.store, f"{self.name}/{state.iteration}"
        # One list for all: a key each would cost a round trip each.
        store.append_item(f"{name}/keys", f"{state.rank}={str(key).encode().hex()}")
        store.barrier(rank=state.rank, group_name=name, rendezvous_count=alive, timeout=self.timeout)
        keys = {}
        for item in store.items(f"{name}/keys"):
            who, _, raw = item.partition("=")
            keys[int(who)] = bytes.fromhex(raw).decode()
        return state, set(terminated_ranks) | grouped_out(keys, self.condition)


FilterCountGroupedByKey = FilterGroupedByKey
"""Its name in NVIDIA's 0.4."""


class ActivateAllRanks(RankAssignment):
    """NVIDIA's 0.4 needs it in a ``Compose``; here all ranks are active after every assignment."""

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        return state, terminated_ranks


def grouped_out(keys: dict[int, str], condition: Callable[[int], bool]) -> set[int]:
    groups: dict[str, list[int]] = {}
    for rank, key in keys.items():
        groups.setdefault(key, []).append(rank)
    return {rank for ranks in groups.values() if not condition(len(ranks)) for rank in ranks}


def _check_alive(state: State, terminated_ranks: Set[int]) -> None:
    if state.rank in terminated_ranks:
        shown = ", ".join(map(str, sorted(terminated_ranks)))
        raise RankDiscarded(f"rank {state.rank} of {state.world_size} is discarded; terminated ranks: {shown}")
