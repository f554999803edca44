"""The table of phases: complete, and what it refuses."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.inprocess.life import (
    TRANSITIONS,
    CallEvent,
    CallPhase,
    next_phase,
)

pytestmark = pytest.mark.torch


def walk(*events: CallEvent) -> CallPhase:
    phase = CallPhase.JOINING
    for event in events:
        phase = next_phase(phase, event)
    return phase


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


def test_a_call_without_a_fault() -> None:
    assert walk(*STARTED, CallEvent.DONE, CallEvent.ALL_COMPLETED) is CallPhase.RETURNED


def test_a_fault_starts_the_next_iteration() -> None:
    assert walk(*STARTED, *RECOVERED) is CallPhase.STARTING


def test_a_rank_that_is_done_runs_again_where_another_fails_before_all_are() -> None:
    assert walk(*STARTED, CallEvent.DONE, *RECOVERED, CallEvent.ALL_CAME) is CallPhase.RUNNING


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
