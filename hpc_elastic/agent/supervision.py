"""The states of an agent: its phases with the one table of what may follow, and the worker group with torch's names.

docs/reference/exit-codes.md is generated from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from hpc_elastic.errors import IllegalTransitionError


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
