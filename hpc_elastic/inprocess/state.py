"""What one rank knows of a wrapped call: its state, why an iteration was interrupted and where, the errors, its phases.

Hooks and the function see the state: this rank's place in the current iteration. All errors pickle. The table of the
phases between the call and its end is `hpc_elastic.inprocess.iterations`'s to carry out. No torch.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_elastic.errors import IllegalTransitionError

if TYPE_CHECKING:
    from hpc_elastic.inprocess.store import StoreMixin


class Status(enum.Enum):
    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    """A spare: it waits."""
    ABORTING = enum.auto()
    ABORTED = enum.auto()


class State:
    """Mutable, as in NVIDIA's 0.2: hooks change it and give it back.

    Attributes:
        rank, world_size: In the current iteration, spares included.
        active_world_size: Ranks that call the function; exported as ``WORLD_SIZE``.
        initial_rank, initial_world_size: As the call began.
        iteration: 0 for the first.
        store: The restart group's store: while an iteration lasts, the part of it that is this iteration's own.
    """

    store: StoreMixin

    def __init__(self) -> None:
        self.get_distributed_vars()
        self.iteration = 0
        self.initial_rank = self.rank
        self.initial_world_size = self.world_size
        self.active_world_size = self.world_size
        self.status = Status.INITIALIZED

    @classmethod
    def from_env(cls) -> State:
        """Same as ``State()``; NVIDIA's 0.4 has it."""
        return cls()

    def __repr__(self) -> str:
        shown = ("rank", "world_size", "active_world_size", "initial_rank", "initial_world_size", "iteration", "status")
        return f"State({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"

    def get_distributed_vars(self) -> None:
        """Take rank and world size from the environment; without them this is rank 0 of 1."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))

    def set_distributed_vars(self) -> None:
        """Export RANK and WORLD_SIZE (that of active ranks), for the function."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def activate_all_ranks(self) -> None:
        """Every rank calls the function, until a filter says otherwise."""
        self.status = Status.ACTIVE
        self.active_world_size = self.world_size

    def advance(self) -> None:
        self.iteration += 1


class Interruption(enum.Enum):
    EXCEPTION = enum.auto()
    """The function, `initialize` or the health check before it raised an ``Exception``."""
    BASE_EXCEPTION = enum.auto()
    """The rank leaves: ``RestartAbort``, ``KeyboardInterrupt``, a hook after a fault that failed."""
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    """Its monitor process killed it."""
    TERMINATED = enum.auto()
    """The process ended, by a signal for instance."""
    UNRESPONSIVE = enum.auto()
    """No heartbeat: process and monitor are gone, or their node."""
    MONITOR_PROCESS_EXCEPTION = enum.auto()


class InterruptionRecord(Struct, frozen=True):
    """One line of the store's list; `rank` is that of the interrupted iteration."""

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"InterruptionRecord(rank={self.rank}, interruption=Interruption.{self.interruption.name})"

    @classmethod
    def from_str(cls, string: str) -> InterruptionRecord:
        """Read a text of ``str``. Raises: ValueError: it is no such text."""
        found = re.search(r"rank=(\d+).*Interruption\.(\w+)", string)
        if found is None or found[2] not in Interruption.__members__:
            raise ValueError(f"not an interruption's record: {string!r}")
        return cls(rank=int(found[1]), interruption=Interruption[found[2]])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Text like ``SOFT_TIMEOUT on ranks 0, 2; EXCEPTION on rank 1``."""
    ranks: dict[Interruption, dict[int, None]] = {}
    for record in records:
        ranks.setdefault(record.interruption, {})[record.rank] = None
    return "; ".join(
        f"{interruption.name} on rank{'s' * (len(found) > 1)} {', '.join(map(str, sorted(found)))}"
        for interruption, found in ranks.items()
    )


class RestartError(Exception):
    """The base of what ends a rank's part in the wrapped call."""


class RestartAbort(BaseException):
    """Raised by a hook (`hpc_elastic.inprocess.hooks.RetryController`, say) or by the function: no more restarts.

    Under ``hpc-elastic`` the process then ends, and the agent's restart budget decides what is next.
    """


class HealthCheckError(RestartError):
    """The health check after a fault failed; its ``__cause__`` is what the check raised. The others go on alone."""


class InternalError(RestartError):
    """The restart group itself can't continue: its store is gone, for example."""


class TimeoutError(RestartError):
    """A hook took longer than its timeout."""


class CallPhase(enum.Enum):
    JOINING = "joining"
    """Waits for all ranks to be there: the initial barrier."""
    ASSIGNING = "assigning"
    """`rank_assignment`, `rank_filter`; RANK and WORLD_SIZE are exported."""
    STARTING = "starting"
    RUNNING = "running"
    """`initialize`, `health_check`, then the function, or a spare's wait."""
    COMPLETING = "completing"
    ABORTING = "aborting"
    """Last call and `abort`, in the monitor thread."""
    FINALIZING = "finalizing"
    CHECKING = "checking"
    TERMINATING = "terminating"
    """The termination barrier; garbage is collected."""
    REPLACING = "replacing"
    """Fresh processes are waited for in dead ones' places, where an agent starts them."""
    LEAVING = "leaving"
    """This rank ends; the others go on without it."""
    RETURNED = "returned"
    LEFT = "left"


class CallEvent(enum.Enum):
    ALL_CAME = "all came"
    ASSIGNED = "assigned"
    DONE = "done"
    """This rank's part: the function returned, or some other rank completed while this spare waited."""
    ALL_COMPLETED = "all completed"
    INTERRUPTED = "interrupted"
    """A fault, here or elsewhere."""
    ABORTED = "aborted"
    FINALIZED = "finalized"
    HEALTHY = "healthy"
    DECIDED = "decided"
    FAILED = "failed"
    """Something raised that ends this rank."""
    SAID = "said"


TRANSITIONS: dict[CallPhase, dict[CallEvent, CallPhase]] = {
    CallPhase.JOINING: {CallEvent.ALL_CAME: CallPhase.ASSIGNING, CallEvent.FAILED: CallPhase.LEFT},
    CallPhase.ASSIGNING: {CallEvent.ASSIGNED: CallPhase.STARTING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.STARTING: {CallEvent.ALL_CAME: CallPhase.RUNNING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.RUNNING: {
        CallEvent.DONE: CallPhase.COMPLETING,
        CallEvent.INTERRUPTED: CallPhase.ABORTING,
        CallEvent.FAILED: CallPhase.LEAVING,
    },
    CallPhase.COMPLETING: {
        CallEvent.ALL_COMPLETED: CallPhase.RETURNED,
        CallEvent.INTERRUPTED: CallPhase.ABORTING,
        CallEvent.FAILED: CallPhase.LEAVING,
    },
    CallPhase.ABORTING: {CallEvent.ABORTED: CallPhase.FINALIZING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.FINALIZING: {CallEvent.FINALIZED: CallPhase.CHECKING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.CHECKING: {CallEvent.HEALTHY: CallPhase.TERMINATING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.TERMINATING: {CallEvent.ALL_CAME: CallPhase.REPLACING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.REPLACING: {CallEvent.DECIDED: CallPhase.ASSIGNING, CallEvent.FAILED: CallPhase.LEAVING},
    CallPhase.LEAVING: {CallEvent.SAID: CallPhase.LEFT},
    CallPhase.RETURNED: {},
    CallPhase.LEFT: {},
}


def next_phase(phase: CallPhase, event: CallEvent) -> CallPhase:
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise IllegalTransitionError(state=phase.value, event=event.value) from None
