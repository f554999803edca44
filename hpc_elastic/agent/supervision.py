"""What an agent is doing, and what may follow: the one table. docs/reference/states.md is generated from it."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

from hpc_elastic.agent.worker import WorkerState
from hpc_elastic.errors import IllegalTransitionError


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
