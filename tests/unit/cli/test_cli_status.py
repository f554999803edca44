"""``status`` and ``list``: what is refused, what Slurm is asked, and what is listed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.cli.status import ask_slurm, seconds_left
from hpc_elastic.cli.status_text import status_lines
from hpc_elastic.reading.run_status import RunState, RunStatus
from hpc_elastic.run_index import jobs_of, record
from hpc_elastic.slurm.errors import SlurmUnavailableError
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.unit.reading.test_reading_run_status import RUN_ID, Run


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[str], str]:
    assert main(["list", *argv]) == 0
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_status_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).attempt(0).ended("succeeded", 0)
    assert main(["status", RUN_ID, "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"run {RUN_ID}: ended, attempt 0, job 42\n")
    assert main(["status", str(tmp_path / RUN_ID / "attempt-000"), "--json", "--watch"]) == 0, "it has ended"
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "nope", "--runs-dir", str(tmp_path)]) == 2
    assert "nope is no run" in capsys.readouterr().err


def test_list_shows_the_newest_first_and_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).attempt(0).ended("failed", 1)
    (tmp_path / RUN_ID).rename(tmp_path / "20261120-000000-old-abcd")
    Run(tmp_path)
    (tmp_path / "not-a-run").mkdir()
    there = ("--runs-dir", str(tmp_path))
    lines, _ = listed(capsys, *there)
    assert [line.split()[0] for line in lines] == ["submitted", "ended"]
    assert lines[1].endswith("job 42  failed  why")
    lines, _ = listed(capsys, *there, "--state", "ended,training")
    assert len(lines) == 1
    lines, err = listed(capsys, *there, "--limit", "1")
    assert len(lines) == 1
    assert "--limit all" in err
    lines, _ = listed(capsys, *there, "--json", "--name", "train", "--limit", "all")
    assert {json.loads(line)["state"] for line in lines} == {"submitted", "ended"}
    lines, err = listed(capsys, *there, "--name", "other")
    assert (lines, err) == ([], f"hpc-elastic: no such run in {tmp_path}\n")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--state", "runing"], "--state runing: give one of submitted, "),
        (["--limit", "0"], "--limit 0: give a number from 1, or all"),
        (["--runs-dir", "/nope"], "/nope can't be read"),
    ],
)
def test_wrong_filters(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *argv]) == 2
    assert word in capsys.readouterr().err


class Client:
    def __init__(self, *states: JobState, error: Exception | None = None) -> None:
        self.states = states
        self.error = error
        self.asked: list[list[str]] = []

    def queue_states(self, jobs: list[object]) -> tuple[JobState, ...]:
        self.asked.append([str(job) for job in jobs])
        if self.error is not None:
            raise self.error
        return self.states


def status(**changes: object) -> RunStatus:
    base = {"run_id": "r", "run_dir": "/r", "name": "r", "cluster": "slurm", "state": RunState.TRAINING, "job_id": "42"}
    return RunStatus(**{**base, **changes})  # type: ignore[arg-type]


def test_slurm_is_asked_once_and_only_where_it_can_know(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobState(job_id="42", state="RUNNING", reason="")
    client = Client(job)
    assert ask_slurm(client, status()) == job  # type: ignore[arg-type]
    assert client.asked == [["42"]]
    assert ask_slurm(client, status(cluster="local")) is None  # type: ignore[arg-type]
    assert ask_slurm(client, status(state=RunState.ENDED)) is None  # type: ignore[arg-type]
    assert len(client.asked) == 1
    assert ask_slurm(Client(), status()) is None  # type: ignore[arg-type]
    down = Client(error=SlurmUnavailableError(what="asking", why="no controller", command="squeue"))
    assert ask_slurm(down, status()) is None  # type: ignore[arg-type]
    assert "Slurm can't be asked" in capsys.readouterr().err


def test_a_job_that_has_not_begun_is_found_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert jobs_of("/r") == []
    for number in ("7", "8"):
        assert record(cluster="c", job_id=number, submitted_ns=int(number), run_dir=Path("/r")) is None
    record(cluster="c", job_id="9", submitted_ns=9, run_dir=Path("/other"))
    assert [entry.job_id for entry in jobs_of("/r")] == ["8", "7"]
    client = Client()
    ask_slurm(client, status(job_id=None, state=RunState.SUBMITTED))  # type: ignore[arg-type]
    assert client.asked == [["8"]]


def test_the_time_that_is_left() -> None:
    clock = FakeClock()
    assert seconds_left(None, clock) is None
    assert seconds_left(JobState(job_id="1", state="RUNNING", reason="", end_time="Unknown"), clock) is None
    moment = "1971-01-01T00:00:00"
    job = JobState(job_id="1", state="RUNNING", reason="", end_time=moment)
    end = time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
    assert seconds_left(job, clock) == pytest.approx(end - clock.time_ns() / 1e9)
    clock.now = end + 60
    assert seconds_left(job, clock) == 0.0


def test_a_job_that_is_held_is_not_said_to_start() -> None:
    held = JobState(job_id="42", state="PENDING", reason="JobHoldMaxRequeue", start_time="2026-11-21T02:16:42")
    text = "\n".join(status_lines(status(state=RunState.SUBMITTED), held, seconds_left=None))
    assert "PENDING (JobHoldMaxRequeue), held: scontrol release 42 lets it go on" in text
    assert "expected to start" not in text


@pytest.mark.parametrize(("state", "lost"), [("FAILED", True), ("NODE_FAIL", True), ("PENDING", False)])
def test_a_requeue_that_never_came_about_is_told(state: str, lost: bool) -> None:
    """Whoever had decided it was killed before Slurm heard of it."""
    asked = status(state=RunState.REQUEUED, outcome="failed")
    lines = status_lines(asked, JobState(job_id="42", state=state, reason=""), seconds_left=None)
    assert ("hpc-elastic requeue 42 makes up for it" in "\n".join(lines)) is lost
