"""``--follow`` and ``--wait``: what is shown through requeues, outages and late results; when a run has ended."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hpc_elastic.cli import log_events
from hpc_elastic.cli.follow import SILENT_SECONDS, RunEnd, RunWatch, follow, follow_to_end, how_it_ended
from hpc_elastic.cli.logs import LogChoice, LogFollower, LogPrinter
from hpc_elastic.cli.main import main
from hpc_elastic.cli.report import ReportFollower
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.launch.run_directory import create_run, create_tasks
from hpc_elastic.launch.run_status import FORGOTTEN_SECONDS
from hpc_elastic.run.index import record
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId, SlurmUnavailableError
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import RunBuilder
from tests.rigs.specs import make_attempt, make_spec, store_result
from tests.unit.launch.test_launch_run_status import Run


class StagedClock(FakeClock):
    """After so many seconds each, something happens."""

    def __init__(self, *happens: tuple[float, Callable[[], object]]) -> None:
        super().__init__()
        self.happens = [(self.now + after, what) for after, what in happens]

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.now += max(0.05, seconds)
        while self.happens and self.happens[0][0] <= self.now:
            self.happens.pop(0)[1]()
        return False


def story(tmp_path: Path) -> tuple[RunPaths, StagedClock]:
    """An attempt that is requeued after 3 s; the next one prints after a minute, restarts at once, and ends well."""
    builder = RunBuilder(tmp_path / "run", nodes=1)
    paths = builder.paths

    def begin(attempt: int) -> None:
        builder.attempt(attempt, at=attempt * 100)

    def say(attempt: int, round_index: int, text: str) -> None:
        builder.round(attempt, round_index, at=attempt * 100 + round_index)
        path = paths.attempt(attempt).rank(round_index, 0).stdout
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        path.write_text(text)

    def end(attempt: int, code: int, outcome: str) -> None:
        builder.end(attempt, at=attempt * 100 + 50, outcome=outcome, code=code)
        store_result(paths.attempt(attempt), code, outcome=outcome, reason="so")

    def quick_round() -> None:
        say(1, 0, "next attempt\n")
        say(1, 1, "next round")

    begin(0)
    say(0, 0, "".join(f"line {number}\n" for number in range(20)))
    clock = StagedClock(
        (3.0, lambda: end(0, 75, "failed")),
        (60.0, lambda: begin(1)),
        (61.0, quick_round),
        (90.0, lambda: end(1, 0, "succeeded")),
    )
    return paths, clock


def follow_logs(paths: RunPaths, clock: StagedClock, *, tail: int, attempt: int | None = None) -> tuple[int, str]:
    out = io.BytesIO()
    asked = AskedRun(paths=paths, attempt=attempt)
    follower = LogFollower(asked, LogChoice(), LogPrinter(out), tail=tail, clock=clock)
    return follow_to_end(asked, follower, clock=clock), out.getvalue().decode()


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, clock = story(tmp_path)
    code, shown = follow_logs(paths, clock, tail=2)
    assert code == 0
    assert shown.splitlines() == [
        "[rank 0] line 18",
        "[rank 0] line 19",
        "--- attempt 1, round 0 ---",
        "[rank 0] next attempt",
        "--- attempt 1, round 1 ---",
        "[rank 0] next round",
    ]
    assert capsys.readouterr().err.splitlines() == [
        "hpc-elastic: requeued: waiting for the next attempt",
        f"hpc-elastic: run {paths.run_id} ended: succeeded: so (exit code 0)",
    ]


def test_logs_of_one_attempt_end_with_it(tmp_path: Path) -> None:
    paths, clock = story(tmp_path)
    assert follow_logs(paths, clock, tail=1, attempt=0) == (75, "[rank 0] line 19\n")


def test_logs_of_a_run_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, clock = story(tmp_path)
    hidden = paths.root / "later"
    paths.attempt(0).root.rename(hidden)
    clock.happens = [(clock.now + 1.0, lambda: hidden.rename(paths.attempt(0).root)), *clock.happens[:1]]
    clock.happens.append((clock.now + 5.0, lambda: store_result(paths.attempt(0), 0, outcome="succeeded")))
    code, shown = follow_logs(paths, clock, tail=1)
    assert (code, shown.count("\n")) == (0, 20), "what was not there at first is new"
    assert "has started no worker yet; waiting" in capsys.readouterr().err


def test_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, clock = story(tmp_path)
    asked = AskedRun(paths=paths, attempt=None)
    follower = log_events.EventFollower(
        asked,
        log_events.EventChoice(names=frozenset({"attempt_started", "attempt_ended"})),
        log_events._Printer(as_json=False, colours=False),
        tail=None,
        clock=clock,
    )
    assert follow_to_end(asked, follower, clock=clock) == 0
    names = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert names == ["attempt_started", "attempt_ended"] * 2


def test_report(tmp_path: Path) -> None:
    paths, clock = story(tmp_path)
    shown: list[float] = []
    asked = AskedRun(paths=paths, attempt=None)
    follower = ReportFollower(asked, lambda: shown.append(clock.now), clock=clock)
    began = clock.now
    assert follow_to_end(asked, follower, clock=clock) == 0
    assert 4 <= len(shown) <= 6, "when there is news, and not each second"
    assert shown[0] == began
    assert shown[-1] - began >= 90


def look(watched: RunWatch, clock: FakeClock, seconds: float = 60.0) -> RunEnd | None:
    """Ask now and then for so long; the first end counts."""
    until = clock.now + seconds
    while clock.now < until:
        end = watched.end()
        if end is not None:
            return end
        clock.now += 5.0
    return None


def test_by_its_result_but_for_a_requeue_however_long_the_queue_is(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    watched = RunWatch(paths, attempt=None, clock=clock, client=None)
    assert look(watched, clock) is None, "it has no attempt yet"
    store(paths, 0, 75, reason="so it is")
    assert look(watched, clock, 10 * SILENT_SECONDS) is None
    store(paths, 1, 93, reason="so it is")
    assert look(watched, clock) == RunEnd(code=93, why="failed: so it is (exit code 93)")
    first = RunWatch(paths, attempt=0, clock=clock, client=None)
    assert look(first, clock) == RunEnd(code=75, why="failed: so it is (exit code 75)")


class Gone:
    """A Slurm whose job was cancelled in the queue."""

    asked = 0

    def queue_states(self, jobs: object) -> tuple[JobState, ...]:
        self.asked += 1
        return (JobState(job_id="5", state="CANCELLED" if self.asked > 2 else "PENDING", reason=""),)

    def accounted(self, jobs: object) -> tuple[JobState, ...]:
        return ()


def test_by_slurm_where_no_attempt_ever_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = Run(tmp_path)
    record(cluster="", job_id="5", submitted_ns=1, run_dir=run.paths.root)
    clock, slurm = FakeClock(), Gone()
    watched = RunWatch(run.paths, attempt=None, clock=clock, client=cast("SlurmClient", slurm))
    end = look(watched, clock, 100.0)
    assert end == RunEnd(code=143, why="cancelled while it waited in the queue (exit code 143)")
    assert slurm.asked == 3, "rarely"


def test_by_silence(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    sign = paths.attempt(0).store / "node" / "00000-n1"
    sign.parent.mkdir(parents=True)
    watched = RunWatch(paths, attempt=None, clock=clock, client=None)
    for number in range(20):
        sign.write_text("x" * number)  # an agent's sign of life
        assert look(watched, clock, SILENT_SECONDS / 3) is None
    end = look(watched, clock, SILENT_SECONDS + 60)
    assert end is not None
    assert end.code == 1
    assert "none of its files has changed for 5 minutes" in end.why


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


def test_a_requeue_that_is_under_way_is_not_the_end(paths: RunPaths) -> None:
    """The batch script has exited with 75, and Slurm shows the job as failed for a moment before it is pending."""
    store(paths, 0, 75)
    answers = [state("FAILED", exit_code=75)] * 3 + [state("PENDING"), state("RUNNING")]
    client = Scripted(*answers, state("COMPLETED"))
    clock = Clock(lambda: store(paths, 1, 0) if client.asked == 5 else None)
    assert run(paths, client, clock=clock) == 0


@pytest.mark.parametrize("is_requeued", [False, True])
def test_cancelled_while_pending_is_known_at_once(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], is_requeued: bool
) -> None:
    if is_requeued:
        store(paths, 0, 75)
    client = Scripted(state("PENDING"), state("CANCELLED"))
    assert run(paths, client) == 143
    assert "cancelled by Slurm" in capsys.readouterr().err
    assert client.asked == 2 or is_requeued


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


@pytest.mark.parametrize(("next_job", "job"), [(None, "7"), ("8", "8")], ids=["its job", "the job that has it now"])
def test_ctrl_c_leaves_the_job_running_and_says_so(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], next_job: str | None, job: str
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    if next_job:
        store(paths, 0, 75, next_job=next_job)
    assert run(paths, Scripted(state("FAILED", exit_code=75), state("RUNNING")), clock=Clock(interrupt)) == 130
    said = capsys.readouterr().err
    assert f"job {job} continues; to end it: scancel {job}; to follow it again: " in said
    assert f"hpc-elastic logs {job} --follow (or, for its exit code, hpc-elastic report {job} --follow)\n" in said


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
        ("launch failed requeued held", "requeued held; held: scontrol release 7 lets it go on\n"),
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


@pytest.mark.parametrize("seen", ["as it begins", "while it runs", "after its end"])
def test_a_follow_on_job_is_followed(paths: RunPaths, capsys: pytest.CaptureFixture[str], seen: str) -> None:
    store(paths, 0, 75, next_job="8")
    if seen != "as it begins":
        paths.attempt(1).root.mkdir()
        make_attempt(number=1, started_ns=1, job_id="8").save(paths.attempt(1).attempt_json)
    has_ended = seen == "after its end"
    if has_ended:
        store(paths, 1, 0)
    client = Scripted(state("FAILED", exit_code=75), *[state("RUNNING")] * (0 if has_ended else 9), state("COMPLETED"))
    clock = Clock(lambda: store(paths, 1, 0) if client.asked == 10 else None)
    assert run(paths, client, clock=clock) == 0
    said = capsys.readouterr().err
    assert "the run continues in job 8" in said
    assert ("job 8 is running" in said) is not has_ended
