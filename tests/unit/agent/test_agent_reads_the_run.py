"""The agent's first look at its run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpc_elastic.agent import identity
from hpc_elastic.base import files
from hpc_elastic.base.files import make_private_dir, read_bytes
from hpc_elastic.errors import UsageError
from hpc_elastic.run.paths import RunPaths
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_attempt, make_spec

SPEC = make_spec(created_ns=1, cluster="local")


ATTEMPT = make_attempt(cluster="local", started_ns=1)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path)
    SPEC.save(found.run_json)
    make_private_dir(found.attempt(0).root)
    ATTEMPT.save(found.attempt(0).attempt_json)
    return found


@pytest.mark.parametrize("file", ["run.json", "attempt.json"])
@pytest.mark.parametrize(
    ("why", "tries"),
    [("refused", 124), ("missing", 1), ("cut off", 1), ("says [Errno 5]", 1)],
)
def test_a_fault_of_the_filesystem_is_waited_out_and_no_other(
    file: str, why: str, tries: int, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = paths.run_json if file == "run.json" else paths.attempt(0).attempt_json
    looks = []

    def read(path: Path, *, limit: int) -> bytes:
        if path != wanted:
            return read_bytes(path, limit=limit)
        looks.append(path)
        if why == "refused":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path, limit=limit)

    monkeypatch.setattr(files, "read_bytes", read)
    monkeypatch.setattr(files, "ask_about", lambda folder: False)
    if why == "missing":
        wanted.unlink()
    elif why == "cut off":
        wanted.write_text('{"version": 1, "unreadable')
    elif why == "says [Errno 5]":
        wanted.write_text('{"version": "unreadable: [Errno 5]"}')
    error, words = (
        (identity.RunDirectoryRefusedError, "refuses")
        if why == "refused"
        else (UsageError, "can't be read from this node")
    )
    with pytest.raises(error, match=words):
        identity._load(paths, 0, FakeClock())
    assert len(looks) == tries


def test_a_fault_that_passes_costs_an_agent_only_time(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error")]

    def read(path: Path, *, limit: int) -> bytes:
        if faults:
            raise faults.pop()
        return read_bytes(path, limit=limit)

    monkeypatch.setattr(files, "read_bytes", read)
    clock = FakeClock()
    began = clock.monotonic()
    assert identity._load(paths, 0, clock) == (SPEC, ATTEMPT)
    assert clock.monotonic() - began == pytest.approx(0.15)


@pytest.mark.parametrize(
    "argv",
    [
        ["--run-dir", "/r"],
        ["--run-dir", "/r", "--attempt"],
        ["--run-dir", "/r", "--attempt", "x"],
        ["--run-dir", "/r", "--attempt", "3", "--node", "-1"],
        ["--run-dir", "/r", "--attempt", "3", "--attempt", "4"],
        ["--run-dir", "/r", "--attempt", "3", "--nodes", "1"],
        ["--run-dir=/r", "--attempt=3"],
    ],
)
def test_options_that_no_launcher_gives_are_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="give --run-dir DIR --attempt N"):
        identity.parse_options(argv)


def test_options_of_launchers() -> None:
    found = identity.parse_options(["--attempt", "0", "--node", "2", "--run-dir", "/r s", "--launcher-pid", "17"])
    assert (found.run_dir, found.attempt, found.node, found.launcher_pid) == ("/r s", 0, 2, 17)
