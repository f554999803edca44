"""The states of an agent: its phases with the one table of what may follow, and the worker group with torch's names.

docs/reference/states.md is generated from the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from hpc_elastic.errors import HpcElasticError, IllegalTransitionError

if TYPE_CHECKING:
    from hpc_elastic.agent.worker_spec import RoundStore, WorkerSpec
    from hpc_elastic.rendezvous.ranks import RankLayout


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


class Worker(Struct):
    """One rank on this node."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = None
    """Opaque; the pid here. None before the start."""


class WorkerGroup:
    """The workers of one node, which change state as a unit."""

    def __init__(self, spec: WorkerSpec) -> None:
        """A group that has not started: its workers have local ranks and nothing else."""
        self.spec = spec
        self.workers = [Worker(local_rank=local_rank) for local_rank in range(spec.local_world_size)]
        self.state = WorkerState.INIT
        self.store: RoundStore | None = None
        """The round's own; None before the first round."""
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.layout: RankLayout | None = None
        """This node's place among the round's ranks; None before the first round."""
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.round = -1
        """The rendezvous' number of the round; -1 before the first."""
        self.restarts_used = 0
        """Rounds that followed a worker's failure, wherever in the run it happened: the same on every node."""

    def __repr__(self) -> str:
        return f"WorkerGroup(role={self.spec.role!r}, state={self.state.name}, workers={self.workers!r})"


class MonitorResult(Struct):
    """What `SimpleElasticAgent._monitor_workers` found."""

    state: WorkerState
    ret_vals: dict[int, Any] = field(default_factory=dict)
    """Global rank → what its function returned, once all have ended well."""
    exceptions: dict[int, Any] = field(default_factory=dict)
    """Global rank → failure."""


class RunResult(Struct):
    """How the run ended for this node's workers.

    It can be indexed by global rank; a rank whose function returned nothing is not in it, as none is for a script.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    """Global rank → return value, None included."""
    failures: dict[int, Any] = field(default_factory=dict)
    """Global rank → failure."""

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED

    def __getitem__(self, global_rank: int) -> Any:
        return self.return_values[global_rank]

    def __iter__(self) -> Iterator[int]:
        return (rank for rank, value in self.return_values.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True


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


class Phase(str, Enum):
    """What the agent of one node is doing."""

    JOINING = "joining"
    """No workers; asks to be in the next round."""
    READY = "ready"
    """Chosen for a frozen round, confirmed, waits for the others."""
    RUNNING = "running"
    """Workers run."""
    DONE = "done"
    """All workers here ended with 0; others may still run (the exit barrier)."""
    STOPPING = "stopping"
    """Workers are being ended, then a new round."""
    LEAVING = "leaving"
    """Workers are being ended, then the agent ends."""
    ENDED = "ended"
    """Nothing is left to do."""


class Event(str, Enum):
    """What happens to an agent."""

    FROZEN = "frozen with this node"
    FINAL = "final with this node"
    NEWER_ROUND = "a newer round"
    CLOSED = "the run is closed"
    FAILED = "a worker failed"
    SUCCEEDED = "all workers here succeeded"
    STOPPED = "all workers here have ended"
    LEAVE = "this node takes itself out"


TRANSITIONS = MappingProxyType(
    {
        Phase.JOINING: MappingProxyType(
            {
                Event.FROZEN: Phase.READY,
                Event.NEWER_ROUND: Phase.JOINING,
                Event.CLOSED: Phase.ENDED,
                Event.LEAVE: Phase.ENDED,
            }
        ),
        Phase.READY: MappingProxyType(
            {
                Event.FINAL: Phase.RUNNING,
                Event.NEWER_ROUND: Phase.JOINING,
                Event.CLOSED: Phase.ENDED,
                Event.LEAVE: Phase.ENDED,
            }
        ),
        Phase.RUNNING: MappingProxyType(
            {
                Event.FAILED: Phase.STOPPING,
                Event.SUCCEEDED: Phase.DONE,
                Event.NEWER_ROUND: Phase.STOPPING,
                Event.CLOSED: Phase.LEAVING,
                Event.LEAVE: Phase.LEAVING,
            }
        ),
        Phase.DONE: MappingProxyType(
            {
                Event.NEWER_ROUND: Phase.STOPPING,  # what the workers left running is ended first
                Event.CLOSED: Phase.LEAVING,
                Event.LEAVE: Phase.LEAVING,
            }
        ),
        Phase.STOPPING: MappingProxyType(
            {
                Event.STOPPED: Phase.JOINING,
                Event.NEWER_ROUND: Phase.STOPPING,
                Event.CLOSED: Phase.LEAVING,
                Event.LEAVE: Phase.LEAVING,
            }
        ),
        Phase.LEAVING: MappingProxyType(
            {
                Event.STOPPED: Phase.ENDED,
                Event.NEWER_ROUND: Phase.LEAVING,
                Event.CLOSED: Phase.LEAVING,
                Event.LEAVE: Phase.LEAVING,
            }
        ),
        Phase.ENDED: MappingProxyType({}),
    }
)

WORKER_STATE = MappingProxyType(
    {
        Phase.JOINING: WorkerState.STOPPED,
        Phase.READY: WorkerState.STOPPED,
        Phase.RUNNING: WorkerState.HEALTHY,
        Phase.DONE: WorkerState.SUCCEEDED,
        Phase.STOPPING: WorkerState.UNHEALTHY,
        Phase.LEAVING: WorkerState.UNHEALTHY,
    }
)
"""The group's state by phase; ENDED keeps what the run ended with, and before the first start it is INIT."""


def next_phase(phase: Phase, event: Event) -> Phase:
    """The phase that `event` leads to.

    Raises:
        IllegalTransitionError: the table has no such row.
    """
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise IllegalTransitionError(state=phase.value, event=event.value) from None
