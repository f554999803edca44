"""The table of phases: complete, and what it refuses."""

from __future__ import annotations

from functools import reduce

import pytest

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.inprocess.state import TRANSITIONS, CallEvent, CallPhase, next_phase

pytestmark = pytest.mark.torch


STARTED = (CallEvent.ALL_CAME, CallEvent.ASSIGNED, CallEvent.ALL_CAME)
RECOVERED = (
    CallEvent.INTERRUPTED,
    CallEvent.ABORTED,
    CallEvent.FINALIZED,
    CallEvent.HEALTHY,
    CallEvent.ALL_CAME,
    CallEvent.DECIDED,
    CallEvent.ASSIGNED,
)


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ((*STARTED, CallEvent.DONE, CallEvent.ALL_COMPLETED), CallPhase.RETURNED),
        ((*STARTED, *RECOVERED), CallPhase.STARTING),
        # It is done, and another one fails before all are.
        ((*STARTED, CallEvent.DONE, *RECOVERED, CallEvent.ALL_CAME), CallPhase.RUNNING),
    ],
)
def test_where_a_call_gets(events: tuple[CallEvent, ...], phase: CallPhase) -> None:
    assert reduce(next_phase, events, CallPhase.JOINING) is phase


@pytest.mark.parametrize("phase", [phase for phase in CallPhase if CallEvent.FAILED in TRANSITIONS[phase]])
def test_whatever_fails_after_the_initial_barrier_is_told_to_the_others(phase: CallPhase) -> None:
    wanted = CallPhase.LEFT if phase is CallPhase.JOINING else CallPhase.LEAVING
    assert next_phase(phase, CallEvent.FAILED) is wanted


def test_only_the_ends_have_no_way_on() -> None:
    assert {phase for phase in CallPhase if not TRANSITIONS[phase]} == {CallPhase.RETURNED, CallPhase.LEFT}


def test_every_other_event_is_refused() -> None:
    for phase in CallPhase:
        for event in set(CallEvent) - set(TRANSITIONS[phase]):
            with pytest.raises(IllegalTransitionError):
                next_phase(phase, event)
