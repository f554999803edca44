"""Every environment that four versions of Slurm gave batch scripts, tasks and shells; their hostlists; and nonsense."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import (
    MAX_HOSTS,
    HostlistError,
    JobEnvironment,
    JobEnvironmentError,
    compress,
    device_count,
    expand,
    expand_counts,
    gpu_count,
    in_job,
)
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
def test_array_tasks_counts_of_tasks_and_requeues(version: str) -> None:
    for number in (1, 2, 3):
        env = load(DATA / version / f"env-array-task{number}-batch.txt")
        job = JobEnvironment.from_env(env)
        assert job.requeue_id == f"{env['SLURM_ARRAY_JOB_ID']}_{number}"
        assert (job.array_job_id, job.array_task_id) == (env["SLURM_ARRAY_JOB_ID"], str(number))
    (path,) = (DATA / version).glob("env-hetero-tasks-step-*-task2.txt")
    task = JobEnvironment.from_env(load(path)).task
    assert task is not None
    assert (task.tasks_per_node, task.procid, task.num_tasks) == ((2, 1), 2, 3)
    for name, count in (("requeue-first", 0), ("requeue", 1)):
        assert JobEnvironment.from_env(load(DATA / version / f"env-{name}-batch.txt")).restart_count == count


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
def test_outside_a_job_and_by_the_oldest_names(env: dict[str, str]) -> None:
    assert not in_job(env)
    with pytest.raises(JobEnvironmentError, match="not in a Slurm job"):
        JobEnvironment.from_env(env)
    job = JobEnvironment.from_env({**env, "SLURM_JOBID": "7", "SLURM_NODELIST": "a[1-2]"})
    assert in_job({"SLURM_JOBID": "7"})
    assert (job.job_id, job.nodes) == ("7", ("a1", "a2"))


# Suffixes after a second range: 24.11 learnt them; we read them whatever the version.
NEWER = {"n[1-2]-ib[0-1]x", "n[1-2].cluster.local", "tux[000-002]-[0-1]b"}
REFUSED = {"n[1-", "n[3-1]"}  # 20.11 and 22.05 expand "n[1-" to "n]"


def _rows(name: str, columns: int) -> list[tuple[str, ...]]:
    rows = []
    for version in VERSIONS:
        for line in (DATA / version / name).read_text().split("\n"):
            cells = line.split("\t")
            if len(cells) == columns:  # an error's second line is not a row
                rows.append((version, *cells))
    assert len(rows) >= 4 * 27
    return rows


@pytest.mark.parametrize(("version", "text", "rc", "names", "stderr"), _rows("hostlist-expand.tsv", 4))
def test_expands_as_slurm_does(version: str, text: str, rc: str, names: str, stderr: str) -> None:
    if text in REFUSED:
        with pytest.raises(HostlistError, match="invalid hostlist"):
            expand(text)
        return
    if not names and text in NEWER:
        assert version < "24"
        assert "Invalid" in stderr
        assert expand(text)
        return
    assert ",".join(expand(text)) == names


@pytest.mark.parametrize(
    ("version", "option", "names", "rc", "compressed", "stderr"),
    [row for row in _rows("hostlist-compress.tsv", 5) if row[1] == "hostlist"],
)
def test_compresses_as_slurm_does(version: str, option: str, names: str, rc: str, compressed: str, stderr: str) -> None:
    assert compress(expand(names)) == compressed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(null)", "can't be part"),
        ("None assigned", "can't be part"),
        ("n[1-2", "not closed"),
        ("n1]", "don't match"),
        ("n[[1]]", "don't match"),
        ("n[]", "not a number"),
        ("n[1-]", "not a number"),
        ("n[a-b]", "not a number"),
        ("n[1-2],", "missing at a comma"),
        (",n1", "missing at a comma"),
        ("-w,n1", "can't be a host name"),
        ("n1;reboot", "can't be part"),
        ("n1\nn2", "can't be part"),
        ("n\u0661", "can't be part"),
        ("n[\u0661]", "not a number"),
        (f"n[0-{MAX_HOSTS}]", "more than"),
        ("n[1-1000]m[1-1000]", "more than"),
        ("n[1-100000],m[1-100000]", "more than"),
        ("n[1-999999999999999999999999]", "not a number"),
        ("x" * 300, "can't be a host name"),
    ],
)
def test_refuses_what_is_no_hostlist_and_says_why(text: str, why: str) -> None:
    with pytest.raises(HostlistError) as caught:
        expand(text)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_largest_list_is_expanded() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize("name", ["", "-n1", "a b", "n[1]", "a,b", "(null)", "None assigned", "n1\n"])
def test_compress_refuses_what_is_no_host_name(name: str) -> None:
    with pytest.raises(HostlistError):
        compress(["n1", name])


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,5}[0-9]{0,4}(\.[a-z]{2})?", fullmatch=True), max_size=20))
def test_compress_loses_nothing(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == tuple(hosts)


@pytest.mark.parametrize(
    "text", ["", "x", "4(x)", "4(x0)", "4x2", "-1", "4(x2", ",", "1,,2", f"1(x{MAX_HOSTS + 1})", "٣"]
)
def test_counts_refuse_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|counts no node"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", 4),
        ("0", 0),
        ("a100:4", 4),
        ("a100:2,v100:1", 3),
        ("gpu:4(S:0-1)", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2)", 3),
        ("gpu:1,nic:2", 1),
        ("gpu", 1),
        ("gpu:tesla", 1),
        ("gres/gpu=2", 2),
        ("gres/gpu:a100=2", 2),
        ("gres:gpu:3", 3),
        ("gpu:nvidia_a100-sxm4-80gb:8", 8),
    ],
)
def test_gpus(text: str, count: int) -> None:
    assert gpu_count(text) == count


@pytest.mark.parametrize("text", ["", "four gpus", "gpu:", ":4", "gpu:4,", "gpu:-1:$"])
def test_gpus_refuse_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match=r"empty entry|is not a count"):
        gpu_count(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-8932f937-d72c,GPU-11", 2),
        ("NoDevFiles", 0),
        ("0-3", 4),
        ("MIG-1/2/0", 1),
    ],
)
def test_devices(text: str, count: int) -> None:
    assert device_count(text) == count
