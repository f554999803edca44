"""The command line of each runtime, word by word, and the environment that goes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from hpc_elastic.agent.worker_environment import enter_container, exit_of_script, needed_mounts, pyxis_arguments
from hpc_elastic.run.spec import Container, ContainerImage, ContainerMount, Runtime

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
