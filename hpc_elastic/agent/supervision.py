"""The states of an agent: its phases with the one table of what may follow, and the worker group with torch's names.

docs/reference/exit-codes.md is generated from the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from hpc_elastic.errors import HpcElasticError, IllegalTransitionError, UsageError
from hpc_elastic.run.spec import Entrypoint

if TYPE_CHECKING:
    from hpc_elastic.rendezvous.proposals import RankLayout


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
        """The processes of the group are there."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class Phase(str, Enum):
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
    FROZEN = "frozen with this node"
    FINAL = "final with this node"
    NEWER_ROUND = "a newer round"
    CLOSED = "the run is closed"
    FAILED = "a worker failed"
    SUCCEEDED = "all workers here succeeded"
    STOPPED = "all workers here have ended"
    LEAVE = "this node takes itself out"


TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    Phase.JOINING: {
        Event.FROZEN: Phase.READY,
        Event.NEWER_ROUND: Phase.JOINING,
        Event.CLOSED: Phase.ENDED,
        Event.LEAVE: Phase.ENDED,
    },
    Phase.READY: {
        Event.FINAL: Phase.RUNNING,
        Event.NEWER_ROUND: Phase.JOINING,
        Event.CLOSED: Phase.ENDED,
        Event.LEAVE: Phase.ENDED,
    },
    Phase.RUNNING: {
        Event.FAILED: Phase.STOPPING,
        Event.SUCCEEDED: Phase.DONE,
        Event.NEWER_ROUND: Phase.STOPPING,
        Event.CLOSED: Phase.LEAVING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.DONE: {
        Event.NEWER_ROUND: Phase.STOPPING,  # what the workers left running is ended first
        Event.CLOSED: Phase.LEAVING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.STOPPING: {
        Event.STOPPED: Phase.JOINING,
        Event.NEWER_ROUND: Phase.STOPPING,
        Event.CLOSED: Phase.LEAVING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.LEAVING: {
        Event.STOPPED: Phase.ENDED,
        Event.NEWER_ROUND: Phase.LEAVING,
        Event.CLOSED: Phase.LEAVING,
        Event.LEAVE: Phase.LEAVING,
    },
    Phase.ENDED: {},
}

WORKER_STATE: Mapping[Phase, WorkerState] = {
    Phase.JOINING: WorkerState.STOPPED,
    Phase.READY: WorkerState.STOPPED,
    Phase.RUNNING: WorkerState.HEALTHY,
    Phase.DONE: WorkerState.SUCCEEDED,
    Phase.STOPPING: WorkerState.UNHEALTHY,
    Phase.LEAVING: WorkerState.UNHEALTHY,
}
"""The group's state by phase; ENDED keeps what the run ended with, and before the first start it is INIT."""


def next_phase(phase: Phase, event: Event) -> Phase:
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise IllegalTransitionError(state=phase.value, event=event.value) from None


DEFAULT_ROLE = "default"


class Worker(Struct):
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
        self.spec = spec
        self.workers = [Worker(local_rank=local_rank) for local_rank in range(spec.local_world_size)]
        self.state = WorkerState.INIT
        self.store: RoundStore | None = None
        """The round's own; None before the first round."""
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.layout: RankLayout | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.round = -1
        self.restarts_used = 0
        """Rounds that followed a worker's failure, wherever in the run it happened: the same on every node."""

    def __repr__(self) -> str:
        return f"WorkerGroup(role={self.spec.role!r}, state={self.state.name}, workers={self.workers!r})"


class RunResult(Mapping[int, Any]):
    """How the run ended for this node's workers, or how they are, from `SimpleElasticAgent._monitor_workers`.

    It reads as a mapping of global rank to return value; a rank whose function returned nothing is not in it, as none
    is for a script.

    Attributes:
        return_values: Global rank → return value, None included.
        failures: Global rank → failure.
    """

    def __init__(
        self,
        state: WorkerState,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, Any] | None = None,
    ) -> None:
        self.state = state
        self.return_values = return_values or {}
        self.failures = failures or {}

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state!r}, {self.return_values!r}, {self.failures!r})"


class MonitorResult(RunResult):
    """A `RunResult` by the names that its fields had in older versions of torch."""

    def __init__(
        self, state: WorkerState, ret_vals: dict[int, Any] | None = None, exceptions: dict[int, Any] | None = None
    ) -> None:
        super().__init__(state, ret_vals, exceptions)


class WorkerGroupFailureError(HpcElasticError):
    """The run was given up because of its workers."""

    template = "{reason}"

    def __init__(self, reason: str, exceptions: Mapping[int, Any] | None = None) -> None:
        super().__init__(reason=reason, exceptions=dict(exceptions or {}))

    def get_worker_exceptions(self) -> Mapping[int, Any]:
        """Global rank → failure, of the workers on this node."""
        return self.exceptions  # type: ignore[no-any-return]


WorkerGroupFailureException = WorkerGroupFailureError


MAX_RESTARTS = 100
MONITOR_INTERVAL = 5.0


