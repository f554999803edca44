"""When a run has ended, and with which code: through requeues, outages and late results."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hpc_elastic.cli.follow import follow, how_it_ended
from hpc_elastic.cli.main import main
from hpc_elastic.launch.run_directory import create_run, create_tasks
from hpc_elastic.launch.run_status import FORGOTTEN_SECONDS
from hpc_elastic.run.index import record
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId, SlurmUnavailableError
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_attempt, make_spec, store_result

JOB = JobId("7")
ARRAY = make_spec(
    run_id="r", uid="u", name="train", created_ns=7, cluster="slurm", min_nodes=1, max_nodes=1, array="1-7"
)
Answer = tuple[JobState, ...] | Exception


def state(word: str, **facts: object) -> tuple[JobState, ...]:
    return (JobState(job_id="7", state=word, reason=str(facts.pop("reason", "")), **facts),)  # type: ignore[arg-type]


class Scripted:
    """Answers with one state after the other; the last one stays."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.started = 0

    def start_now(self, job: JobId) -> None:
        self.started += 1

    def accounted(self, jobs: object) -> tuple[JobState, ...]:
        return ()

    def job_states(self, job: JobId) -> tuple[JobState, ...]:
        assert job in (JOB, JobId("8"))
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Clock(FakeClock):
    """Calls `at` each time that somebody waits."""

    def __init__(self, at: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._at = at

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        if self._at:
            self._at()
        return super().wait(stop, seconds)


def store(paths: RunPaths, attempt: int, code: int, **more: Any) -> None:
    store_result(paths.attempt(attempt), code, **more)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def run(paths: RunPaths, client: Scripted, *, clock: Clock | None = None, show_log: bool = False) -> int:
    return follow(cast("SlurmClient", client), JOB, paths, clock=clock or Clock(), show_log=show_log)


def test_the_code_is_the_last_attempts(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, 0, 75)
    store(paths, 1, 93)
    client = Scripted(
        state("PENDING", reason="Resources"),
        state("RUNNING", nodes=("n1", "n2")),
        state("COMPLETING"),
        state("PENDING", reason="BeginTime", restarts=1, start_time="2026-11-21T02:16:42"),
        state("RUNNING", nodes=("n3",), restarts=1),
        state("FAILED", reason="NonZeroExitCode", exit_code=93),
    )
    assert run(paths, client) == 93
    said = capsys.readouterr().err
    assert "job 7 is pending: Resources\n" in said
    assert "job 7 is running on n[1-2]\n" in said
    assert "job 7 is pending again (restart 1): BeginTime, not before 2026-11-21T02:16:42\n" in said
    assert "hpc-elastic report 7\n" in said


def test_a_job_that_is_held_says_what_lets_it_go_on(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, 0, 0)
    held = state("PENDING", reason="launch failed requeued held", restarts=1)
    assert run(paths, Scripted(held, state("RUNNING", nodes=("n1",)), state("COMPLETED"))) == 0
    said = capsys.readouterr().err
    way_out = "held: scontrol release 7 lets it go on"
    assert f"job 7 is pending again (restart 1): launch failed requeued held; {way_out}\n" in said


def test_a_requeue_that_is_under_way_is_not_the_end(paths: RunPaths) -> None:
    """The batch script has exited with 75, and Slurm shows the job as failed for a moment before it is pending."""
    store(paths, 0, 75)
    answers = [state("FAILED", exit_code=75)] * 3 + [state("PENDING"), state("RUNNING")]
    client = Scripted(*answers, state("COMPLETED"))
    clock = Clock(lambda: store(paths, 1, 0) if client.asked == 5 else None)
    assert run(paths, client, clock=clock) == 0


def test_cancelled_while_pending_after_a_requeue(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, 0, 75)
    assert run(paths, Scripted(state("PENDING"), state("CANCELLED"))) == 143
    assert "cancelled by Slurm" in capsys.readouterr().err


def test_cancelled_before_it_began_is_known_at_once(paths: RunPaths) -> None:
    client = Scripted(state("PENDING"), state("CANCELLED"))
    assert run(paths, client) == 143
    assert client.asked == 2


def test_a_result_that_is_seen_late(paths: RunPaths) -> None:
    client = Scripted(state("RUNNING"), state("COMPLETED"))
    clock = Clock(lambda: store(paths, 0, 0) if client.asked == 4 else None)
    assert run(paths, client, clock=clock) == 0
    assert client.asked <= 6


def test_an_attempt_without_a_result_is_not_told_by_the_one_before(paths: RunPaths) -> None:
    store(paths, 0, 75)
    paths.attempt(1).root.mkdir()
    assert run(paths, Scripted(state("NODE_FAIL", reason="NodeDown"))) == 1


def test_a_controller_that_is_away_is_waited_for(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, 0, 0)
    away = SlurmUnavailableError(what="looking up job 7", why="Unable to contact slurm controller")
    assert run(paths, Scripted(state("RUNNING"), away, away, away, state("COMPLETED"))) == 0
    assert capsys.readouterr().err.count("since Slurm does not answer: Unable to contact") == 1


def test_a_job_that_slurm_forgot(paths: RunPaths) -> None:
    store(paths, 0, 0)
    assert run(paths, Scripted(state("RUNNING"), ())) == 0


def test_a_forgotten_job_without_a_result(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Only after as long as Slurm's own record of an ended job lasts: a controller that restarts knows few jobs."""
    clock = Clock()
    assert run(paths, Scripted(()), clock=clock) == 1
    assert FORGOTTEN_SECONDS <= clock.monotonic() - Clock().monotonic() < FORGOTTEN_SECONDS + 10
    assert "Slurm no longer knows the job" in capsys.readouterr().err
    store(paths, 0, 75)
    unknown = [()] * int(FORGOTTEN_SECONDS / 2 - 1)  # it is asked about every 2 s
    back = Scripted(state("FAILED", exit_code=75), *unknown, state("RUNNING"), state("COMPLETED"))
    assert run(paths, back, clock=Clock(lambda: store(paths, 1, 0) if back.asked > 150 else None)) == 0


def test_the_log_is_shown_as_it_grows_and_to_its_end(
    paths: RunPaths, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    pieces = [b"first\n", b"sec", b"ond \xff\n", b"late\n"]

    def grow() -> None:
        if pieces:
            with open(paths.job_log, "ab") as file:
                file.write(pieces.pop(0))

    store(paths, 0, 0)
    client = Scripted(state("PENDING"), state("RUNNING"), state("COMPLETED"))
    assert run(paths, client, clock=Clock(grow), show_log=True) == 0
    assert capfdbinary.readouterr().out == b"first\nsecond \xff\nlate\n"


def test_on_a_terminal_the_log_can_not_steer_it(
    paths: RunPaths, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(paths, 0, 0)
    paths.job_log.write_bytes(b"first\n\xc2\x9b2J\x1b[2Jsecond \xff\n")
    monkeypatch.setattr("hpc_elastic.cli.follow.is_terminal", lambda stream: True)
    assert run(paths, Scripted(state("COMPLETED")), show_log=True) == 0
    assert capfdbinary.readouterr().out == b"first\n\\u009b2Jsecond \\xff\n"


def test_ctrl_c_leaves_the_job_running_and_says_so(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert run(paths, Scripted(state("RUNNING")), clock=Clock(interrupt)) == 130
    said = capsys.readouterr().err
    assert "job 7 continues; to end it: scancel 7; to follow it again: " in said
    assert "hpc-elastic logs 7 --follow (or, for its exit code, hpc-elastic report 7 --follow)\n" in said


def test_ctrl_c_names_the_job_that_has_the_run_now(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    store(paths, 0, 75, next_job="8")
    client = Scripted(state("FAILED", exit_code=75), state("RUNNING"))
    assert run(paths, client, clock=Clock(interrupt)) == 130
    assert "to end it: scancel 8;" in capsys.readouterr().err


def test_a_job_that_never_starts_is_not_waited_for(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    client = Scripted(state("PENDING", reason="Dependency"), state("PENDING", reason="DependencyNeverSatisfied"))
    assert run(paths, client) == 1
    assert client.asked == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "is no longer waited for: DependencyNeverSatisfied: the job that it depends on ended otherwise" in last
    assert last.endswith("scancel 7 takes it out of the queue")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("JobHeldUser", "held: scontrol release 7 lets it go on"),
        ("PartitionTimeLimit", "waits until the limit or the job is changed: scontrol update JobId=7 …, or scancel 7"),
        ("QOSMaxNodePerJobLimit", "waits until the limit"),
        ("AssocGrpCpuLimit", "pending: AssocGrpCpuLimit\n"),
        ("ReqNodeNotAvail, UnavailableNodes:n3", "pending: ReqNodeNotAvail, UnavailableNodes:n3\n"),
    ],
)
def test_what_time_or_somebody_may_mend_is_waited_for(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], reason: str, shown: str
) -> None:
    store(paths, 0, 0)
    waits = state("PENDING", reason=reason)
    assert run(paths, Scripted(*[waits] * 50, state("RUNNING"), state("COMPLETED"))) == 0
    said = capsys.readouterr().err
    assert shown in said
    assert said.count(reason) == 1


def test_an_arrays_end_names_commands_that_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths = create_run(ARRAY, tmp_path / "runs").paths
    tasks = range(1, 8)
    create_tasks(paths, ARRAY, tasks)
    record(cluster="", job_id="7", submitted_ns=1, run_dir=paths.root)
    for task in (1, 2, 3, 4, 5):
        store(paths.task(task), 0, 0 if task == 1 else 1)
    store(paths.task(6), 0, 0)
    assert run(paths, Scripted((*state("FAILED", exit_code=1), *state("CANCELLED")))) == 143
    last = capsys.readouterr().err.splitlines()[-1]
    commands = re.findall(r"hpc-elastic (\w+) (\w+)", last)
    assert commands == [("report", "7_2"), ("report", "7_3"), ("report", "7_4"), ("status", "7")]
    assert "; 1 more failed; " in last
    assert "hpc-elastic report 7;" not in last
    for command, job in commands:
        arguments = ["--no-slurm"] if command == "status" else []
        assert main([command, job, *arguments]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("states", "result", "code"),
    [
        (state("COMPLETED"), 0, 0),
        (state("COMPLETED"), None, 0),
        (state("FAILED", exit_code=2), None, 2),
        (state("FAILED", exit_signal=9), None, 137),
        (state("TIMEOUT"), None, 143),
        (state("TIMEOUT"), 75, 143),
        (state("OUT_OF_MEMORY"), None, 1),
        (state("FAILED", exit_code=124), 124, 124),
        ((*state("COMPLETED"), *state("FAILED", exit_code=3), *state("COMPLETED")), None, 3),
    ],
)
def test_codes(states: tuple[JobState, ...], result: int | None, code: int) -> None:
    assert how_it_ended(states, result).code == code


def pending(restarts: int = 1, reason: str = "BeginTime") -> JobState:
    return state("PENDING", reason=reason, restarts=restarts, start_time="2026-11-21T02:16:42")


def test_slurms_delay_after_a_requeue_is_waived_once_for_each(paths: RunPaths) -> None:
    store(paths, 0, 75)
    client = Scripted(pending(), pending(), state("RUNNING"), pending(2), pending(2), state("COMPLETED"))
    clock = Clock(lambda: store(paths, 1, 0) if client.asked == 6 else None)
    assert run(paths, client, clock=clock) == 0
    assert client.started == 2


def test_a_delay_that_is_somebodys_wish_is_not(paths: RunPaths) -> None:
    store(paths, 0, 75, idle=2)
    client = Scripted(pending(), state("PENDING", reason="BeginTime"), pending(reason="Resources"), state("CANCELLED"))
    assert run(paths, client) == 143
    assert client.started == 0


def test_a_follow_on_job_is_followed(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, 0, 75, next_job="8")
    client = Scripted(state("FAILED", exit_code=75), state("RUNNING"), state("COMPLETED"))
    clock = Clock(lambda: store(paths, 1, 0) if client.asked == 3 else None)
    assert run(paths, client, clock=clock) == 0
    said = capsys.readouterr().err
    assert "the run continues in job 8" in said
    assert "job 8 is running" in said


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_follow_on_job_that_has_begun_before_anybody_looked_is_followed(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], has_ended: bool
) -> None:
    store(paths, 0, 75, next_job="8")
    paths.attempt(1).root.mkdir()
    info = make_attempt(number=1, started_ns=1, job_id="8")
    info.save(paths.attempt(1).attempt_json)
    if has_ended:
        store(paths, 1, 0)
    client = Scripted(state("FAILED", exit_code=75), *[state("RUNNING")] * (0 if has_ended else 9), state("COMPLETED"))
    clock = Clock(lambda: store(paths, 1, 0) if client.asked == 10 else None)
    assert run(paths, client, clock=clock) == 0
    assert "the run continues in job 8" in capsys.readouterr().err
