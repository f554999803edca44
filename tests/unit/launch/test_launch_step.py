"""A run whose agents are the tasks of a step of the user's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.batch import StepRendezvous, StepRun, check_one_task_per_node, step_nodes
from hpc_elastic.slurm.job_environment import JobEnvironment
from tests.rigs.captures import DATA, VERSIONS, names
from tests.rigs.fake_clock import FakeClock


def load(version: str, name: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (DATA / version / f"{name}.txt").read_text().splitlines())


def task_of(version: str, pattern: str) -> tuple[JobEnvironment, dict[str, str]]:
    env = load(version, names(version, pattern)[0])
    return JobEnvironment.from_env(env), env


@pytest.mark.parametrize("version", VERSIONS)
def test_one_task_on_each_node_of_the_step_is_right_and_several_are_refused_with_the_way_out(version: str) -> None:
    job, _ = task_of(version, "env-plain-step-n*-task0")
    assert job.task is not None
    check_one_task_per_node(job.task)
    assert step_nodes(job) == ("n1", "n2", "n3", "n4")
    job, _ = task_of(version, "env-hetero-tasks-step-*-task0")
    assert job.task is not None
    with pytest.raises(
        UsageError, match=r"srun started 2 tasks on a node: .* srun -n2 --ntasks-per-node=1, and --nproc"
    ):
        check_one_task_per_node(job.task)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tasks_of_one_step_meet_and_those_of_others_do_not(version: str, tmp_path: Path) -> None:
    job, env = task_of(version, "env-plain-step-n*-task0")
    first, other = (StepRendezvous(tmp_path / "runs", job, env, FakeClock()) for _ in range(2))
    first.publish(StepRun(run_dir="/runs/r1", attempt=2))
    assert other.wait() == StepRun(run_dir="/runs/r1", attempt=2)
    assert oct((tmp_path / "runs" / ".steps").stat().st_mode)[-3:] == "700"
    for changed in ({"SLURM_STEP_LAUNCHER_PORT": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "7"}):
        # The same job id, months later; a requeue; the script's next step.
        later = {**env, **changed}
        stranger = StepRendezvous(tmp_path / "runs", JobEnvironment.from_env(later), later, FakeClock())
        with pytest.raises(UsageError, match="first task has not begun the run in 120 s"):
            stranger.wait()


def test_what_task_0_refused_reaches_the_others_and_only_what_is_old_is_cleaned_up(tmp_path: Path) -> None:
    job, env = task_of("22.05.8", "env-plain-step-n*-task0")
    rendezvous = StepRendezvous(tmp_path, job, env, FakeClock())
    rendezvous.publish(StepRun(refused=True))
    old = tmp_path / ".steps" / "1.0.0.5"
    old.mkdir()
    os.utime(old, (1, time.time() - 90000))
    rendezvous.clean()
    assert not old.exists()
    assert rendezvous.wait().refused
