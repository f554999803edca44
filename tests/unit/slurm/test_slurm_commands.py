"""Argument lists and environments; which error a recorded message means, on one line."""

from __future__ import annotations

import re
import time

import pytest
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm import commands
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import (
    JobId,
    JobNotPendingError,
    RequeueDisabledError,
    SlurmError,
    SlurmPermissionError,
    SlurmUnavailableError,
    UnknownJobError,
    classify,
    one_line,
    scrubbed_environment,
    step_gpu_flags,
)
from hpc_elastic.slurm.job_environment import HostlistError
from hpc_elastic.slurm.job_state import parse_show_job
from tests.rigs.captures import DATA, VERSIONS, captured, exists
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeJob, FakeSlurm

FLAGS = ["--ntasks-per-node=1", "--overlap", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
AGENT = ["/usr/bin/python3", "-m", "hpc_elastic", "agent", "/runs/a b"]


@pytest.mark.parametrize(
    ("count", "options", "head", "tail"),
    [
        (4, {}, ["-N4", "-n4"], []),
        (2, {"exclude": []}, ["-N2", "-n2"], []),
        (2, {"exclude": ["n3", "n4"], "extra": ["--mpi=none"]}, ["-N2", "-n2"], ["--exclude=n[3-4]", "--mpi=none"]),
        (1, {"where": ["n3"]}, ["-N1", "-n1", "-w", "n3"], []),
    ],
)
def test_one_agent_per_node(count: int, options: dict[str, list[str]], head: list[str], tail: list[str]) -> None:
    assert commands.srun_agents(count, AGENT, **options) == ["srun", *head, *FLAGS, *tail, *AGENT]


@pytest.mark.parametrize("options", [{"exclude": ["None assigned"]}, {"where": ["n3;id"]}])
def test_what_is_no_node_reaches_no_srun(options: dict[str, list[str]]) -> None:
    with pytest.raises(HostlistError):
        commands.srun_agents(1, AGENT, **options)


def test_what_would_overrule_sruns_flags_is_scrubbed_from_every_recorded_batch_environment() -> None:
    seen = set()
    for path in DATA.glob("*/env-*batch.txt"):
        env = dict(line.split("=", 1) for line in path.read_text().splitlines())
        left = commands.scrubbed_environment(env)
        seen |= set(env) - set(left)
        assert "SLURM_JOB_ID" in left
        assert "SLURM_JOB_NODELIST" in left
        words = r"NTASKS|NPROCS|TASKS_PER_NODE|CPUS_PER_TASK|TRES|GPUS_PER|BIND|MEM_"
        assert not [name for name in left if re.search(rf"^SLURM_(?!.*GROUP).*({words})|^SLURM_STEP", name)]
    assert seen >= {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_EXPORT_ENV"}


def test_personal_formats_and_filters_do_not_reach_what_is_parsed() -> None:
    env = {
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_USERS": "bob",
        "SINFO_FORMAT": "%n",
        "SCANCEL_INTERACTIVE": "1",
        "PATH": "/bin",
    }
    left = commands.command_environment({**env, "SLURM_TIME_FORMAT": "%s", "SLURM_CONF": "/c"})
    assert left == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


def test_a_submission_from_inside_a_job_carries_nothing_of_that_job() -> None:
    env = {
        "SLURM_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURMD_NODENAME": "n1",
        "SRUN_DEBUG": "3",
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_CONF": "/c",
        "SLURM_CLUSTERS": "a",
        "SBATCH_WAIT": "1",
        "SBATCH_ACCOUNT": "project",
        "SBATCH_PARTITION": "gpu",
        "HOME": "/home/alice",
    }
    assert commands.submission_environment(env, overruled=["SBATCH_PARTITION"]) == {
        "SLURM_CONF": "/c",
        "SLURM_CLUSTERS": "a",
        "SBATCH_ACCOUNT": "project",
        "HOME": "/home/alice",
    }
    outside = {"CUDA_VISIBLE_DEVICES": "1", "HOME": "/home/alice"}
    assert commands.submission_environment(outside) == outside


def test_a_worker_submits_nothing_of_its_run() -> None:
    """The tags alone would have the other job's processes ended by the agents of this run."""
    run = {
        "HPC_ELASTIC_TAG": "run:host:agent",
        "HPC_ELASTIC_NODE_TAG": "run:host",
        "HPC_ELASTIC_RUN_DIR": "/runs/x",
        "HPC_ELASTIC_HEARTBEAT": "/dev/shm/x",
        "HPC_ELASTIC_RING_WAIT": "300",
        "RANK": "3",
        "MASTER_ADDR": "10.0.0.1",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_ERROR_FILE": "/runs/x/error.json",
    }
    own = {"HPC_ELASTIC_NODES": "4", "HPC_ELASTIC_PROFILE": "big", "HOME": "/home/alice", "OMP_NUM_THREADS": "4"}
    assert commands.submission_environment({**run, **own}) == own
    users = {"RANK": "low", "MASTER_ADDR": "me", "HPC_ELASTIC_RING_WAIT": "60", **own}
    assert commands.submission_environment(users) == users, "no agent of ours has set them"


def test_jobs_of_another_cluster() -> None:
    job = JobId("12_3", "far")
    assert commands.scontrol(job, "requeue", str(job)) == ["scontrol", "-M", "far", "requeue", "12_3"]
    assert commands.scancel(job, signal="USR2", batch=True)[-3:] == ["--signal=USR2", "--batch", "12_3"]
    assert commands.scancel(job) == ["scancel", "-M", "far", "12_3"]
    assert commands.update(JobId("7"), Requeue="1") == ["scontrol", "update", "JobId=7", "Requeue=1"]
    assert commands.squeue([job, JobId("4", "far")])[:3] == ["squeue", "-M", "far"]
    assert commands.squeue([job, JobId("4", "far")])[-1] == "12_3,4"


def test_a_begin_time_is_never_sooner_than_slurm_can_bear() -> None:
    assert commands.soon() == "now+2"
    assert commands.soon(0.4) == "now+3"
    assert commands.soon(60) == "now+62"


def test_a_begin_time_is_by_slurms_clock() -> None:
    """scontrol counts ``now+…`` from its own host's, which may be minutes ahead."""
    slurm = FakeSlurm()
    client = SlurmClient(slurm, FakeClock())
    now = client.config().now
    slurm.jobs["7"] = FakeJob("7", "requeued-begintime")
    client.start_now(JobId("7"), delay=60)
    assert now is not None
    assert slurm.calls[-1][-1] == time.strftime("StartTime=%Y-%m-%dT%H:%M:%S", time.localtime(now + 62))


KINDS = {
    "err-sbatch-no-controller": SlurmUnavailableError,
    "err-scancel-no-controller": SlurmUnavailableError,
    "err-scontrol-requeue-no-controller": SlurmUnavailableError,
    "err-scontrol-show-job-no-controller": SlurmUnavailableError,
    "err-sinfo-no-controller": SlurmUnavailableError,
    "err-squeue-no-controller": SlurmUnavailableError,
    "err-srun-no-controller": SlurmUnavailableError,
    "err-scontrol-requeue-unknown-job": UnknownJobError,
    "err-scontrol-show-job-unknown": UnknownJobError,
    "err-scontrol-update-unknown-job": UnknownJobError,
    "err-squeue-unknown-job": UnknownJobError,
    "err-squeue-bad-job": UnknownJobError,
    "squeue-finished-past-minjobage": UnknownJobError,
    "scontrol-requeue-finished-past-minjobage": UnknownJobError,
    "err-scontrol-requeue-norequeue-job": RequeueDisabledError,
    "err-scontrol-requeue-other-users-job": SlurmPermissionError,
    "err-scontrol-update-other-users-job": SlurmPermissionError,
    "err-scancel-other-users-job": SlurmPermissionError,
    "err-scontrol-update-completed-job": SlurmError,
    "scontrol-update-comment-completed-job": SlurmError,
    "err-sbatch-bad-nodelist": SlurmError,
    "err-sbatch-bad-partition": SlurmError,
    "err-sbatch-bad-time": SlurmError,
    "err-sbatch-bad-option": SlurmError,
    "err-scontrol-update-bad-key": SlurmError,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KINDS)
def test_kinds(version: str, name: str) -> None:
    if not exists(version, name):
        assert "no-controller" in name  # recorded on three versions, not by all commands
        return
    rc, _, stderr = captured(version, name)
    assert rc != 0
    assert classify(stderr) is KINDS[name]


def test_what_owners_may_not_do_to_a_running_job() -> None:
    """As the four versions said, `scontrol update` of a running job's ExcNodeList, StartTime, NumNodes."""
    assert classify("Job is no longer pending execution for job 12\n") is JobNotPendingError
    assert classify("Requested operation not supported on this system for job 12\n") is SlurmError


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "err-sbatch-bad-partition",
            "invalid partition specified: nosuch; Batch job submission failed: Invalid partition name specified",
        ),
        ("err-sbatch-bad-time", "Invalid --time specification"),
        ("err-sbatch-bad-option", "unrecognized option '--nosuch'"),
        ("err-sbatch-bad-begin", "Invalid time specification (pos=0): yesterdayish; Invalid --begin specification"),
        ("err-scontrol-show-job-unknown", "Invalid job id specified"),
        (
            "err-sbatch-dos-lines",
            "Batch script contains DOS line breaks (\\r\\n); instead of expected UNIX line breaks (\\n)",
        ),
    ],
)
def test_one_line(version: str, name: str, line: str) -> None:
    assert one_line(captured(version, name)[2]) == line


