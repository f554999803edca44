"""``--follow``: what is shown through requeues, and when the run counts as ended: by its result, or a long silence."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from hpc_elastic.cli import log_events
from hpc_elastic.cli.follow import SILENT_SECONDS, RunEnd, RunWatch, follow_to_end
from hpc_elastic.cli.logs import LogChoice, LogFollower, LogPrinter
from hpc_elastic.cli.report import ReportFollower
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.run.index import record
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import RunBuilder
from tests.rigs.specs import store_result
from tests.unit.launch.test_launch_run_status import Run


class Clock(FakeClock):
    """After so many seconds each, something happens."""

    def __init__(self, *happens: tuple[float, Callable[[], object]]) -> None:
        super().__init__()
        self.happens = [(self.now + after, what) for after, what in happens]

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.now += max(0.05, seconds)
        while self.happens and self.happens[0][0] <= self.now:
            self.happens.pop(0)[1]()
        return False


def story(tmp_path: Path) -> tuple[RunPaths, Clock]:
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
    clock = Clock(
        (3.0, lambda: end(0, 75, "failed")),
        (60.0, lambda: begin(1)),
        (61.0, quick_round),
        (90.0, lambda: end(1, 0, "succeeded")),
    )
    return paths, clock


def follow_logs(paths: RunPaths, clock: Clock, *, tail: int, attempt: int | None = None) -> tuple[int, str]:
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


def store(paths: RunPaths, attempt: int, code: int, outcome: str = "failed") -> None:
    store_result(paths.attempt(attempt), code, outcome=outcome, reason="so it is")


def watch(paths: RunPaths, clock: FakeClock, attempt: int | None = None) -> RunWatch:
    return RunWatch(paths, attempt=attempt, clock=clock, client=None)


def look(watched: RunWatch, clock: FakeClock, seconds: float = 60.0) -> RunEnd | None:
    """Ask now and then for so long; the first end counts."""
    until = clock.now + seconds
    while clock.now < until:
        end = watched.end()
        if end is not None:
            return end
        clock.now += 5.0
    return None


def test_by_its_result(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    watched = watch(paths, clock)
    assert look(watched, clock) is None, "it has no attempt yet"
    store(paths, 0, 93)
    assert look(watched, clock) == RunEnd(code=93, why="failed: so it is (exit code 93)")


def test_a_requeue_is_no_end_however_long_the_queue_is(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    store(paths, 0, 75)
    watched = watch(paths, clock)
    assert look(watched, clock, 10 * SILENT_SECONDS) is None
    store(paths, 1, 0, "succeeded")
    end = look(watched, clock)
    assert end is not None
    assert end.code == 0
    assert look(watch(paths, clock, attempt=0), clock) == RunEnd(code=75, why="failed: so it is (exit code 75)")


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
    watched = watch(paths, clock)
    for number in range(20):
        sign.write_text("x" * number)  # an agent's sign of life
        assert look(watched, clock, SILENT_SECONDS / 3) is None
    end = look(watched, clock, SILENT_SECONDS + 60)
    assert end is not None
    assert end.code == 1
    assert "none of its files has changed for 5 minutes" in end.why
