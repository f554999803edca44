"""Hooks that give the ranks that are left their new numbers."""

from __future__ import annotations

import abc
import itertools
from bisect import bisect_left
from collections.abc import Callable, Set
from datetime import timedelta
from typing import ClassVar

from hpc_elastic.inprocess.state import RestartError, State
from hpc_elastic.inprocess.store import StoreMixin


class RankDiscarded(RestartError):
    """This rank is not needed any more, or is taken for dead by the others."""


class RankAssignment(abc.ABC):
    """Runs on every rank that is left: once as the call begins, with no terminated ranks, then after each fault.

    All must come to the same world size, and to ranks from 0 without gaps.
    """

    @abc.abstractmethod
    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Args:
            state: With rank and world size of the iteration that ended.
            terminated_ranks: In that iteration's numbers, the same on every rank.

        Returns:
            The state, with new rank and world size, and the terminated ranks that it still counts: none, or this rank
            ends with `RestartError`.
        """
        raise NotImplementedError


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
        key_or_fn: This rank's key, or what gives it from rank and world size.
        condition: From a key's number of ranks that are alive to whether they stay.
        timeout: For all ranks to have said their key.
        """
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self.name = f"{type(self).__name__}_{next(self.instance_count)}"

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        """Raises: BarrierTimeout: a rank has not said its key in time."""
        if state.rank in terminated_ranks:
            return state, terminated_ranks
        key = self.key_or_fn(state.rank, state.world_size) if callable(self.key_or_fn) else self.key_or_fn
        alive = state.world_size - len(terminated_ranks)
        # Iterations share the base store before the first and after the last: the call is part of the name.
        keys = _exchange(state.store, f"{self.name}/{state.iteration}", state.rank, str(key), alive, self.timeout)
        return state, set(terminated_ranks) | grouped_out(keys, self.condition)


FilterCountGroupedByKey = FilterGroupedByKey
"""Its name in NVIDIA's 0.4."""


class ActivateAllRanks(RankAssignment):
    """NVIDIA's 0.4 needs it in a ``Compose``; here all ranks are active after every assignment."""

    def __call__(self, state: State, terminated_ranks: Set[int]) -> tuple[State, Set[int]]:
        return state, terminated_ranks


def grouped_out(keys: dict[int, str], condition: Callable[[int], bool]) -> set[int]:
    """The ranks that leave.

    Args:
        keys: Of every rank that is alive.
        condition: As of `FilterGroupedByKey`.
    """
    groups: dict[str, list[int]] = {}
    for rank, key in keys.items():
        groups.setdefault(key, []).append(rank)
    return {rank for ranks in groups.values() if not condition(len(ranks)) for rank in ranks}


def _exchange(store: StoreMixin, name: str, rank: int, value: str, count: int, timeout: timedelta) -> dict[int, str]:
    """Every rank's value. One list for all: a key each would cost a round trip each."""
    store.append_item(f"{name}/keys", f"{rank}={value.encode().hex()}")
    store.barrier(rank=rank, group_name=name, rendezvous_count=count, timeout=timeout)
    found = {}
    for item in store.items(f"{name}/keys"):
        who, _, raw = item.partition("=")
        found[int(who)] = bytes.fromhex(raw).decode()
    return found


def _check_alive(state: State, terminated_ranks: Set[int]) -> None:
    if state.rank in terminated_ranks:
        shown = ", ".join(map(str, sorted(terminated_ranks)))
        raise RankDiscarded(f"rank {state.rank} of {state.world_size} is discarded; terminated ranks: {shown}")
