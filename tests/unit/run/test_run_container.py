"""The ``--container-*`` options: what they give, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run.container import (
    ContainerImage,
    ContainerMount,
    Runtime,
    parse_container_env,
    parse_container_image,
    parse_container_mounts,
    parse_container_workdir,
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*programs: str) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)

    return install


@pytest.mark.parametrize(
    ("text", "programs", "runtime", "image"),
    [
        ("charliecloud:/images/torch", (), Runtime.CHARLIECLOUD, "/images/torch"),
        ("apptainer:docker://pytorch/pytorch:2.4", (), Runtime.APPTAINER, "docker://pytorch/pytorch:2.4"),
        ("podman:pytorch/pytorch:2.4", (), Runtime.PODMAN, "pytorch/pytorch:2.4"),
        ("enroot:/images/t.sqsh", (), Runtime.ENROOT, "/images/t.sqsh"),
        ("pyxis:nvcr.io#nvidia/pytorch:24.05-py3", (), Runtime.PYXIS, "nvcr.io#nvidia/pytorch:24.05-py3"),
        ("/images/t.sif", ("apptainer",), Runtime.APPTAINER, "/images/t.sif"),
        ("/images/t.sif", ("singularity",), Runtime.SINGULARITY, "/images/t.sif"),
        ("docker://pytorch/pytorch", ("apptainer", "singularity"), Runtime.APPTAINER, "docker://pytorch/pytorch"),
        ("/images/t.sqsh", ("enroot",), Runtime.ENROOT, "/images/t.sqsh"),
        ("/images/t.sqsh", ("ch-run",), Runtime.CHARLIECLOUD, "/images/t.sqsh"),
        ("/images/torch", ("ch-run",), Runtime.CHARLIECLOUD, "/images/torch"),
        ("./torch", ("apptainer",), Runtime.APPTAINER, "./torch"),
        ("pytorch/pytorch:2.4", ("podman",), Runtime.PODMAN, "pytorch/pytorch:2.4"),
    ],
)
def test_image(
    installed: Callable[..., None], text: str, programs: tuple[str, ...], runtime: Runtime, image: str
) -> None:
    installed(*programs)
    found = parse_container_image(text, "--container-image")
    assert found == ContainerImage(runtime=runtime, image=image)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("apptainer:", "the image is missing; give apptainer:IMAGE"),
        ("/images/torch", "give RUNTIME:/images/torch with one of charliecloud, apptainer"),
    ],
)
def test_image_that_is_refused(installed: Callable[..., None], text: str, says: str) -> None:
    installed()
    with pytest.raises(UsageError, match=f"--container-image {text}") as caught:
        parse_container_image(text, "--container-image")
    assert says in str(caught.value)


def test_mounts() -> None:
    assert parse_container_mounts("/data, /a:/b,/c:/d:ro", "--container-mounts") == (
        ContainerMount(source="/data", target="/data"),
        ContainerMount(source="/a", target="/b"),
        ContainerMount(source="/c", target="/d", read_only=True),
    )


@pytest.mark.parametrize("text", ["data", "/a:b", "/a:/b:rx", "/a:/b:ro:x", "/a,,/b", ""])
def test_mounts_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="SRC"):
        parse_container_mounts(text, "--container-mounts")


def test_the_others() -> None:
    assert parse_container_workdir("/opt/app", "--container-workdir") == "/opt/app"
    assert parse_container_env("PATH, MY_VAR", "--container-env") == ("PATH", "MY_VAR")
    with pytest.raises(UsageError, match="absolute path inside"):
        parse_container_workdir("opt", "--container-workdir")
    with pytest.raises(UsageError, match="'MY-VAR' is no name"):
        parse_container_env("PATH,MY-VAR", "--container-env")
