"""``clean``: which runs are removed, and that one that may be running never is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.run.paths import RunPaths
from tests.unit.launch.test_launch_run_status import RUN_ID, Run

DAY_NS = 86_400 * 10**9


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs folder, and a machine without Slurm."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path


def made(here: Path, name: str, *, outcome: str = "", days_old: float = 0.0, size: int = 0) -> Path:
    """A run; without an outcome it may be running."""
    run = Run(here / "runs").attempt(0)
    if outcome:
        run.ended(outcome, 0 if outcome == "succeeded" else 1)
    folder = (here / "runs" / RUN_ID).rename(here / "runs" / name)
    (folder / "large").write_bytes(b"x" * size)
    paths = RunPaths(folder).attempt(0)
    then = paths.attempt_json.stat().st_mtime_ns - int(days_old * DAY_NS)
    for path in (paths.result_json, paths.events, paths.store / "node", *paths.root.iterdir()):
        if path.exists():
            os.utime(path, ns=(then, then))
    return folder


def left(here: Path) -> set[str]:
    return set(os.listdir(here / "runs"))


def test_by_age_state_and_size(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(here, "old", outcome="failed", days_old=40)
    made(here, "new", outcome="failed")
    made(here, "good", outcome="succeeded", days_old=40)
    made(here, "large", outcome="succeeded", size=2 << 20)
    assert main(["clean", "--older-than", "30d", "--state", "failed", "--yes"]) == 0
    assert "removed 1 run" in capsys.readouterr().err
    assert left(here) == {"new", "good", "large"}
    assert main(["clean", "--larger-than", "1M", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "/runs/large" in out
    assert "would remove 1 run, 2." in err
    assert left(here) == {"new", "good", "large"}
    assert main(["clean", "large", "--yes"]) == 0
    assert left(here) == {"new", "good"}
    assert main(["clean", "--older-than", "4w", "-y"]) == 0
    assert left(here) == {"new"}


@pytest.mark.parametrize("days_old", [0.0, 400.0])
def test_a_run_that_may_be_running_stays(here: Path, days_old: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job in Slurm that nobody can be asked about here, silence is no end."""
    made(here, "running", days_old=days_old)
    assert main(["clean", "running", "--yes"]) == 0
    assert "running may be running (meeting); it is not removed" in capsys.readouterr().err
    assert main(["clean", "--older-than", "0", "--yes"]) == 0
    assert left(here) == {"running"}


@pytest.mark.parametrize(("days_old", "stays"), [(0.5, True), (2.0, False)])
def test_a_run_of_this_machine_that_was_killed(here: Path, days_old: float, stays: bool) -> None:
    folder = made(here, "killed", days_old=days_old)
    attempt = RunPaths(folder).attempt(0).attempt_json
    times = attempt.stat()
    attempt.write_text(attempt.read_text().replace('"slurm"', '"local"'))
    os.utime(attempt, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert main(["clean", "killed", "--yes"]) == 0
    assert ("killed" in left(here)) is stays


def test_what_a_run_links_to_is_left_alone(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "precious").touch()
    (made(here, "linking", outcome="succeeded") / "data").symlink_to(here / "data")
    assert main(["clean", "linking", "--yes"]) == 0
    assert left(here) == set()
    assert (here / "data" / "precious").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "name the runs to remove: RUN..., --older-than 30d"),
        (["--state", "failed"], "1 run, .* would be removed, and there is no terminal to ask on; give --yes"),
        (["nothing"], "nothing: no such run"),
    ],
)
def test_what_is_refused(here: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    made(here, "failed", outcome="failed")
    assert main(["clean", *argv]) == 2

    assert re.search(says, capsys.readouterr().err)
    assert left(here) == {"failed"}
