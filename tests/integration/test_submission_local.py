"""ElasticExecutor without Slurm: real agents and workers on this machine, all runs at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.files import write_json
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.submission import (
    Command,
    ElasticExecutor,
    ElasticJob,
    ElasticJobFailedError,
    ElasticJobUncompletedError,
    Module,
    Script,
    local_process,
)
from hpc_elastic.submission.environment import WorkerRaisedError
from hpc_elastic.workers import tree
from tests.rigs import submitted_functions as functions
from tests.rigs.waiting import until

LARGE = 64 << 20
SCRIPT = """
import os, sys, time
from pathlib import Path

mine = Path(__file__).with_name("epoch-" + os.environ["RANK"])
epoch = int(mine.read_text()) if mine.exists() else 0
print("from", epoch, sys.argv[1:], flush=True)
last = int(sys.argv[2])
if epoch == 0:
    mine.write_text("2")
    time.sleep(120)
    sys.exit("no notice came")
mine.write_text(str(last))
sys.exit(0)
"""
"""As one writes it for any launcher: it saves where it is, and goes on from there."""
PROGRAM = """
import os, sys
print(__name__, "rank", os.environ["RANK"], sys.argv[1:], flush=True)
sys.exit(int(sys.argv[2]))
"""


@dataclass
class Jobs:
    """Everything that the tests look at, submitted before the first of them."""

    folder: Path

    def __post_init__(self) -> None:
        self.places = {
            name: self.folder / name
            for name in ("saved", "over", "killed", "cancelled", "script", "held", "program", "done", "again")
        }
        for place in self.places.values():
            place.mkdir(parents=True)
        executor = ElasticExecutor(self.folder / "jobs" / "%j", cluster="local")
        executor.update_parameters(timeout_min=60)
        submit = executor.submit
        executor.update_parameters(nodes=2)
        self.saved = submit(functions.Saved(self.places["saved"]), "never")
        self.killed = submit(functions.killed_once, self.places["killed"])
        script = self.places["script"] / "train.py"
        script.write_text(SCRIPT)
        self.script = submit(Script(script), "--epochs", 4)
        self.done = submit(functions.is_done_under_a_notice, self.places["done"])
        executor.update_parameters(nodes=1, restart_on="infrastructure")
        self.raised = submit(functions.raises, ValueError("first"))
        self.odd = submit(functions.raises_odd)
        executor.update_parameters(setup=["export FROM_SETUP=yes"], teardown=["echo torn down"], stderr_to_stdout=True)
        self.spoke = submit(functions.speaks_to, 2)
        executor.update_parameters(setup=[], teardown=[], stderr_to_stdout=False, tasks_per_node=2)
        outside = 3
        self.large = submit(lambda: bytes(LARGE) if os.environ["RANK"] == "1" else outside)
        self.held = submit(functions.outlives_its_return, self.places["held"])
        program = self.places["program"] / "trains_here.py"
        program.write_text(PROGRAM)
        sys.path.insert(0, str(program.parent))
        self.module = submit(Module("trains_here"), "--lr", 0)
        sys.path.remove(str(program.parent))
        self.command = submit(Command(sys.executable, str(program)), "--lr", 0)
        executor.update_parameters(tasks_per_node=1)
        self.refused = submit(Command(sys.executable, str(program)), "--lr", 7)
        self.cancelled = submit(functions.sleeps, self.places["cancelled"])
        executor.update_parameters(timeout_min=0.25)
        self.late = submit(functions.sleeps, self.places["cancelled"])
        executor.update_parameters(timeout_min=9, max_num_timeout=0)
        self.over = submit(functions.Saved(self.places["over"]), "never")
        self.again = submit(functions.sleeps_once, self.places["again"])

    def all(self) -> list[ElasticJob[Any]]:
        return [value for value in vars(self).values() if isinstance(value, ElasticJob)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Jobs(tmp_path_factory.mktemp("submission"))
    yield found
    for job in found.all():
        if not job.done():
            job.cancel()
    for job in found.all():
        job.wait()


def test_every_rank_goes_on_from_its_own_state(jobs: Jobs) -> None:
    place = jobs.places["saved"]
    until(lambda: (place / "begun-0-1").exists() and (place / "begun-1-1").exists())
    jobs.saved._interrupt()
    assert jobs.saved.results() == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert (place / "saved-1").exists()
    assert jobs.saved.task(1).result() == [(1, 0), (1, 1)]
    assert jobs.saved.state == "COMPLETED"
    left = sorted(path.parent.parent.name for path in jobs.saved.run_dir.glob("attempt-*/checkpoint/*"))
    assert left == ["attempt-000", "attempt-000"]


def test_a_script_that_saves_by_itself_goes_on_after_a_notice(jobs: Jobs) -> None:
    """Unchanged, and without a word about notices."""
    until(lambda: all((jobs.places["script"] / f"epoch-{rank}").exists() for rank in (0, 1)))
    jobs.script._interrupt()
    assert jobs.script.results() == [None, None]
    for rank in (0, 1):
        said = jobs.script.task(rank).stdout() or ""
        assert said.splitlines()[0] == "from 0 ['--epochs', '4']"
        assert said.splitlines()[-1] == "from 2 ['--epochs', '4']"


def test_a_function_that_asks_for_notices_and_returns_before_it_was_to_save_is_not_called_again(jobs: Jobs) -> None:
    place = jobs.places["done"]
    until(lambda: all((place / f"begun-{rank}-0").exists() for rank in (0, 1)))
    jobs.done._interrupt()
    assert jobs.done.results() == [4, 4]
    assert not list(place.glob("begun-*-1"))


def test_a_worker_that_is_killed_is_started_again(jobs: Jobs) -> None:
    assert jobs.killed.results() == [1, 1]
    assert jobs.killed.num_tasks == 2


def test_a_failure_is_the_reports_verdict_and_the_cause_what_was_raised(jobs: Jobs) -> None:
    with pytest.raises(ElasticJobFailedError) as caught:
        jobs.raised.result()
    text = str(caught.value)
    assert "Root Cause (first observed failure):\n  KeyError: 'key'" in text
    assert jobs.raised.report() in text
    assert "not retryable" in text
    cause = caught.value.__cause__
    assert (type(cause), cause.args) == (KeyError, ("key",))  # type: ignore[union-attr]
    told = str(cause.__cause__)  # type: ignore[union-attr]
    assert re.search(r"submitted_functions.py\", line \d+, in raises\n", told)
    assert "ValueError: first\n\nThe above exception was the direct cause" in told
    assert "hpc_elastic" not in told, "our own frames are nobody's business"
    assert (jobs.raised.stdout() or "").count("called") == 1, "what a function raises is final, as asked for"
    assert jobs.raised.state == "FAILED"
    assert isinstance(jobs.raised.exception(), ElasticJobFailedError)


def test_an_exception_that_can_not_be_copied_is_told_of_all_the_same(jobs: Jobs) -> None:
    error = jobs.odd.exception()
    assert isinstance(error, ElasticJobFailedError)
    assert isinstance(error.__cause__, WorkerRaisedError)
    assert str(error.__cause__) == "OddError: odd 1 2"
    assert "OddError: odd 1 2" in str(error.__cause__.__cause__)


def test_shell_commands_around_the_run_and_one_stream(jobs: Jobs) -> None:
    assert jobs.spoke.result() == "yes"
    assert jobs.spoke.stdout() == "said\n"
    assert jobs.spoke.stderr() is None, "it goes to stdout"
    assert jobs.spoke.task(0) is jobs.spoke, "there is no other"
    until(lambda: jobs.spoke.log().endswith("torn down\n"))


def test_a_closure_and_a_large_value(jobs: Jobs) -> None:
    assert jobs.large.result() == 3
    assert jobs.large.task(1).result() == bytes(LARGE)


def test_a_cancelled_job_has_no_result(jobs: Jobs) -> None:
    until(lambda: (jobs.places["cancelled"] / "sleeping-0").exists() and jobs.cancelled.state == "RUNNING")
    jobs.cancelled.cancel()
    with pytest.raises(ElasticJobUncompletedError, match="it ended as CANCELLED"):
        jobs.cancelled.result()
    assert jobs.cancelled.state == "CANCELLED"
    again: ElasticJob[None] = ElasticJob(jobs.folder / "jobs" / "%j", jobs.cancelled.job_id)
    assert again.done()
    assert again.run_dir == jobs.cancelled.run_dir


def test_the_time_limit_ends_what_can_not_be_saved(jobs: Jobs) -> None:
    with pytest.raises(ElasticJobFailedError, match=r"Job not requeued because: timed-out and not checkpointable\."):
        jobs.late.result()
    assert jobs.late.state == "TIMEOUT"


def test_a_job_may_be_out_of_time_only_so_often(jobs: Jobs) -> None:
    until(lambda: (jobs.places["over"] / "begun-0-1").exists())
    jobs.over._interrupt(timeout=True)
    with pytest.raises(ElasticJobFailedError, match=r"Job not requeued because: timed-out too many times\."):
        jobs.over.result()
    assert "Job not requeued because: timed-out too many times." in (jobs.over.stdout() or "")
    assert jobs.over.state == "TIMEOUT"
    assert (jobs.places["over"] / "saved-0").exists(), "checkpoint() is called all the same, as submitit does"


def test_a_short_job_comes_back_when_its_requeue_is_asked_for(jobs: Jobs) -> None:
    """A notice in its last ten minutes would be its time limit's, and end it for good."""
    until(lambda: (jobs.places["again"] / "sleeping-0").exists())
    requeue = [sys.executable, "-m", "hpc_elastic", "requeue", str(jobs.again.run_dir)]
    subprocess.run(requeue, check=True)
    assert jobs.again.result() == "came back"
    assert "(requeue)" in jobs.again.log()


