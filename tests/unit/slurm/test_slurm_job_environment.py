"""Every environment that four versions of Slurm gave batch scripts, tasks and shells; and nonsense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import JobEnvironment, JobEnvironmentError, expand, in_job
from tests.rigs.captures import DATA, VERSIONS

ALL = sorted(DATA.glob("*/env-*.txt"))


def load(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def ids(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def expected_gpus(name: str) -> int:
    if "gpus-per-task" in name:
        return 1
    return 2 if any(word in name for word in ("gres-gpu2", "gpus-per-node", "exclusive")) else 0


def test_every_capture_is_there() -> None:
    assert {path.parent.name for path in ALL} == set(VERSIONS)
    assert len(ALL) > 220


@pytest.mark.parametrize("path", ALL, ids=ids)
def test_captured_environment(path: Path) -> None:
    """The file's name says where it was taken: ``step-HOST-taskN``, ``batch`` or ``shell``."""
    env = load(path)
    assert in_job(env)
    job = JobEnvironment.from_env(env)
    assert job.job_id == env["SLURM_JOB_ID"]
    assert job.cluster == "rig"
    step = re.search(r"step-(n\d)-task(\d+)", path.name)
    if step:
        host, task_number = step[1], int(step[2])
        assert job.task is not None
        assert job.task.procid == task_number
        assert job.node == host
        assert job.task.step_id == 0
        assert sum(job.task.tasks_per_node) == job.task.num_tasks
        assert job.task.step_nodes
    else:
        assert job.task is None
        if "shell" in path.name:
            assert job.node is None
        else:
            assert job.node == job.nodes[0]  # the batch host is the first node
        assert job.requeue_id.startswith(job.job_id) or "array" in path.name
    assert job.gpus == expected_gpus(path.name)


@pytest.mark.parametrize("version", VERSIONS)
def test_array_tasks_requeue_by_array_id(version: str) -> None:
    for number in (1, 2, 3):
        env = load(DATA / version / f"env-array-task{number}-batch.txt")
        job = JobEnvironment.from_env(env)
        assert job.requeue_id == f"{env['SLURM_ARRAY_JOB_ID']}_{number}"
        assert (job.array_job_id, job.array_task_id) == (env["SLURM_ARRAY_JOB_ID"], str(number))


@pytest.mark.parametrize("version", VERSIONS)
def test_heterogeneous_task_counts(version: str) -> None:
    (path,) = (DATA / version).glob("env-hetero-tasks-step-*-task2.txt")
    job = JobEnvironment.from_env(load(path))
    assert job.task is not None
    assert job.task.tasks_per_node == (2, 1)
    assert (job.task.procid, job.task.num_tasks) == (2, 3)


@pytest.mark.parametrize("version", VERSIONS)
def test_restart_count(version: str) -> None:
    assert JobEnvironment.from_env(load(DATA / version / "env-requeue-first-batch.txt")).restart_count == 0
    assert JobEnvironment.from_env(load(DATA / version / "env-requeue-batch.txt")).restart_count == 1


TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "r[1-2]n[01-02]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURMD_NODENAME": "r2n01",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "r[1-2]n[01-02]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1(x2)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_CPUS_ON_NODE": "64",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NODELIST": "n[7-8]", "SLURM_STEP_NUM_NODES": "2"},
        {"SLURMD_NODENAME": ""},
        {"SLURMD_NODENAME": "r1n03"},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_NNODES": "2"},
        {"SLURM_TASKS_PER_NODE": "64(x4)"},
        *({"SLURM_STEP_ID": step} for step in ("-5", "-6", "4294967291", "4294967290")),
    ],
)
def test_another_jobs_step_and_a_special_one_are_none(changes: dict[str, str]) -> None:
    """A job that was submitted, or allocated, from a step has its variables."""
    assert JobEnvironment.from_env({**TASK, "SLURM_TASKS_PER_NODE": "4(x2),1(x2)", "SLURM_NNODES": "4"}).task
    assert JobEnvironment.from_env({**TASK, **changes}).task is None


def test_multi_dimensional_lists_and_counts() -> None:
    job = JobEnvironment.from_env(TASK)
    assert job.nodes == expand("r1n01,r1n02,r2n01,r2n02")
    assert job.task is not None
    assert job.task.tasks_per_node == (4, 4, 1, 1)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_JOB_ID", "twelve"),
        ("SLURM_JOB_ID", "0"),
        ("SLURM_JOB_ID", "-1"),
        ("SLURM_JOB_ID", "9" * 30),
        ("SLURM_ARRAY_TASK_ID", "x"),
        ("SLURM_RESTART_COUNT", "once"),
        ("SLURM_JOB_NODELIST", "n[1-"),
        ("SLURM_JOB_NODELIST", "None assigned"),
        ("SLURM_JOB_NUM_NODES", "5"),
        ("SLURM_JOB_NUM_NODES", "four"),
        ("SLURM_STEP_ID", "zero"),
        ("SLURM_STEP_NODELIST", "n[1"),
        ("SLURM_STEP_TASKS_PER_NODE", "one"),
        ("SLURM_PROCID", "first"),
        ("SLURM_GPUS_ON_NODE", "four of them"),
    ],
)
def test_nonsense_names_variable_and_value(variable: str, value: str) -> None:
    with pytest.raises(JobEnvironmentError) as caught:
        JobEnvironment.from_env({**TASK, variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NUM_TASKS"])
def test_what_is_missing_is_named(variable: str) -> None:
    env = {key: value for key, value in TASK.items() if key != variable}
    with pytest.raises(JobEnvironmentError, match=variable):
        JobEnvironment.from_env(env)


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "gpu:4(S:0-1)"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_JOB_GPUS": "0,1,2"}, 3),
        ({"SLURM_JOB_GPUS": "0,1,2", "SLURM_STEP_GPUS": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, 4),
    ],
)
def test_gpus_on_the_node(env: dict[str, str], gpus: int) -> None:
    assert JobEnvironment.from_env({**TASK, **env}).gpus == gpus


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_CONF": "/etc/slurm.conf"}])
def test_outside_a_job(env: dict[str, str]) -> None:
    assert not in_job(env)
    with pytest.raises(JobEnvironmentError, match="not in a Slurm job"):
        JobEnvironment.from_env(env)


def test_the_oldest_names_still_count() -> None:
    job = JobEnvironment.from_env({"SLURM_JOBID": "7", "SLURM_NODELIST": "a[1-2]"})
    assert in_job({"SLURM_JOBID": "7"})
    assert (job.job_id, job.nodes) == ("7", ("a1", "a2"))
