"""The table of a rank's phases between the call and its end: `CallWrapper` carries it out."""

from __future__ import annotations

from enum import Enum

from hpc_elastic.errors import IllegalTransitionError


class CallPhase(Enum):
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


class CallEvent(Enum):
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
