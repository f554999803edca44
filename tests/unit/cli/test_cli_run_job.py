"""``cancel`` and ``requeue`` in each state of a run; of a job on another cluster, which may not be asked here."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.cli import run_job
from hpc_elastic.cli.main import main
from hpc_elastic.cli.run_job import RunJob, cancel, find_run_job, requeue
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.launch.run_status import RunState
from hpc_elastic.run import index
from hpc_elastic.run.index import entries, record
from hpc_elastic.run.paths import RunPaths, load_attempt
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId, RequeueDisabledError, SlurmError, SlurmPermissionError, UnknownJobError
from hpc_elastic.slurm.job_state import JobState
from hpc_elastic.workers.tree import Delivery, look_at
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeJob, FakeSlurm
from tests.unit.cli.test_cli_status import status
from tests.unit.launch.test_launch_run_status import RUN_ID, Run


class Client:
    def __init__(self, state: str = "PENDING", *, refuses: Exception | None = None) -> None:
        self.state = state
        self.refuses = refuses
        self.done: list[str] = []
        self.comment = "hpc-elastic /r"

    def __getattr__(self, name: str) -> object:
        return lambda job: self.done.append(f"{name} {job}")

    def requeue(self, job: JobId) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.done.append(f"requeue {job}")

    def submit(self, script: str, *, extra: Sequence[str] = ()) -> JobId:
        self.done.append(" ".join(["submit", *extra, script]))
        return JobId("43")

    def queue_states(self, jobs: object) -> tuple[JobState, ...]:
        return (JobState(job_id="42", state=self.state, reason=""),)

    def job_state(self, job: JobId) -> JobState:
        return JobState(job_id=str(job), state=self.state, reason="", comment=self.comment)

    def elsewhere(self, job: JobId) -> str | None:
        return None


def asked(state: RunState, **changes: object) -> RunJob:
    found = status(state=state, outcome="failed", max_requeues=3, **changes)
    return RunJob(paths=RunPaths(Path("/r")), status=found, job=JobId("42"), owner=os.geteuid())


@pytest.mark.parametrize("state", [state for state in RunState if state is not RunState.ENDED])
def test_any_run_that_has_not_ended_is_cancelled(state: RunState) -> None:
    client = Client()
    said = cancel(asked(state), client)  # type: ignore[arg-type]
    assert client.done == ["cancel 42"]
    assert ("SIGTERM" in said) is (state not in (RunState.SUBMITTED, RunState.REQUEUED))


@pytest.mark.parametrize(
    ("act", "found", "why"),
    [
        (cancel, asked(RunState.ENDED), "has already ended: failed"),
        (requeue, asked(RunState.SUBMITTED), "is already in the queue"),
        (requeue, asked(RunState.REQUEUED), "is already in the queue"),
        (requeue, asked(RunState.TRAINING, requeues_used=3), "has used its 3 requeues"),
    ],
)
def test_what_has_nothing_to_do_is_refused(act: Callable[..., str], found: RunJob, why: str) -> None:
    client = Client()
    with pytest.raises(UsageError, match=why):
        act(found, client)
    assert client.done == []


AGAIN = ["requeue 42"]


@pytest.mark.parametrize(
    ("state", "slurms", "says", "done"),
    [
        (RunState.MEETING, "PENDING", "42", ["notify 42"]),
        (RunState.TRAINING, "PENDING", "42", ["notify 42"]),
        (RunState.SAVING, "PENDING", "42", []),
        (RunState.ENDING, "PENDING", "42", []),
        (RunState.ENDED, "PENDING", "42", AGAIN),
        # Its batch script was killed.
        (RunState.TRAINING, "FAILED", "had ended without a verdict; it is back in the queue", AGAIN),
        (RunState.ENDING, "FAILED", "had ended without a verdict; it is back in the queue", AGAIN),
        # The process that had decided on a requeue was killed before Slurm heard of it.
        (RunState.REQUEUED, "FAILED", "without the requeue that was decided", AGAIN),
        (RunState.REQUEUED, "CANCELLED", "without the requeue that was decided", AGAIN),
        (RunState.REQUEUED, "NODE_FAIL", "without the requeue that was decided", AGAIN),
        (RunState.REQUEUED, "COMPLETED", "without the requeue that was decided", AGAIN),
        (RunState.SUBMITTED, "CANCELLED", "had ended before it began", AGAIN),
        (RunState.SUBMITTED, "DEADLINE", "had ended before it began", AGAIN),
    ],
)
def test_workers_save_before_a_requeue_and_a_job_that_ended_is_put_back(
    state: RunState, slurms: str, says: str, done: list[str]
) -> None:
    client = Client(slurms)
    assert says in requeue(asked(state), client)  # type: ignore[arg-type]
    assert client.done == done


@pytest.mark.parametrize(
    "refusal",
    [
        RequeueDisabledError(what="requeueing job 42", why="Requested operation is presently disabled"),
        UnknownJobError(what="requeueing job 42", why="Invalid job id specified"),
        SlurmPermissionError(what="requeueing job 42", why="Access/permission denied"),
    ],
)
@pytest.mark.parametrize(("name", "extra"), [("run", ""), ("task-3", "--array=3 ")])
def test_a_run_whose_job_can_not_run_again_goes_on_in_another_job(
    refusal: SlurmError, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be requeued, Slurm has forgotten it, or the site keeps that for operators."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    client, found = Client(refuses=refusal), asked(RunState.ENDED)
    found = replace(found, paths=RunPaths(tmp_path / name))
    found.paths.root.mkdir()
    client.comment = f"hpc-elastic {found.paths.root if name == 'run' else tmp_path}"
    with pytest.raises(type(refusal)):
        requeue(found, client)  # type: ignore[arg-type]
    script = tmp_path / ("job.sbatch" if extra else "run/job.sbatch")
    script.touch()
    said = requeue(found, client)  # type: ignore[arg-type]
    assert client.done == [f"submit {extra}{script}"]
    job = "43_3" if extra else "43"
    assert said.startswith(f"job {job} goes on from the last checkpoint")
    assert str(refusal.facts["why"]) in said
    assert [entry.run_dir for entry in index.entries(job)] == [script.parent]


def test_the_job_is_the_attempts_or_the_one_that_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = Run(tmp_path)
    args = SimpleNamespace(run=RUN_ID, runs_dir=str(tmp_path))
    with pytest.raises(UsageError, match="has no job that this account knows of"):
        find_run_job(args)
    record(cluster="c", job_id="7", submitted_ns=1, run_dir=run.paths.root)
    assert str(find_run_job(args).job) == "7"
    run.attempt(0)
    assert str(find_run_job(args).job) == "42"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"batch_host": "elsewhere"}, "runs on elsewhere: give this command there"),
        ({"supervisor": {"starttime": 1}}, "has ended without a verdict"),
        ({"supervisor": {"run_dir": "/copied/from"}}, "press Ctrl-C where it was started"),
    ],
)
def test_a_local_run_is_signalled_from_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    refused: str,
) -> None:
    run = Run(tmp_path)
    run.paths.run_json.write_text(run.paths.run_json.read_text().replace('"slurm"', '"local"'))
    run.attempt(0)
    this = look_at(os.getpid())
    assert this is not None
    path = run.paths.attempt(0).attempt_json
    supervisor = {"pid": this.pid, "starttime": this.starttime, "run_dir": os.path.realpath(run.paths.root)}
    facts = {**json.loads(path.read_text()), "cluster": "local", "batch_host": os.uname().nodename, **changes}
    path.write_text(json.dumps({**facts, "supervisor": {**supervisor, **changes.get("supervisor", {})}}))
    sent: list[signal.Signals] = []
    monkeypatch.setattr(run_job, "kill_safely", lambda proc, number: sent.append(number) or Delivery.SENT)
    for name in ("cancel", "requeue"):
        assert main([name, RUN_ID, "--runs-dir", str(tmp_path)]) == (2 if refused else 0)
        assert refused in capsys.readouterr().err
    assert sent == ([] if refused else [signal.SIGTERM, signal.SIGUSR2])


def test_a_local_run_that_has_ended_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.paths.run_json.write_text(run.paths.run_json.read_text().replace('"slurm"', '"local"'))
    run.attempt(0).ended("succeeded", 0)
    attempt = run.paths.attempt(0).attempt_json
    attempt.write_text(attempt.read_text().replace('"slurm"', '"local"'))
    for name, then in (("cancel", "nothing to cancel"), ("requeue", "start it again with the command")):
        assert main([name, RUN_ID, "--runs-dir", str(tmp_path)]) == 2
        assert f"has already ended: succeeded; {then}" in capsys.readouterr().err


OTHERS_COMMENT = "hpc-elastic /home/alice/runs/another"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The cluster ``rig``, from which ``beta`` can be asked; both have a job 9 of this user's."""
    fake = FakeSlurm()
    fake.clusters["beta"] = FakeSlurm()
    for cluster, comment in ((fake, OTHERS_COMMENT), (fake.clusters["beta"], f"hpc-elastic {tmp_path / RUN_ID}")):
        cluster.jobs["9"] = FakeJob("9", "pending-held", fields={"Comment": comment})
    monkeypatch.setattr(run_job, "slurm_client", lambda timeout=0.0: SlurmClient(fake, FakeClock()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return fake


@pytest.fixture
def run(tmp_path: Path, here: FakeSlurm) -> Run:
    """One that waits, submitted to ``beta``."""
    found = Run(tmp_path)
    old = found.paths.run_json.stat().st_mtime - 4000
    os.utime(found.paths.run_json, (old, old))
    record(cluster="beta", job_id="9", submitted_ns=1, run_dir=found.paths.root)
    return found


def command(name: str, run: Run, *more: str) -> int:
    return main([name, *more, RUN_ID, "--runs-dir", str(run.paths.root.parent)])


def changes(slurm: FakeSlurm) -> list[str]:
    return [shlex.join(call) for call in slurm.calls if call[0] in ("scancel", "sbatch")]


def test_every_command_goes_to_the_jobs_cluster(run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("status", run) == 0
    out = capsys.readouterr().out
    assert f"run {RUN_ID}: submitted, job 9 on cluster beta" in out
    assert "held: scontrol -M beta release 9 lets it go on" in out
    assert command("clean", run, "--yes") == 0
    assert "may be running (submitted)" in capsys.readouterr().err
    assert command("cancel", run) == 0
    assert capsys.readouterr().out == "job 9 on cluster beta is cancelled; none of its workers was running\n"
    assert changes(here) == ["scancel -M beta 9"]
    assert here.jobs["9"].state == "pending-held", "this number is another job's here"


def test_the_job_log_is_where_slurm_says(run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """By a script of the user's own, or with ``%x`` of a job that an environment variable names."""
    spec = load_run_spec(run.paths.run_json)
    replace(spec, sbatch_args=("--output=/logs/%x-%j.out",)).save(run.paths.run_json)
    here.clusters["beta"].jobs["9"].fields["StdOut"] = "/logs/mine-9.out"
    assert command("status", run) == 0
    assert "log      : /logs/mine-9.out\n" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["unknown", "down"])
def test_what_can_not_be_asked_has_not_ended(
    run: Run, here: FakeSlurm, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No accounting that both share; or the other controller is down, of which squeue says so and exits with 0."""
    if how == "unknown":
        del here.clusters["beta"]
    else:
        here.clusters["beta"].reachable = False
    assert command("status", run) == 0
    out, err = capsys.readouterr()
    assert f"run {RUN_ID}: submitted" in out
    assert "on cluster beta, not asked here" in out
    assert "job 9 is on cluster beta, not asked here: " in err
    assert command("clean", run, "--yes") == 0
    assert run.paths.run_json.is_file()
    for name in ("cancel", "requeue"):
        assert command(name, run) == 2
        assert "job 9 is on cluster beta, which can't be asked here" in capsys.readouterr().err
    assert changes(here) == []


def test_a_job_that_its_cluster_does_not_know_is_not_cancelled(
    run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    del here.clusters["beta"].jobs["9"]
    assert command("cancel", run) == 2
    assert "job 9 on cluster beta is not known to Slurm; nothing is cancelled" in capsys.readouterr().err
    os.utime(run.paths.run_json)
    assert command("clean", run, "--yes") == 0
    assert "may be running (submitted)" in capsys.readouterr().err, "it was made just now"


@pytest.mark.parametrize("begun", [False, True])
def test_a_number_that_is_another_jobs_now(
    run: Run, here: FakeSlurm, begun: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    here.clusters["beta"].jobs["9"].fields["Comment"] = OTHERS_COMMENT if not begun else "(null)"
    if begun:  # from a batch script of the user's own, which has no mark: but it ran, and this one never did
        run.attempt(0)
        path = run.there.attempt_json
        replace(load_attempt(path), job_id="9", slurm_cluster="beta").save(path)
        assert job_now(run.paths) == JobId("9", "beta")
    for name in ("cancel", "requeue"):
        assert command(name, run) != 0
        assert "that number is now of another job" in capsys.readouterr().err
    assert changes(here) == []


def test_the_cluster_of_this_host_needs_no_name(run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """-M takes an accounting that answers, and not every site has one."""
    here.jobs["8"] = FakeJob("8", "pending-held", fields={"Comment": f"hpc-elastic {run.paths.root}"})
    record(cluster="rig", job_id="8", submitted_ns=2, run_dir=run.paths.root)
    assert command("cancel", run) == 0
    assert changes(here) == ["scancel 8"]


def test_of_two_clusters_the_one_here_is_meant(run: Run, here: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Run(tmp_path / "b")
    here.jobs["9"].fields["Comment"] = f"hpc-elastic {other.paths.root}"
    record(cluster="rig", job_id="9", submitted_ns=0, run_dir=other.paths.root)
    assert [entry.cluster for entry in entries("9")] == ["beta", "rig"]
    assert main(["cancel", "9"]) == 0
    assert changes(here) == ["scancel 9"]


def test_of_a_run_that_is_gone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.paths.run_json.unlink()
    assert main(["status", "9"]) == 2
    assert "to end the job: scancel -M beta 9" in capsys.readouterr().err
