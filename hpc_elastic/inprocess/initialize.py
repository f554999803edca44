"""Hooks that run first in every iteration."""

from __future__ import annotations

import abc

from hpc_elastic.inprocess.exception import RestartAbort
from hpc_elastic.inprocess.state import State


class Initialize(abc.ABC):
    """Runs on every rank, spares included, before each call of the function.

    An ``Exception`` restarts all ranks; a ``BaseException`` ends this one.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """What it returns takes the state's place."""
        raise NotImplementedError


class RetryController(Initialize):
    """Gives up when there were enough iterations, or when too few ranks are left."""

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        """Args:
        max_iterations: How many times the function may start, the first included; no limit where None.
        min_world_size: Ranks that must be there, spares included.
        min_active_world_size: Ranks that must call the function.
        """
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: State) -> State:
        """Raises: RestartAbort: a limit is reached."""
        why = None
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            why = f"iteration {state.iteration} with max_iterations={self.max_iterations}"
        elif state.world_size < self.min_world_size:
            why = f"world_size={state.world_size} with min_world_size={self.min_world_size}"
        elif state.active_world_size < self.min_active_world_size:
            why = f"active_world_size={state.active_world_size} with min_active_world_size={self.min_active_world_size}"
        if why is not None:
            raise RestartAbort(f"no further restart within the processes: {why}")
        return state
