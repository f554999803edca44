"""The states of workers."""

from __future__ import annotations

from hpc_elastic.agent.supervision import WORKER_STATE, Phase, WorkerState


def test_every_phase_but_the_last_has_a_state_of_the_workers() -> None:
    assert set(WORKER_STATE) == set(Phase) - {Phase.ENDED}
    running = {phase for phase, state in WORKER_STATE.items() if WorkerState.is_running(state)}
    assert running == {Phase.RUNNING, Phase.STOPPING, Phase.LEAVING}


def test_the_states_values_are_torchs() -> None:
    names = ("UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED")
    assert {state.name: state.value for state in WorkerState} == dict(zip(names, (0, 1, 2, 4, 8, 16, 32), strict=True))
    assert [state.name for state in WorkerState if WorkerState.is_running(state)] == ["HEALTHY", "UNHEALTHY"]
