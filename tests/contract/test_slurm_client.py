"""One suite for `SlurmClient`, here on recordings of four versions; tests/slurm runs it on a real Slurm."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import (
    JobId,
    JobNotPendingError,
    RequeueDisabledError,
    SlurmError,
    SubmissionRefusedError,
    UnknownJobError,
)
from hpc_elastic.slurm.job_environment import HostlistError
from hpc_elastic.slurm.job_state import JobPhase, JobState
from tests.rigs.captures import VERSIONS
from tests.rigs.fake_slurm import FakeSlurm

NOBODYS = JobId("99999")
_COUNTER = itertools.count()


@dataclass
class World:
    """A Slurm with four nodes n1..n4."""

    client: SlurmClient
    folder: Path
    """Where scripts are put, and where jobs may write."""
    patience: float
    """Seconds until what is waited for must hold."""
    client_uid: int = 0
    """Whose jobs they are."""

    def submit(self, *options: str) -> JobId:
        script = self.folder / f"job{next(_COUNTER)}.sh"
        lines = [f"#SBATCH {option}\n" for option in options]
        script.write_text("#!/bin/bash\n" + "".join(lines) + "exec sleep 600\n")
        return self.client.submit(str(script))

    def wait(self, job: JobId, condition: Callable[[JobState], bool]) -> JobState:
        deadline = time.monotonic() + self.patience
        while True:
            state = self.client.job_state(job)
            assert state is not None
            if condition(state):
                return state
            assert state.phase is not JobPhase.FINISHED or condition(state), state
            assert time.monotonic() < deadline, state
            time.sleep(0.1)

    def running(self, *options: str) -> JobId:
        job = self.submit(*options)
        self.wait(job, lambda state: state.phase is JobPhase.RUNNING)
        return job


@pytest.fixture(params=VERSIONS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(SlurmClient(FakeSlurm(request.param), SystemClock()), tmp_path, patience=0)


def test_submits_and_shows(world: World) -> None:
    job = world.running("--job-name=mine", "--nodes=1")
    state = world.client.job_state(job)
    assert state is not None
    assert (state.job_id, state.name, state.state, state.restarts) == (job.number, "mine", "RUNNING", 0)
    assert state.nodes
    assert [queued.state for queued in world.client.queue_states([job])] == ["RUNNING"]


def test_two_jobs_are_two(world: World) -> None:
    first, second = world.submit("--hold"), world.submit("--hold")
    assert first != second
    assert {state.job_id for state in world.client.queue_states([first, second])} == {first.number, second.number}


def test_a_refused_submission_says_why(world: World) -> None:
    with pytest.raises(SubmissionRefusedError) as caught:
        world.submit("--partition=nowhere")
    assert "invalid partition specified: nowhere" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(SubmissionRefusedError, match="Unable to open file"):
        world.client.submit(str(world.folder / "absent.sh"))


def test_a_held_job_is_pending(world: World) -> None:
    job = world.submit("--hold")
    state = world.wait(job, lambda state: state.held)
    assert (state.phase, state.reason, state.nodes) == (JobPhase.PENDING, "JobHeldUser", ())


def test_an_unknown_job_is_no_error_to_ask_for(world: World) -> None:
    assert world.client.job_state(NOBODYS) is None
    assert world.client.job_states(NOBODYS) == ()
    assert world.client.queue_states([NOBODYS]) == ()
    assert world.client.accounted([NOBODYS]) == ()
    known = world.submit("--hold")
    assert [state.job_id for state in world.client.queue_states([NOBODYS, known])] == [known.number]
    world.client.cancel(NOBODYS)


def test_an_unknown_job_can_not_be_changed(world: World) -> None:
    with pytest.raises(UnknownJobError):
        world.client.requeue(NOBODYS)
    with pytest.raises(UnknownJobError):
        world.client.start_now(NOBODYS)


def test_requeue_then_start_now(world: World) -> None:
    job = world.running("--requeue")
    world.client.requeue(job)
    state = world.wait(job, lambda state: state.phase is JobPhase.PENDING)
    assert (state.restarts, state.requeue, state.nodes) == (1, True, ())
    world.client.start_now(job)
    again = world.wait(job, lambda state: state.phase is JobPhase.RUNNING)
    assert again.restarts == 1


def test_requeue_may_be_off_and_its_owner_turns_it_on(world: World) -> None:
    job = world.running("--no-requeue")
    with pytest.raises(RequeueDisabledError):
        world.client.requeue(job)
    world.client.allow_requeue(job)
    world.client.requeue(job)
    world.wait(job, lambda state: state.restarts == 1)


def test_nodes_are_excluded_while_pending_only(world: World) -> None:
    pending, running = world.submit("--hold"), world.running()
    world.client.exclude_nodes(pending, ["n1", "n2"])
    with pytest.raises(SlurmError):
        world.client.exclude_nodes(pending, ["n1", "n99"])
    with pytest.raises(JobNotPendingError):
        world.client.exclude_nodes(running, ["n1"])
    with pytest.raises(HostlistError):
        world.client.exclude_nodes(pending, ["None assigned"])


def test_excluded_nodes_are_shown_and_cleared(world: World) -> None:
    job = world.submit("--hold")
    world.client.exclude_nodes(job, ["n1", "n2"])
    state = world.client.job_state(job)
    assert state is not None
    assert state.excluded == ("n1", "n2")
    world.client.exclude_nodes(job, [])
    state = world.client.job_state(job)
    assert state is not None
    assert state.excluded == ()


def test_who_waits_for_a_jobs_end_is_found(world: World) -> None:
    job = world.running()
    uid = world.client_uid
    assert world.client.dependents(job, uid=uid) == ()
    other = world.submit(f"--dependency=afterok:{job}")
    follower = world.submit(f"--dependency=afterany:{job}")
    assert world.client.dependents(job, uid=uid) == (follower.number,)
    assert world.client.dependents(other, uid=uid) == ()


def test_a_script_is_tried_out_and_not_submitted(world: World) -> None:
    script = world.folder / "tried.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1\ntrue\n")
    assert world.client.would_run(str(script)) is None
    assert world.client.would_run(str(script), extra=["--exclude=n1"]) is None
    why = world.client.would_run(str(script), extra=["--partition=nowhere"])
    assert why is not None
    assert "invalid partition specified: nowhere" in why
    assert world.client.dependents(NOBODYS, uid=world.client_uid) == ()


def test_the_node_range_of_a_pending_job_is_set(world: World) -> None:
    job = world.submit("--hold", "--nodes=1")
    world.client.set_num_nodes(job, 2, 3)
    state = world.client.job_state(job)
    assert state is not None
    assert state.min_nodes == 2


def test_cancels_pending_and_running(world: World) -> None:
    for job in (world.submit("--hold"), world.running()):
        world.client.cancel(job)
        state = world.wait(job, lambda state: state.phase is JobPhase.FINISHED)
        assert state.state == "CANCELLED"
        world.client.cancel(job)  # once more is no error


def test_a_notice_ends_no_job_and_is_no_error_where_there_is_none(world: World) -> None:
    pending = world.submit("--hold")
    world.client.notify(pending)
    state = world.client.job_state(pending)
    assert state is not None
    assert state.phase is JobPhase.PENDING
    world.client.cancel(pending)
    world.client.notify(pending)


def test_an_ended_job_can_not_be_changed(world: World) -> None:
    job = world.running()
    world.client.cancel(job)
    world.wait(job, lambda state: state.phase is JobPhase.FINISHED)
    with pytest.raises(SlurmError):
        world.client.set_num_nodes(job, 1, 1)


def test_config_and_partitions(world: World) -> None:
    config = world.client.config()
    assert len(config.version) == 3
    assert config.kill_wait > 0
    assert config.slurmd_timeout > 0
    assert config.job_requeue
    partitions = world.client.partitions()
    (default,) = [partition for partition in partitions if partition.default]
    assert len(default.names) == 4
    assert [partition.name for partition in world.client.partitions(default.name)] == [default.name]
    assert world.client.partitions("nowhere") == ()