def test_a_function_that_has_returned_is_held_until_the_others_have(jobs: Jobs) -> None:
    assert jobs.held.results() == [True, True]


def test_a_module_and_a_command_run_on_every_rank(jobs: Jobs) -> None:
    for job in (jobs.module, jobs.command):
        assert job.results() == [None, None]
        for rank in (0, 1):
            assert job.task(rank).stdout() == f"__main__ rank {rank} ['--lr', '0']\n"
    with pytest.raises(ElasticJobFailedError, match="exit code 7"):
        jobs.refused.result()


def test_the_launcher_that_a_copied_run_names_is_not_believed(tmp_path: Path) -> None:
    """Whoever made the original may have written the number of any process into it."""
    paths = RunPaths(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            known = tree.look_at(bystander.pid)
            assert known is not None
            for facts in (
                {"pid": bystander.pid, "starttime": known.starttime},
                {"pid": str(bystander.pid), "starttime": known.starttime},
                {"pid": -1, "starttime": 0},
                {},
            ):
                write_json(paths.launcher_json, {"host": os.uname().nodename, **facts})
                assert not local_process.lives(paths)
                assert not local_process.send(paths, signal.SIGTERM)
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_signal_goes_past_the_shell_to_the_launcher(tmp_path: Path) -> None:
    """The shell still has the teardown to run."""
    paths = RunPaths(tmp_path)
    script = '"$@" &\nwait $!\necho the launcher ended: $?'
    launcher = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()", local_process.__name__]
    with subprocess.Popen(
        ["bash", "-c", script, "bash", *launcher, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            assert shell.stdout is not None
            assert shell.stdout.readline() == "up\n"
            proc = tree.look_at(shell.pid)
            assert proc is not None
            facts = {"pid": proc.pid, "starttime": proc.starttime, "host": os.uname().nodename}
            write_json(paths.launcher_json, facts)
            assert local_process.lives(paths)
            assert local_process.send(paths, signal.SIGTERM)
            assert shell.stdout.readline() == f"the launcher ended: {128 + signal.SIGTERM}\n"
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
