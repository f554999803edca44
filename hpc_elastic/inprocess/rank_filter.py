"""Hooks that say which ranks call the function, and which wait as spares."""

from __future__ import annotations

import abc

from hpc_elastic.inprocess.state import State, Status


class RankFilter(abc.ABC):
    """Runs on every rank after each assignment. Spares take over in the next iteration, where ranks are gone."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Set ``active_world_size`` and ``status``; what it returns takes the state's place."""
        raise NotImplementedError


class MaxActiveWorldSize(RankFilter):
    """No more than so many ranks call the function."""

    def __init__(self, max_active_world_size: int | None) -> None:
        """Args:
        max_active_world_size: No limit where None.
        """
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        limit = self.max_active_world_size
        return _narrow(state, state.active_world_size if limit is None else min(limit, state.active_world_size))


class WorldSizeDivisibleBy(RankFilter):
    """The number of ranks that call the function is a multiple of `divisor`, or 0."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        return _narrow(state, state.active_world_size - state.active_world_size % self.divisor)


def _narrow(state: State, active: int) -> State:
    state.active_world_size = active
    state.status = Status.ACTIVE if state.rank < active else Status.INACTIVE
    return state
