"""The versions in the job log's head: those of the workers."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hpc_elastic.launch.run_attempt import _versions
from hpc_elastic.run.spec import EntryKind, Entrypoint

pytest.importorskip("torch")
OWN = {"python": ".".join(map(str, sys.version_info[:3])), "torch": version("torch")}


def another(folder: Path, says: str) -> str:
    """An interpreter of another version."""
    path = folder / "python3.99"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return str(path)


def versions(entry: Entrypoint | None) -> dict[str, str]:
    found = _versions({"slurm": "22.05.8"}, entry)
    assert found.pop("hpc_elastic")
    assert found.pop("slurm") == "22.05.8"
    return found


def test_of_this_interpreter_and_of_another_one(tmp_path: Path) -> None:
    assert versions(Entrypoint(kind=EntryKind.SCRIPT, target="t.py", python=sys.executable)) == OWN
    python = another(tmp_path, "echo python 3.99.1; echo torch 9.0; echo noise")
    assert versions(Entrypoint(kind=EntryKind.SCRIPT, target="t.py", python=python)) == {
        "python": "3.99.1",
        "torch": "9.0",
    }
    wrapped = Entrypoint(
        kind=EntryKind.COMMAND, target="ch-run", args=("img", "--", python, "t.py"), python=sys.executable
    )
    assert versions(wrapped)["python"] == "3.99.1"


def test_the_real_question(tmp_path: Path) -> None:
    link = tmp_path / "python3"
    link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    link.chmod(0o755)
    assert versions(Entrypoint(kind=EntryKind.SCRIPT, target="t.py", python=str(link))) == OWN


def test_what_is_not_known_is_not_claimed(tmp_path: Path) -> None:
    assert versions(None) == {}
    assert versions(Entrypoint(kind=EntryKind.COMMAND, target="./simulate", python=sys.executable)) == {}
    for says in ("exit 3", "echo nothing"):
        assert versions(Entrypoint(kind=EntryKind.SCRIPT, target="t.py", python=another(tmp_path, says))) == {}
    assert versions(Entrypoint(kind=EntryKind.SCRIPT, target="t.py", python="/no/python")) == {}
