"""What a worker finds in its environment, and the command line of each container runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.worker_environment import (
    RoundFacts,
    WorkerSettings,
    enter_container,
    exit_of_script,
    needed_mounts,
    pyxis_arguments,
    worker_environment,
)
from hpc_elastic.rendezvous.proposals import RankLayout
from hpc_elastic.run.spec import Container, ContainerImage, ContainerMount, Runtime
from hpc_elastic.slurm.job_environment import without_run_variables

DOCS = Path(__file__).parents[3] / "docs/reference/environment.md"
LAYOUT = RankLayout(group_rank=1, group_world_size=3, first_rank=4, local_world_size=2, world_size=9)
SPEC = WorkerSettings(run_id="20261121-train-9f3c", role="trainer", max_restarts=3)
FACTS = RoundFacts(
    spec=SPEC,
    layout=LAYOUT,
    round=2,
    master_addr="10.0.0.1",
    master_port=29501,
    agent_store=True,
    run_dir="/runs/x",
    attempt=1,
    tag="uid:host:agent",
)
TORCHRUNS = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "9",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "9",
    "ROLE_NAME": "trainer",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "20261121-train-9f3c",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/runs/x/error.json",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}
OURS = {
    "HPC_ELASTIC_RUN_DIR": "/runs/x",
    "HPC_ELASTIC_ATTEMPT": "1",
    "HPC_ELASTIC_TAG": "uid:host:agent",
    "HPC_ELASTIC_AGENT_STORE": "20261121-train-9f3c 10.0.0.1 29501",
    "PYTHONFAULTHANDLER": "1",
}


def environment(base: dict[str, str] | None = None, facts: RoundFacts = FACTS, local_rank: int = 1) -> dict[str, str]:
    return worker_environment(base or {}, facts, local_rank=local_rank, error_file="/runs/x/error.json")


def test_a_virtual_local_rank_is_0_and_sees_its_own_gpu_alone() -> None:
    """As torchrun's ``--virtual-local-rank``."""
    facts = replace(FACTS, spec=replace(SPEC, virtual_local_rank=True))
    for base, gpu in (({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4, 6"}, "6"), ({"CUDA_VISIBLE_DEVICES": "4"}, "")):
        env = environment(dict(base), facts, local_rank=1)
        assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", gpu)
        assert env["RANK"] == environment(local_rank=1)["RANK"]


def test_a_wandb_run_is_each_ranks_own_and_the_same_in_every_round_and_attempt() -> None:
    facts = replace(FACTS, spec=replace(SPEC, wandb=True))
    rank_5 = environment({}, facts)
    assert (rank_5["WANDB_RUN_ID"], rank_5["WANDB_RESUME"]) == ("20261121-train-9f3c-rank5", "allow")
    later = replace(facts, round=7, attempt=3, layout=replace(LAYOUT, first_rank=0))
    assert environment({}, later, local_rank=0)["WANDB_RUN_ID"] == "20261121-train-9f3c"
    own = environment({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, facts)
    assert (own["WANDB_RUN_ID"], own["WANDB_RESUME"]) == ("mine", "must")
    assert "WANDB_RUN_ID" not in environment()


def test_all_that_torchrun_gives_and_ours_is_added_to_the_agents_own_which_is_not_changed() -> None:
    """Also under torchrun, or in a shell where somebody exported a rank."""
    left = {key: "stale" for key in TORCHRUNS if key not in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")}
    base = {"PATH": "/bin", "USER_SETTING": "a b\nc", **left, "HPC_ELASTIC_TAG": "another:run:x"}
    before = dict(base)
    assert environment(base) == {**base, **TORCHRUNS, **OURS}
    assert base == before


def test_what_the_user_set_stays_and_where_no_store_of_ours_serves_rank_0_opens_it() -> None:
    base = {"PYTHONFAULTHANDLER": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "OMP_NUM_THREADS": ""}
    changed = base | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    env = environment(base, replace(FACTS, agent_store=False))
    assert env == {**{name: value for name, value in (TORCHRUNS | OURS).items() if name in env}, **changed}


AS_SLURM_WOULD = {
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def an_agents_task(version: str) -> dict[str, str]:
    """The environment of a task that srun started, recorded: one of the agents, to Slurm."""
    (name, *_) = sorted((Path(__file__).parents[2] / "data/slurm" / version).glob("env-gpus-per-node-step-*"))
    lines = (line.partition("=") for line in name.read_text().splitlines() if line.startswith("SLURM"))
    return {key: value for key, _, value in lines}


@pytest.mark.parametrize("version", ["20.11.4", "22.05.8", "24.11.5", "26.05.5"])
def test_inside_slurm_each_worker_is_a_task(version: str) -> None:
    """Lightning and others take SLURM_NTASKS for the world size and SLURM_PROCID for the rank: the agents'."""
    base = an_agents_task(version)
    assert {"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"} <= base.keys()
    env = environment(base)
    assert {key: env.get(key) for key in AS_SLURM_WOULD} == AS_SLURM_WOULD
    assert not env.keys() & {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GTIDS"}
    kept = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_ID"}
    assert {key: env[key] for key in kept & base.keys()} == {key: base[key] for key in kept & base.keys()}


def test_the_variables_are_documented() -> None:
    assert {*environment(), *AS_SLURM_WOULD} <= set(re.findall(r"`([A-Z][A-Z_]+)`", DOCS.read_text()))


def test_what_a_worker_gets_of_its_run_is_left_out_of_what_it_submits() -> None:
    env = without_run_variables({**environment(), "PATH": "/bin"})
    defaults = {"OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert env.keys() - defaults == {"PATH"}


ARGV = ("python3", "-u", "/home/u/train.py")
CWD = "/home/u"
ENV = {
    "RANK": "1",
    "PATH": "/host/bin",
    "LD_LIBRARY_PATH": "/host/lib",
    "TMPDIR": "/scratch/u",
    "MY_DATA": "/data",
    "TORCHELASTIC_ERROR_FILE": "/lustre/runs/7/attempt-000/round-000/rank-00001/error.json",
    "HPC_ELASTIC_RUN_DIR": "/lustre/runs/7",
    "HPC_ELASTIC_HEARTBEAT": "/dev/shm/hpc-elastic-1/0",
}


def of(runtime: Runtime, image: str = "/images/t", **what: Any) -> Container:
    return Container(image=ContainerImage(runtime=runtime, image=image), **what)


def enter(
    container: Container, *, env: Mapping[str, str] = ENV, has_nvidia: bool = False
) -> tuple[list[str], dict[str, str]]:
    return enter_container(container, ARGV, env, local_rank=3, cwd=CWD, has_nvidia=has_nvidia)


def test_each_folder_is_mounted_once_at_its_own_path() -> None:
    mounts = needed_mounts(of(Runtime.CHARLIECLOUD), env=ENV, cwd=CWD)
    assert mounts == [ContainerMount(source=path, target=path) for path in ("/home/u", "/lustre/runs/7")]
    given = of(Runtime.CHARLIECLOUD, mounts=(ContainerMount(source="/lustre", target="/lustre"),))
    assert [mount.target for mount in needed_mounts(given, env=ENV, cwd=CWD)] == ["/home/u"]
    assert [mount.target for mount in needed_mounts(given, env=ENV, cwd="/tmp/x")] == []


def test_charliecloud() -> None:
    given = of(
        Runtime.CHARLIECLOUD,
        mounts=(ContainerMount(source="/data", target="/d"),),
        workdir="/opt",
        env=("MY_DATA", "ABSENT"),
        args=("--write",),
    )
    argv, env = enter(given)
    assert argv == [
        *("ch-run", "--bind=/home/u:/home/u", "--bind=/lustre/runs/7:/lustre/runs/7", "--bind=/data:/d", "--cd=/opt"),
        *("--env-no-expand", "--set-env=MY_DATA=/data", "--set-env=HPC_ELASTIC_INSIDE=3", "--write"),
        *("/images/t", "--", *ARGV),
    ]
    assert env["USER"] == str(os.getuid())
    assert (env["RANK"], env["PATH"]) == ("1", "/host/bin")
    assert not {"LD_LIBRARY_PATH", "TMPDIR"} & env.keys()


def test_charliecloud_has_the_folder_for_temporary_files_where_it_is_mounted() -> None:
    mounted = of(Runtime.CHARLIECLOUD, mounts=(ContainerMount(source="/scratch", target="/scratch"),))
    assert "--set-env=TMPDIR=/scratch/u" in enter(mounted)[0]
    assert "--set-env=TMPDIR=/tmp/u" in enter(of(Runtime.CHARLIECLOUD), env={**ENV, "TMPDIR": "/tmp/u"})[0]


@pytest.mark.parametrize("runtime", [Runtime.APPTAINER, Runtime.SINGULARITY])
def test_apptainer(runtime: Runtime) -> None:
    given = of(runtime, "t.sif", mounts=(ContainerMount(source="/d", target="/d", read_only=True),), env=("MY_DATA",))
    argv, env = enter(given, has_nvidia=True, env={**ENV, "MY_DATA": "0,1"})
    assert argv == [
        *(runtime.value, "exec", "--bind", "/home/u:/home/u", "--bind", "/lustre/runs/7:/lustre/runs/7"),
        *("--bind", "/d:/d:ro", "--pwd", "/home/u", "--nv", "--env", "HPC_ELASTIC_INSIDE=3"),
        *("t.sif", *ARGV),
    ]
    assert env[f"{runtime.name}ENV_MY_DATA"] == "0,1", "for --env these are two variables"
    assert "--nv" not in enter(given)[0]


def test_podman() -> None:
    argv, env = enter(of(Runtime.PODMAN, "pytorch/pytorch:2.4", args=("--quiet",)), has_nvidia=True)
    assert argv[:7] == ["podman", "run", "--rm", "--network=host", "--ipc=host", "--pid=host", "--entrypoint="]
    rest = [word for word in argv[7:] if word != "--userns=keep-id"]
    assert rest == [
        *("--volume", "/home/u:/home/u", "--volume", "/lustre/runs/7:/lustre/runs/7", "--workdir=/home/u"),
        "--device=nvidia.com/gpu=all",
        *(f"--env={name}" for name in sorted(ENV) if name not in ("PATH", "LD_LIBRARY_PATH", "TMPDIR")),
        "--env=HPC_ELASTIC_INSIDE=3",
        *("--quiet", "pytorch/pytorch:2.4", *ARGV),
    ]
    assert env["PATH"] == "/host/bin"  # podman itself needs it
    assert "HPC_ELASTIC_INSIDE" not in env, "it is what tells the script from podman"
    assert "--device=nvidia.com/gpu=all" not in enter(of(Runtime.PODMAN))[0]
    assert "--env=PATH" in enter(of(Runtime.PODMAN, env=("PATH",)))[0]
    assert "--rootfs" in enter(of(Runtime.PODMAN, "/images/t"))[0]


def test_enroot() -> None:
    given = of(Runtime.ENROOT, "t.sqsh", mounts=(ContainerMount(source="/d", target="/e", read_only=True),))
    argv, _ = enter(given)
    names = [name for name in sorted(ENV) if name not in ("PATH", "LD_LIBRARY_PATH", "TMPDIR")]
    assert argv == [
        *("enroot", "start", "--mount", "/home/u:/home/u:none:x-create=auto,rbind"),
        *("--mount", "/lustre/runs/7:/lustre/runs/7:none:x-create=auto,rbind"),
        *("--mount", "/d:/e:none:x-create=auto,rbind,ro"),
        *(word for name in (*names, "HPC_ELASTIC_INSIDE=3") for word in ("--env", name)),
        *("t.sqsh", "sh", "-c", 'cd "$0" && exec "$@"', "/home/u", *ARGV),
    ]
    words, _ = enter(given, has_nvidia=True, env={**ENV, "NVIDIA_VISIBLE_DEVICES": "0"})
    assert [word for word in words if word.startswith("NVIDIA")] == [
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ]


def test_pyxis_starts_the_agents_inside_and_these_their_workers() -> None:
    given = of(
        Runtime.PYXIS,
        "nvcr.io#nvidia/pytorch:24.05-py3",
        mounts=(
            ContainerMount(source="/data", target="/data", read_only=True),
            ContainerMount(source="/opt", target="/opt"),
        ),
        env=("NCCL_DEBUG", "PYTHONPATH"),
        args=("--container-remap-root",),
    )
    packages = ["/home/u/venv", "/opt/python", "/usr/local/py"]
    assert pyxis_arguments(given, cwd=CWD, run_dir="/lustre/runs/7", packages=packages) == [
        "--container-image=nvcr.io#nvidia/pytorch:24.05-py3",
        "--container-mounts=/home/u:/home/u,/lustre/runs/7:/lustre/runs/7,/data:/data:ro,/opt:/opt,"
        "/usr/local/py:/usr/local/py:ro",
        *("--container-workdir=/home/u", "--no-container-mount-home", "--no-container-entrypoint"),
        *("--container-env=NCCL_DEBUG,PYTHONPATH", "--container-remap-root"),
    ]
    argv, env = enter(given)
    assert argv == list(ARGV)
    assert "LD_LIBRARY_PATH" not in env


def test_a_relative_image_is_meant_from_the_runs_folder() -> None:
    assert "/home/u/./images/t" in enter(of(Runtime.CHARLIECLOUD, "./images/t"))[0]


def test_a_variable_that_was_asked_for_is_kept() -> None:
    _, env = enter(of(Runtime.APPTAINER, env=("LD_LIBRARY_PATH",)))
    assert env["LD_LIBRARY_PATH"] == "/host/lib"


@pytest.mark.parametrize(
    ("runtime", "code", "script"),
    [
        *((Runtime.PODMAN, code, code) for code in (0, 1, 125, 127, 128, -9)),
        *((Runtime.PODMAN, 128 + number, -number) for number in (9, 11)),  # it reports a signal as a shell does
        *((runtime, 137, 137) for runtime in (None, *Runtime) if runtime is not Runtime.PODMAN),
    ],
)
def test_the_scripts_own_exit_code(runtime: Runtime | None, code: int, script: int) -> None:
    assert exit_of_script(of(runtime) if runtime is not None else None, code) == script
