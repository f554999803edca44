"""run.json: what is written is read back, and what cannot be read is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec, UnreadableRunError, load_run_spec, new_run_id

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


def test_run_ids_sort_by_time_and_differ_within_a_second() -> None:
    assert new_run_id("b", now=1.0) < new_run_id("a", now=2.0)
    assert len({new_run_id("a", now=1.0) for _ in range(20)}) > 10
