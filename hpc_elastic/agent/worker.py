"""The words of PyTorch's elastic agent: a worker, its group, their state, what a run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hpc_elastic.errors import HpcElasticError


class WorkerState(int, Enum):
    """The state of a worker group, which changes as a unit."""

    UNKNOWN = 0
    """Changed half way."""
    INIT = 1
    """Not started yet."""
    HEALTHY = 2
    """Running."""
    UNHEALTHY = 4
    """Running, and something is not right."""
    STOPPED = 8
    """Ended by the agent; will soon be started again."""
    SUCCEEDED = 16
    """All ended with 0. Final."""
    FAILED = 32
    """Ended badly, and not started again. Final."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether processes of the group are there."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass(slots=True)
class Worker:
    """One rank on this node."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = None
    """Opaque; the pid here. None before the start."""


@dataclass(slots=True)
class WorkerGroup:
    """The workers of this node in a round."""

    workers: list[Worker] = field(default_factory=list)
    state: WorkerState = WorkerState.INIT
    group_rank: int = -1
    group_world_size: int = -1


class WorkerGroupFailureError(HpcElasticError):
    """The run was given up because of its workers.

    Facts: `reason`, and `exceptions`, global rank → failure.
    """

    template = "{reason}"

    def get_worker_exceptions(self) -> Mapping[int, Any]:
        """Global rank → failure, of the workers on this node."""
        exceptions: Mapping[int, Any] = self.facts.get("exceptions", {})
        return exceptions


WorkerGroupFailureException = WorkerGroupFailureError
