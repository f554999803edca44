"""The table of phases: complete, and what it refuses."""

from __future__ import annotations

import pickle

import pytest

from hpc_elastic.inprocess.life import BARRIERS, RESTART, TRANSITIONS, Event, IllegalEventError, Phase, next_phase
from hpc_elastic.inprocess.store import StoreMixin

pytestmark = pytest.mark.torch


def walk(*events: Event) -> Phase:
    phase = Phase.JOINING
    for event in events:
        phase = next_phase(phase, event)
    return phase


STARTED = (Event.ALL_CAME, Event.ASSIGNED, Event.ALL_CAME)
RECOVERED = (
    Event.INTERRUPTED,
    Event.ABORTED,
    Event.FINALIZED,
    Event.HEALTHY,
    Event.ALL_CAME,
    Event.DECIDED,
    Event.ASSIGNED,
)


def test_a_call_without_a_fault() -> None:
    assert walk(*STARTED, Event.DONE, Event.ALL_COMPLETED) is Phase.RETURNED


def test_a_fault_starts_the_next_iteration() -> None:
    assert walk(*STARTED, *RECOVERED) is Phase.STARTING


def test_a_rank_that_is_done_runs_again_where_another_fails_before_all_are() -> None:
    assert walk(*STARTED, Event.DONE, *RECOVERED, Event.ALL_CAME) is Phase.RUNNING


@pytest.mark.parametrize("phase", [phase for phase in Phase if Event.FAILED in TRANSITIONS[phase]])
def test_whatever_fails_after_the_initial_barrier_is_told_to_the_others(phase: Phase) -> None:
    wanted = Phase.LEFT if phase is Phase.JOINING else Phase.LEAVING
    assert next_phase(phase, Event.FAILED) is wanted


def test_only_the_ends_have_no_way_on() -> None:
    assert {phase for phase in Phase if not TRANSITIONS[phase]} == {Phase.RETURNED, Phase.LEFT}


def test_every_other_event_is_refused_and_the_error_pickles() -> None:
    for phase in Phase:
        for event in set(Event) - set(TRANSITIONS[phase]):
            with pytest.raises(IllegalEventError) as caught:
                next_phase(phase, event)
            copy = pickle.loads(pickle.dumps(caught.value))
            assert (copy.phase, copy.event, str(copy)) == (phase, event, str(caught.value))


def test_the_restart_that_is_drawn_is_a_whole_call() -> None:
    assert walk(*RESTART) is Phase.RETURNED
    assert all(callable(getattr(StoreMixin, name)) for name in BARRIERS.values())
    assert sorted(BARRIERS.values()) == sorted(
        (
            StoreMixin.INITIAL_BARRIER,
            StoreMixin.ITERATION_BARRIER,
            StoreMixin.COMPLETION_BARRIER,
            StoreMixin.TERMINATION_BARRIER,
        )
    )
