"""``status`` and ``list``: what is refused, what Slurm is asked, and what is listed; goodput and bad nodes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.cli import list_runs as list_module
from hpc_elastic.cli import status as status_module
from hpc_elastic.cli.main import main, print_note
from hpc_elastic.cli.status import seconds_left, status_line, status_lines
from hpc_elastic.launch.run_status import RunState, RunStatus, ends_by_slurm
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from hpc_elastic.run.index import jobs_of, record
from hpc_elastic.run.node_score import Evidence, EvidenceKind, NodeRecord, load_record, save_record
from hpc_elastic.run.spec import Preload
from hpc_elastic.slurm.commands import SlurmUnavailableError
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import RunBuilder
from tests.unit.launch.test_launch_run_status import RUN_ID, Run
from tests.unit.report.test_report_advice import failing_run


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


def test_what_workers_were_seen_to_import_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).attempt(0).ended("succeeded", 0)
    options = [RUN_ID, "--runs-dir", str(tmp_path)]
    path = tmp_path / RUN_ID / "preload.json"
    assert main(["status", "--preload", *options]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}: nothing is kept yet" in err
    found = Preload(modules=("torch",), learned=("torch.a", "torch.b"), is_auto=True).without(
        "torch.c", "it opens a socket"
    )
    found.save(path)
    assert main(["status", *options]) == 0
    assert (
        "preload  : torch; 2 modules learned from workers; 1 left out (--preload lists them)" in capsys.readouterr().out
    )
    assert main(["status", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["preload"]["learned"] == ["torch.a", "torch.b"]
    assert main(["status", "--preload", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    learned = ["learned from workers (2):", "  torch.a", "  torch.b"]
    assert lines[:7] == ["given:", "  torch", *learned, "left out (1):", "  torch.c: it opens a socket"]
    assert str(path) in lines[7]
    assert main(["status", "--preload", "--json", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "version": 1,
        "path": str(path),
        "modules": ["torch"],
        "learned": ["torch.a", "torch.b"],
        "left_out": {"torch.c": "it opens a socket"},
    }


def test_on_a_terminal_long_lines_are_wrapped_and_paths_stay_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "is_terminal", lambda stream: True)
    monkeypatch.setattr(status_module, "width_for", lambda stream: 60)
    run = Run(tmp_path).attempt(0)
    run.ended("failed", 1)
    result = run.there.result_json
    result.write_text(result.read_text().replace('"why"', f'"{"why " * 50}"'))
    assert main(["status", RUN_ID, "--runs-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("why" in line for line in lines) > 3
    assert all(len(line) <= 60 or str(tmp_path) in line for line in lines)
    assert any(line.split()[-1] == str(tmp_path / RUN_ID) for line in lines if str(tmp_path) in line)


def test_list_shows_the_newest_first_and_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).attempt(0).ended("failed", 1)
    (tmp_path / RUN_ID).rename(tmp_path / "20261120-000000-old-abcd")
    Run(tmp_path)
    (tmp_path / "not-a-run").mkdir()
    there = ("--runs-dir", str(tmp_path))
    lines, _ = listed(capsys, *there)
    assert [line.split()[0] for line in lines] == ["state", "submitted", "failed"]
    assert re.fullmatch(rf"failed +\S+ \S+ +\S*\d:\d\d:\d\d +42  {RUN_ID}  why", lines[2])
    for states in ("ended,training", "failed", "too-few-nodes,failed"):
        lines, _ = listed(capsys, *there, "--state", states)
        assert [line.split()[0] for line in lines] == ["state", "failed"]
    assert listed(capsys, *there, "--state", "succeeded")[0] == []
    lines, err = listed(capsys, *there, "--limit", "1")
    assert len(lines) == 2
    assert "--limit all" in err
    lines, _ = listed(capsys, *there, "--json", "--name", "train", "--limit", "all")
    assert {json.loads(line)["state"] for line in lines} == {"submitted", "ended"}
    for state in ("too_few_nodes", "timed_out"):
        (tmp_path / state).mkdir()
        Run(tmp_path / state).attempt(0).ended(state, 93)
        again = ("--runs-dir", str(tmp_path / state))
        for asked in ("failed", state):
            assert len(listed(capsys, *again, "--state", asked)[0]) == 2, "every bad end is a failure"
        assert listed(capsys, *again, "--state", "succeeded") == (
            [], f"hpc-elastic: no such run in {tmp_path / state} (of 1 run)\n"
        )  # fmt: skip
    lines, err = listed(capsys, *there, "--name", "other")
    assert (lines, err) == ([], f"hpc-elastic: no such run in {tmp_path}\n")


def test_a_long_reason_is_cut_on_a_terminal_and_a_run_id_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path).attempt(0)
    run.ended("failed", 1)
    result = run.there.result_json
    result.write_text(result.read_text().replace('"why"', f'"{"why " * 200}"'))
    lines, _ = listed(capsys, "--runs-dir", str(tmp_path))
    assert len(lines[1]) > 200, "a program gets all"
    monkeypatch.setattr(list_module, "is_terminal", lambda stream: True)
    for columns in (100, 40):
        monkeypatch.setattr(list_module, "width_for", lambda stream, columns=columns: columns)
        lines, _ = listed(capsys, "--runs-dir", str(tmp_path))
        assert len(lines[1]) <= max(columns, lines[1].find(RUN_ID) + len(RUN_ID))
        assert RUN_ID in lines[1]


def test_without_a_runs_folder_the_accounts_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 2
    assert f"{tmp_path}/runs can't be read" in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    Run(tmp_path / "elsewhere").attempt(0).ended("failed", 1)
    for number in ("42", "43"):
        assert (
            record(cluster="", job_id=number, submitted_ns=int(number), run_dir=tmp_path / "elsewhere" / RUN_ID) is None
        )
    lines, _ = listed(capsys)
    assert [RUN_ID in line for line in lines] == [False, True]


@pytest.mark.parametrize("argv", [[], ["latest"]])
def test_the_last_run_is_meant_where_none_is_named(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert main(["status", *argv]) == 2
    assert f"no run in {tmp_path}/runs (--runs-dir), and none submitted by this account" in (capsys.readouterr().err)
    (tmp_path / "elsewhere").mkdir()
    Run(tmp_path / "elsewhere").attempt(0).ended("failed", 1)
    assert record(cluster="", job_id="42", submitted_ns=1, run_dir=tmp_path / "elsewhere" / RUN_ID) is None
    assert main(["status", *argv]) == 0
    assert f"the last run: {tmp_path}/elsewhere/{RUN_ID}" in capsys.readouterr().err, "the account's"
    (tmp_path / "runs").mkdir()
    Run(tmp_path / "runs")
    (tmp_path / "runs" / RUN_ID).rename(tmp_path / "runs" / "a-name-of-mine")
    os.utime(tmp_path / "runs" / "a-name-of-mine" / "run.json", ns=(1, 1))
    Run(tmp_path / "runs")
    for command in ("status", "report"):
        assert main([command, *argv]) == 0
        assert f"the last run: {tmp_path}/runs/{RUN_ID}" in capsys.readouterr().err, "this folder's"


class Client:
    def __init__(self, *states: JobState, error: Exception | None = None, accounted: tuple[JobState, ...] = ()) -> None:
        self.states = states
        self.error = error
        self.asked: list[list[str]] = []
        self.in_accounting = accounted

    def accounted(self, jobs: list[object]) -> tuple[JobState, ...]:
        return self.in_accounting if jobs else ()

    def queue_states(self, jobs: list[object]) -> tuple[JobState, ...]:
        self.asked.append([str(job) for job in jobs])
        if self.error is not None:
            raise self.error
        return self.states


def status(**changes: object) -> RunStatus:
    base = {"run_id": "r", "run_dir": "/r", "name": "r", "cluster": "slurm", "state": RunState.TRAINING, "job_id": "42"}
    return RunStatus(**{**base, **changes})  # type: ignore[arg-type]


def ask(client: Client, *statuses: RunStatus) -> list[tuple[RunStatus, JobState | None]]:
    clock = FakeClock()
    return ends_by_slurm(client, statuses, clock=clock, warn=print_note)  # type: ignore[arg-type]


def test_slurm_is_asked_once_and_only_where_it_can_know(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobState(job_id="42", state="RUNNING", reason="")
    client = Client(job)
    other = status(job_id="43")
    assert ask(client, status(), status(cluster="local"), status(state=RunState.ENDED), other) == [
        (status(), job),
        (status(cluster="local"), None),
        (status(state=RunState.ENDED), None),
        (other, None),
    ]
    assert client.asked == [["42", "43"]]
    assert ask(client, status(cluster="local"))[0][1] is None
    assert len(client.asked) == 1
    down = Client(error=SlurmUnavailableError(what="asking", why="no controller", command="squeue"))
    assert ask(down, status()) == [(status(), None)]
    assert "Slurm does not answer" in capsys.readouterr().err


KILLED = JobState(job_id="42", state="FAILED", reason="JobLaunchFailure")
CANCELLED = JobState(job_id="42", state="CANCELLED", reason="")


@pytest.mark.parametrize(
    ("before", "job", "outcome", "code", "reason"),
    [
        (RunState.ENDING, KILLED, "failed", 1, "batch script killed (Slurm: FAILED, JobLaunchFailure)"),
        (RunState.TRAINING, CANCELLED, "cancelled", 143, "ended without a verdict: cancelled (Slurm: CANCELLED)"),
        (RunState.MEETING, replace(KILLED, state="TIMEOUT", reason="TimeLimit"), "timed_out", 143, "its time limit"),
        (RunState.TRAINING, replace(KILLED, reason="", exit_signal=9), "failed", 137, "batch script ended by signal 9"),
        (RunState.TRAINING, replace(KILLED, state="COMPLETED", reason=""), "unknown", 0, "(Slurm: COMPLETED)"),
        (RunState.SUBMITTED, CANCELLED, "cancelled", 143, "cancelled while it waited in the queue"),
        (RunState.SUBMITTED, KILLED, "failed", 1, "ended before it began (Slurm: FAILED, JobLaunchFailure): the "
         "node could not start its batch script; often it can't write the log"),
        (RunState.REQUEUED, CANCELLED, "cancelled", 143, "in the queue (attempt 0 had been requeued)"),
    ],
)  # fmt: skip
def test_an_end_that_only_slurm_knows(before: RunState, job: JobState, outcome: str, code: int, reason: str) -> None:
    begun = {} if before is RunState.SUBMITTED else {"attempt": 0}
    ((seen, _),) = ask(Client(job), status(state=before, **begun))
    assert (seen.state, seen.outcome, seen.exit_code) == (RunState.ENDED, outcome, code)
    assert reason in seen.reason
    text = status_lines(seen, job, seconds_left=None)
    assert f"  ended    : {outcome.replace('_', ' ')} (exit code {code}): {seen.reason}" in text


@pytest.mark.parametrize(
    ("before", "job"),
    [
        (RunState.ENDING, replace(KILLED, state="COMPLETING")),
        (RunState.TRAINING, replace(KILLED, state="A_NEW_ONE")),
        (RunState.SUBMITTED, replace(KILLED, state="PENDING")),
        (RunState.REQUEUED, KILLED),
    ],
)
def test_what_has_not_ended_goes_on(before: RunState, job: JobState) -> None:
    ((seen, state),) = ask(Client(job), status(state=before))
    assert (seen.state, state) == (before, job)


def test_a_job_that_slurm_has_forgotten(tmp_path: Path) -> None:
    waiting = status(state=RunState.SUBMITTED)
    ((seen, _),) = ask(Client(accounted=(CANCELLED,)), waiting)
    assert (seen.outcome, seen.reason) == ("cancelled", "cancelled while it waited in the queue")
    # One that writes on, or was made just now, may be another cluster's.
    paths = Run(tmp_path).attempt(0).paths
    running = status(run_dir=str(paths.root), attempt=0)
    waiting = status(run_dir=str(paths.root), attempt=None, state=RunState.SUBMITTED)
    written = paths.attempt(0).attempt_json.stat().st_mtime
    for before, begun in ((running, ""), (waiting, "ended before it began: Slurm no longer knows job 42")):
        for seconds, state in ((100, before.state), (400, RunState.ENDED)):
            clock = FakeClock(written + seconds)
            ((seen, _),) = ends_by_slurm(Client(), [before], clock=clock, warn=print_note)  # type: ignore[arg-type]
            assert seen.state is state
        assert (seen.outcome, begun in seen.reason) == ("unknown", True)


def test_tasks_of_an_array_are_asked_about_as_one() -> None:
    tasks = [status(job_id=f"70_{task}", run_id=f"r_{task}", state=RunState.SUBMITTED) for task in range(4)]
    states = (
        JobState(job_id="70_0", state="CANCELLED", reason="", array_job_id="70", array_task_id="0"),
        JobState(
            job_id="70_[1,2...]", state="PENDING", reason="Resources", array_job_id="70", array_task_id="[1,2...]"
        ),
    )
    client = Client(*states)
    assert [seen.state for seen, _ in ask(client, *tasks)] == [RunState.ENDED, *[RunState.SUBMITTED] * 3]
    assert client.asked == [["70"]]


def test_a_job_that_has_not_begun_is_found_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert jobs_of("/r") == []
    for number in ("7", "8"):
        assert record(cluster="c", job_id=number, submitted_ns=int(number), run_dir=Path("/r")) is None
    record(cluster="c", job_id="9", submitted_ns=9, run_dir=Path("/other"))
    assert [entry.job_id for entry in jobs_of("/r")] == ["8", "7"]
    client = Client(JobState(job_id="8", state="PENDING", reason="Resources"))
    ((seen, _),) = ask(client, status(job_id=None, state=RunState.SUBMITTED))
    assert client.asked == [["8"]]
    assert status_line(seen).split()[-2:] == ["8", "r"]


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


def test_a_job_that_is_held_is_not_said_to_start_and_a_requeue_that_never_came_about_is_told() -> None:
    def text(state: RunState, job: JobState) -> str:
        return "\n".join(status_lines(status(state=state, outcome="failed"), job, seconds_left=None))

    held = JobState(job_id="42", state="PENDING", reason="JobHoldMaxRequeue", start_time="2026-11-21T02:16:42")
    said = text(RunState.SUBMITTED, held)
    assert "PENDING (JobHoldMaxRequeue), held: scontrol release 42 lets it go on" in said
    assert "expected to start" not in said
    # Whoever had decided the requeue was killed before Slurm heard of it.
    for word, lost in (("FAILED", True), ("NODE_FAIL", True), ("PENDING", False)):
        said = text(RunState.REQUEUED, JobState(job_id="42", state=word, reason=""))
        assert ("to requeue it: hpc-elastic requeue 42" in said) is lost, word


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    for name in ("20261118T110640-a", "20261118T110641-b"):
        failing_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_list_shows_where_the_time_of_all_runs_went(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--goodput", "--no-slurm", "--runs-dir", str(runs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["goodput", "of", "run"]
    goodput = goodput_of(collect_run(next(runs.iterdir())))
    share = f"{100 * (goodput.share or 0):.1f} %"
    assert [share in line for line in lines] == [True] * 3
    assert lines[0].endswith("% to end") or "% in checkpoints" in lines[0]
    assert lines[2].endswith("all 2 runs together")


def test_a_run_without_steps_is_in_the_whole_by_its_uptime(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builder = RunBuilder(runs / "20261118T110642-c", nodes=2).begin(at=10)
    builder.succeeded(0, 0, at=200)
    builder.end(0, at=201, outcome="succeeded", code=0)
    assert main(["list", "--goodput", "--no-slurm", "--runs-dir", str(runs)]) == 0
    _, first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("uptime of the processes, since no step was reported or counted")
    assert last.endswith("all 3 runs together, 1 of them by uptime")


def test_the_parts_in_json_add_up_to_the_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--goodput", "--json", "--no-slurm", "--runs-dir", str(runs)]) == 0
    found = [json.loads(line)["goodput"] for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2
    for one in found:
        assert sum(one["parts"].values()) == pytest.approx(one["wall"])
        assert one["share"] == pytest.approx(one["parts"]["training"] / one["wall"])
    assert main(["list", "--json", "--no-slurm", "--runs-dir", str(runs)]) == 0
    assert "goodput" not in json.loads(capsys.readouterr().out.splitlines()[0])


def test_a_run_shows_and_forgets_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    lost = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=1)
    save_record(run.paths.nodes_json, NodeRecord(evidence=(lost,), excluded=("n3",)))
    arguments = ["status", RUN_ID, "--runs-dir", str(tmp_path), "--no-slurm"]
    assert main(arguments) == 0
    assert "left out : n3" in capsys.readouterr().out
    for wrong in ("", "n[3", "None assigned"):
        assert main([*arguments, "--forget-nodes", wrong]) == 2
        assert "--forget-nodes" in capsys.readouterr().err
    assert main([*arguments, "--forget-nodes", "n[3,9]"]) == 0
    assert capsys.readouterr().out == "1 record forgotten\n"
    assert load_record(run.paths.nodes_json) == NodeRecord(excluded=("n3",)), "a requeue lets it in again"
