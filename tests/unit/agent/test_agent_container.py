"""The command line of each runtime, word by word, and the environment that goes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from hpc_elastic.agent.container import enter_container, needed_mounts
from hpc_elastic.run.container import Container, ContainerImage, ContainerMount, Runtime

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
    return enter_container(container, ARGV, env, cwd=CWD, has_nvidia=has_nvidia)


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
        *("--env-no-expand", "--set-env=MY_DATA=/data", "--write", "/images/t", "--", *ARGV),
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
    assert enter(given, has_nvidia=True)[0] == [
        *(runtime.value, "exec", "--bind", "/home/u:/home/u", "--bind", "/lustre/runs/7:/lustre/runs/7"),
        *("--bind", "/d:/d:ro", "--pwd", "/home/u", "--nv", "--env", "MY_DATA=/data", "t.sif", *ARGV),
    ]
    assert "--nv" not in enter(given)[0]


def test_podman() -> None:
    argv, env = enter(of(Runtime.PODMAN, "pytorch/pytorch:2.4", args=("--quiet",)), has_nvidia=True)
    assert argv[:8] == [
        *("podman", "run", "--rm", "--network=host", "--ipc=host", "--pid=host", "--ulimit=host", "--entrypoint=")
    ]
    rest = [word for word in argv[8:] if word != "--userns=keep-id"]
    assert rest == [
        *("--volume", "/home/u:/home/u", "--volume", "/lustre/runs/7:/lustre/runs/7", "--workdir=/home/u"),
        "--device=nvidia.com/gpu=all",
        *(f"--env={name}" for name in sorted(ENV) if name not in ("PATH", "LD_LIBRARY_PATH", "TMPDIR")),
        *("--quiet", "pytorch/pytorch:2.4", *ARGV),
    ]
    assert env["PATH"] == "/host/bin"  # podman itself needs it
    assert "--env=PATH" in enter(of(Runtime.PODMAN, env=("PATH",)))[0]
    assert "--rootfs" in enter(of(Runtime.PODMAN, "/images/t"))[0]


def test_enroot() -> None:
    argv, _ = enter(of(Runtime.ENROOT, "t.sqsh"))
    names = [name for name in sorted(ENV) if name not in ("PATH", "LD_LIBRARY_PATH", "TMPDIR")]
    assert argv == [
        *("enroot", "start", "--mount", "/home/u:/home/u", "--mount", "/lustre/runs/7:/lustre/runs/7"),
        *(word for name in names for word in ("--env", name)),
        *("t.sqsh", "sh", "-c", 'cd "$0" && exec "$@"', "/home/u", *ARGV),
    ]


def test_a_relative_image_is_meant_from_the_runs_folder() -> None:
    assert "/home/u/./images/t" in enter(of(Runtime.CHARLIECLOUD, "./images/t"))[0]


def test_a_variable_that_was_asked_for_is_kept() -> None:
    _, env = enter(of(Runtime.APPTAINER, env=("LD_LIBRARY_PATH",)))
    assert env["LD_LIBRARY_PATH"] == "/host/lib"
