"""What a rank does between the call and its end, as a table: `CallWrapper` carries it out."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a rank is in one wrapped call."""

    JOINING = "joining"
    """Waits for all ranks to be there: the initial barrier."""
    ASSIGNING = "assigning"
    """`rank_assignment`, `rank_filter`; RANK and WORLD_SIZE are exported."""
    STARTING = "starting"
    """The iteration barrier."""
    RUNNING = "running"
    """`initialize`, `health_check`, then the function, or a spare's wait."""
    COMPLETING = "completing"
    """The completion barrier."""
    ABORTING = "aborting"
    """Last call and `abort`, in the monitor thread."""
    FINALIZING = "finalizing"
    """`finalize`."""
    CHECKING = "checking"
    """`health_check`, after a fault."""
    TERMINATING = "terminating"
    """The termination barrier; garbage is collected."""
    REPLACING = "replacing"
    """Fresh processes are waited for in dead ones' places, where an agent starts them."""
    LEAVING = "leaving"
    """This rank ends; the others go on without it."""
    RETURNED = "returned"
    LEFT = "left"


class Event(Enum):
    """What happened in a phase."""

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
    """The members of the next iteration are known."""
    FAILED = "failed"
    """Something raised that ends this rank."""
    SAID = "said"
    """The others know that this rank is gone."""


TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.JOINING: {Event.ALL_CAME: Phase.ASSIGNING, Event.FAILED: Phase.LEFT},
    Phase.ASSIGNING: {Event.ASSIGNED: Phase.STARTING, Event.FAILED: Phase.LEAVING},
    Phase.STARTING: {Event.ALL_CAME: Phase.RUNNING, Event.FAILED: Phase.LEAVING},
    Phase.RUNNING: {
        Event.DONE: Phase.COMPLETING,
        Event.INTERRUPTED: Phase.ABORTING,
        Event.FAILED: Phase.LEAVING,
    },
    Phase.COMPLETING: {
        Event.ALL_COMPLETED: Phase.RETURNED,
        Event.INTERRUPTED: Phase.ABORTING,
        Event.FAILED: Phase.LEAVING,
    },
    Phase.ABORTING: {Event.ABORTED: Phase.FINALIZING, Event.FAILED: Phase.LEAVING},
    Phase.FINALIZING: {Event.FINALIZED: Phase.CHECKING, Event.FAILED: Phase.LEAVING},
    Phase.CHECKING: {Event.HEALTHY: Phase.TERMINATING, Event.FAILED: Phase.LEAVING},
    Phase.TERMINATING: {Event.ALL_CAME: Phase.REPLACING, Event.FAILED: Phase.LEAVING},
    Phase.REPLACING: {Event.DECIDED: Phase.ASSIGNING, Event.FAILED: Phase.LEAVING},
    Phase.LEAVING: {Event.SAID: Phase.LEFT},
    Phase.RETURNED: {},
    Phase.LEFT: {},
}


BARRIERS: dict[Phase, str] = {
    Phase.JOINING: "initial_barrier",
    Phase.STARTING: "iteration_barrier",
    Phase.COMPLETING: "completion_barrier",
    Phase.TERMINATING: "termination_barrier",
}
"""Where all ranks meet: the method of `hpc_elastic.inprocess.store.StoreMixin`."""

RESTART: tuple[Event, ...] = (
    Event.ALL_CAME, Event.ASSIGNED, Event.ALL_CAME,
    Event.INTERRUPTED, Event.ABORTED, Event.FINALIZED, Event.HEALTHY, Event.ALL_CAME, Event.DECIDED, Event.ASSIGNED,
    Event.ALL_CAME, Event.DONE, Event.ALL_COMPLETED,
)  # fmt: skip
"""A call with one fault, on every rank that stays: what docs/ draws."""


class IllegalEventError(Exception):
    """A phase met an event that the table does not know: a defect of this package."""

    def __init__(self, phase: Phase, event: Event) -> None:
        super().__init__(phase, event)
        self.phase = phase
        self.event = event

    def __str__(self) -> str:
        return f"in phase {self.phase.value!r}: unexpected event {self.event.value!r}"


def next_phase(phase: Phase, event: Event) -> Phase:
    """Raises: IllegalEventError: the table has no such row."""
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise IllegalEventError(phase, event) from None