def test_one_line_is_bounded() -> None:
    assert len(one_line("sbatch: error: " + "x" * 2000)) == 500
    assert one_line("") == ""


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}


def recorded(version: str, name: str) -> dict[str, str]:
    text = (DATA / version / f"env-{name}-batch.txt").read_text()
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_with_gpus_per_task_gives_an_agent_all_of_its_node(version: str) -> None:
    env = recorded(version, "gpus-per-task")
    (flag,) = step_gpu_flags(env)
    assert flag.startswith("--gpus-per-node=")
    assert int(flag.rpartition("=")[2]) >= 1
    assert not {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & set(scrubbed_environment(env))


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({"SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2"}, ("--gpus-per-node=2",)),
        ({"SLURM_GPUS": "a100:4", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ("--gpus-per-node=2",)),
        ({"SLURM_GPUS": "4", "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}, ()),
        ({"SLURM_GPUS": "4", "SLURMD_NODENAME": ""}, ("--gpus-per-node=2",)),  # salloc's shell, elsewhere
    ],
)
def test_a_total_is_as_many_on_each_node(env: dict[str, str], flags: tuple[str, ...]) -> None:
    assert step_gpu_flags({**JOB, **env}) == flags


@pytest.mark.parametrize("env", [{"SLURM_GPUS": "3"}, {"SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "3"}])
def test_a_total_that_is_not_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^--gpus=\d: .* ask with --gpus-per-node"):
        step_gpu_flags({**JOB, **env})


def test_what_another_job_asked_for_is_not_this_ones() -> None:
    """sbatch hands the variables of the job that it was called in on."""
    outer = {**JOB, "SLURM_GPUS": "7", "SLURM_GPUS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "2"}
    (per_node,) = parse_show_job(captured("22.05.8", "scontrol-show-job-running")[1])[:1]
    assert per_node.tres_asked == ("TresPerNode",)
    assert step_gpu_flags({**outer, "SLURM_GPUS_PER_TASK": "1"}, per_node) == ()
    assert step_gpu_flags(outer, replace(per_node, tres_asked=())) == ()
    total = replace(per_node, tres_asked=("TresPerJob",))
    assert step_gpu_flags({**outer, "SLURM_GPUS": "4"}, total) == ("--gpus-per-node=2",)


def test_no_step_hears_of_the_total_or_of_the_batch_hosts_gpus() -> None:
    env = {**JOB, "SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "0,1"}
    assert scrubbed_environment(env) == JOB
