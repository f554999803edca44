"""What an agent does next: every phase with every event."""

from __future__ import annotations

import pytest

from hpc_elastic.agent.supervision import TRANSITIONS, WORKER_STATE, Event, Phase, WorkerState, next_phase


def test_every_phase_has_a_row_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(Phase)
    reached, new = {Phase.JOINING}, {Phase.JOINING}
    while new:
        new = {after for phase in new for after in TRANSITIONS[phase].values()} - reached
        reached |= new
    assert reached == set(Phase)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
@pytest.mark.parametrize("event", [Event.CLOSED, Event.LEAVE])
def test_the_end_is_never_far(phase: Phase, event: Event) -> None:
    """Where workers may run they are ended first."""
    after = next_phase(phase, event)
    with_workers = phase in (Phase.RUNNING, Phase.DONE, Phase.STOPPING, Phase.LEAVING)
    assert after is (Phase.LEAVING if with_workers else Phase.ENDED)
    if with_workers:
        assert next_phase(after, Event.STOPPED) is Phase.ENDED


def test_workers_are_started_only_from_a_confirmed_round() -> None:
    assert [phase for phase, row in TRANSITIONS.items() if Phase.RUNNING in row.values()] == [Phase.READY]


def test_every_phase_but_the_last_has_a_state_of_the_workers() -> None:
    assert set(WORKER_STATE) == set(Phase) - {Phase.ENDED}
    running = {phase for phase, state in WORKER_STATE.items() if WorkerState.is_running(state)}
    assert running == {Phase.RUNNING, Phase.STOPPING, Phase.LEAVING}


def test_the_states_values_are_torchs() -> None:
    names = ("UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED")
    assert {state.name: state.value for state in WorkerState} == dict(zip(names, (0, 1, 2, 4, 8, 16, 32), strict=True))
    assert [state.name for state in WorkerState if WorkerState.is_running(state)] == ["HEALTHY", "UNHEALTHY"]
