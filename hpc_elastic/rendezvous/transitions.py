"""The one table of what may follow what in the log. docs/reference/states.md is generated from it."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.rendezvous.state import Status


class RoundEvent(str, Enum):
    """What a coordinator writes a record for."""

    TAKE_OVER = "take over"
    """A new coordinator; nothing else changes."""
    FREEZE = "freeze"
    """Enough nodes are here and the last call is over."""
    CONFIRM = "confirm"
    """All members have confirmed."""
    REOPEN = "reopen"
    """A member failed, was lost, or a node may come in: the next round."""
    ANNOUNCE = "announce"
    """Another number of nodes waits, or a node that never came is given up."""
    ASK = "ask"
    """A node has fallen silent on the network and is asked through the files, or has answered."""
    HEARD = "heard"
    """An agent heard a signal that may mean the job's end: the supervisor asks Slurm what it stands for."""
    NOTICE = "notice"
    """The job is going to be ended: whoever hears of it writes that."""
    AGREE = "agree"
    """The step after which all workers save, where there is a notice."""
    CLOSE = "close"
    """Done, given up, or cancelled."""


TRANSITIONS = MappingProxyType(
    {
        Status.JOINABLE: MappingProxyType(
            {
                RoundEvent.TAKE_OVER: Status.JOINABLE,
                RoundEvent.ANNOUNCE: Status.JOINABLE,
                RoundEvent.ASK: Status.JOINABLE,
                RoundEvent.HEARD: Status.JOINABLE,
                RoundEvent.NOTICE: Status.JOINABLE,
                RoundEvent.FREEZE: Status.FROZEN,
                RoundEvent.CLOSE: Status.CLOSED,
            }
        ),
        Status.FROZEN: MappingProxyType(
            {
                RoundEvent.TAKE_OVER: Status.FROZEN,
                RoundEvent.ASK: Status.FROZEN,
                RoundEvent.HEARD: Status.FROZEN,
                RoundEvent.NOTICE: Status.FROZEN,
                RoundEvent.CONFIRM: Status.FINAL,
                RoundEvent.REOPEN: Status.JOINABLE,
                RoundEvent.CLOSE: Status.CLOSED,
            }
        ),
        Status.FINAL: MappingProxyType(
            {
                RoundEvent.TAKE_OVER: Status.FINAL,
                RoundEvent.ANNOUNCE: Status.FINAL,
                RoundEvent.ASK: Status.FINAL,
                RoundEvent.HEARD: Status.FINAL,
                RoundEvent.NOTICE: Status.FINAL,
                RoundEvent.AGREE: Status.FINAL,
                RoundEvent.REOPEN: Status.JOINABLE,
                RoundEvent.CLOSE: Status.CLOSED,
            }
        ),
        Status.CLOSED: MappingProxyType({}),
    }
)


def next_status(status: Status, event: RoundEvent) -> Status:
    """The state that `event` leads to.

    Raises:
        IllegalTransitionError: the table has no such row.
    """
    try:
        return TRANSITIONS[status][event]
    except KeyError:
        raise IllegalTransitionError(state=status.value, event=event.value) from None