class RoundStore(Protocol):
    """Keys and values of one round, shared by its nodes. `store.key_value.KeyValueStore` is one.

    One whose `get` waits for what is missing, as torch's do, has `check` as well.
    """

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def add(self, key: str, amount: int) -> int: ...


class Round(Protocol):
    """The result of `next_rendezvous`, such as `rendezvous.handler.RoundResult`; a tuple of the three does as well.
    It may have `version`, the round's number, the same on every node; else each agent counts its rounds."""

    @property
    def store(self) -> RoundStore: ...

    @property
    def rank(self) -> int:
        """Group rank: of this node among the round's nodes."""
        ...

    @property
    def world_size(self) -> int:
        """Group world size: nodes in the round."""
        ...


class Rendezvous(Protocol):
    """The part of a rendezvous handler that an agent needs; `rendezvous.handler.FileRendezvousHandler` is one.

    It may have more. ``round_is_over() -> bool``: another node asked for a new round, or may come in; with it,
    `num_nodes_waiting` is not asked, since a node that waits although the round goes on is a spare. ``fileno()``:
    readable when there is news, and waited for instead of `monitor_interval`. ``report_done()``: all workers of this
    node have ended well, and it is not missed from now on. ``has_succeeded() -> bool``: those of all nodes have.
    ``give_up(reason)`` closes the run as one that failed, in place of `set_closed`.
    """

    def get_run_id(self) -> str: ...

    def next_rendezvous(self) -> Round | tuple[RoundStore, int, int]: ...

    def num_nodes_waiting(self) -> int: ...

    def set_closed(self) -> None: ...

    def shutdown(self) -> bool: ...


class WorkerSpec:
    """The workers of one node: their program, and how often they may be started again."""

    def __init__(
        self,
        role: str,
        local_world_size: int,
        entrypoint: Callable[..., Any] | Entrypoint | str | None = None,
        args: tuple[Any, ...] = (),
        rdzv_handler: Rendezvous | None = None,
        max_restarts: int = MAX_RESTARTS,
        monitor_interval: float = MONITOR_INTERVAL,
        master_port: int | None = None,
        master_addr: str | None = None,
        fn: Callable[..., Any] | None = None,
    ) -> None:
        """Args:
        role: Of the workers.
        local_world_size: Workers on this node; nodes may differ.
        entrypoint: A Python function, called in each worker with `args`; the path of a script, or a command's name; or
            an `Entrypoint`, which names the kind: script, module or command.
        args: Given to it.
        rdzv_handler: Where the nodes meet.
        max_restarts: Rounds that may follow a worker's failure, in the whole run: n allows n + 1 starts.
        monitor_interval: Seconds between two looks, where nothing signals a change.
        master_port: The same in every round; None: a free one in each.
        master_addr: Given to the workers as it is; None: an address of group rank 0's node.
        fn: The older name of a function as `entrypoint`.

        Raises:
            UsageError: a value that makes no sense; the message names it.
        """
        if entrypoint is not None and fn is not None:
            raise UsageError("WorkerSpec: give entrypoint or fn, its older name, and not both")
        self.role, self.local_world_size, self.args, self.rdzv_handler = role, local_world_size, args, rdzv_handler
        self.max_restarts, self.monitor_interval = max_restarts, monitor_interval
        self.master_port, self.master_addr = master_port, master_addr
        self.entrypoint = entrypoint if fn is None else fn
        if self.entrypoint is None or self.entrypoint == "":
            raise UsageError("WorkerSpec: entrypoint is missing: give a function, a script, a module or a command")
        if not callable(self.entrypoint) and not isinstance(self.entrypoint, str | os.PathLike | Entrypoint):
            raise UsageError(f"WorkerSpec: entrypoint={self.entrypoint!r} is not a function, command or Entrypoint")
        if not self.role:
            raise UsageError("WorkerSpec: role is empty: give a name, such as 'default'")
        if isinstance(self.local_world_size, bool) or self.local_world_size < 1:
            raise UsageError(f"WorkerSpec: local_world_size={self.local_world_size!r}: give at least one worker")
        if self.max_restarts < 0:
            raise UsageError(f"WorkerSpec: max_restarts={self.max_restarts}: give 0 or more")
        if not self.monitor_interval > 0:
            raise UsageError(f"WorkerSpec: monitor_interval={self.monitor_interval}: give seconds above 0")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise UsageError(f"WorkerSpec: master_port={self.master_port}: give a port from 1 to 65535, or None")
        if self.rdzv_handler is None:
            raise UsageError("WorkerSpec: rdzv_handler is missing: give one, such as FileRendezvousHandler(…)")

    @property
    def handler(self) -> Rendezvous:
        assert self.rdzv_handler is not None
        return self.rdzv_handler

    def get_entrypoint_name(self) -> str:
        """The function's name or the command, for messages."""
        if callable(self.entrypoint):
            return getattr(self.entrypoint, "__qualname__", repr(self.entrypoint))
        return str(self.entrypoint)
