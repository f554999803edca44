"""run.json: what is written is read back, and what cannot be read is one clear error; and ``--container-*``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.run.spec import (
    ContainerImage,
    ContainerMount,
    EntryKind,
    Entrypoint,
    RunSpec,
    Runtime,
    UnreadableRunError,
    load_run_spec,
    new_run_id,
    parse_container_env,
    parse_container_image,
    parse_container_mounts,
    parse_container_workdir,
)

ODD_ARGUMENTS = ("plain", "", "two words", "'\"", "$HOME `id` \\", "a\nb", "日本 ü", "--lr=0.1", "*", "\udcff")


def spec(**changes: object) -> RunSpec:
    base = RunSpec(
        run_id="20261121-053000-train-9f3c",
        uid="0" * 32,
        name="train",
        created_ns=1,
        entrypoint=Entrypoint(kind=EntryKind.SCRIPT, target="train.py", args=ODD_ARGUMENTS, python="/usr/bin/python3"),
        cwd="/home/me",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def changed(key: str, item: object) -> bytes:
    value = {"version": 1, **to_builtins(spec())}
    value["entrypoint"]["kind"] = "script"
    value[key] = item
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (None, "missing"),
        (b'{"version": 1, "run_id": "x', "unreadable"),
        (b"{}", "has format version None; this program reads 1"),
        (changed("version", 2), "has format version 2; this program reads 1"),
        (changed("entrypoint", {"kind": "telepathy", "target": "x"}), "unreadable"),
        (changed("sbatch_args", 3), "unreadable"),
    ],
)
def test_what_cannot_be_read_is_one_error_that_names_the_file(tmp_path: Path, raw: bytes | None, said: str) -> None:
    path = tmp_path / "run.json"
    spec().save(path)
    assert load_run_spec(path) == spec()
    path.unlink()
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(UnreadableRunError) as caught:
        load_run_spec(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "argv"),
    [
        (EntryKind.SCRIPT, ["py", "-u", "train", "--x", "1"]),
        (EntryKind.MODULE, ["py", "-u", "-m", "train", "--x", "1"]),
        (EntryKind.COMMAND, ["train", "--x", "1"]),
    ],
)
def test_what_a_worker_runs(kind: EntryKind, argv: list[str]) -> None:
    assert Entrypoint(kind=kind, target="train", args=("--x", "1"), python="py").argv() == argv


@pytest.mark.parametrize("name", ["train", "", "../../etc/passwd", "日本", "a b\nc", "-rf", "x" * 300])
def test_a_run_id_is_one_safe_name(name: str) -> None:
    run_id = new_run_id(name, now=0.0)
    assert run_id.startswith("19700101-000000-")
    assert len(run_id) <= 80
    assert all(c.isascii() and (c.isalnum() or c in "-_") for c in run_id)
    assert new_run_id("b", now=1.0) < new_run_id("a", now=2.0), "they sort by time"
    assert len({new_run_id("a", now=1.0) for _ in range(20)}) > 10, "and differ within a second"


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
    monkeypatch: pytest.MonkeyPatch, text: str, programs: tuple[str, ...], runtime: Runtime, image: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    found = parse_container_image(text, "--container-image")
    assert found == ContainerImage(runtime=runtime, image=image)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("apptainer:", "the image is missing; give apptainer:IMAGE"),
        ("/images/torch", "give RUNTIME:/images/torch with one of charliecloud, apptainer"),
    ],
)
def test_image_that_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=f"--container-image {text}") as caught:
        parse_container_image(text, "--container-image")
    assert says in str(caught.value)


def test_the_others() -> None:
    assert parse_container_mounts("/data, /a:/b,/c:/d:ro", "--container-mounts") == (
        ContainerMount(source="/data", target="/data"),
        ContainerMount(source="/a", target="/b"),
        ContainerMount(source="/c", target="/d", read_only=True),
    )
    for text in ("data", "/a:b", "/a:/b:rx", "/a:/b:ro:x", "/a,,/b", ""):
        with pytest.raises(UsageError, match="SRC"):
            parse_container_mounts(text, "--container-mounts")
    assert parse_container_workdir("/opt/app", "--container-workdir") == "/opt/app"
    assert parse_container_env("PATH, MY_VAR", "--container-env") == ("PATH", "MY_VAR")
    with pytest.raises(UsageError, match="absolute path inside"):
        parse_container_workdir("opt", "--container-workdir")
    with pytest.raises(UsageError, match="'MY-VAR' is no name"):
        parse_container_env("PATH,MY-VAR", "--container-env")
