"""``--follow`` through a requeue: what the next attempt brings is shown, and its end is the end."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.cli import events as events_module
from hpc_elastic.cli.follow import follow_to_end
from hpc_elastic.cli.log_follow import LogFollower
from hpc_elastic.cli.logs import LogChoice, LogPrinter
from hpc_elastic.cli.report import ReportFollower
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.run.attempt import StoredResult
from hpc_elastic.run.paths import RunPaths
from tests.rigs.fake_clock import FakeClock
from tests.rigs.run_builder import RunBuilder


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
        result = StoredResult(outcome=outcome, reason="so", exit_code=code, action="end", decision="")
        result.save(paths.attempt(attempt).result_json)

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


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, clock = story(tmp_path)
    out = io.BytesIO()
    printer = LogPrinter(out)
    asked = AskedRun(paths=paths, attempt=None)
    follower = LogFollower(asked, LogChoice(), printer, tail=2, clock=clock)
    assert follow_to_end(asked, follower, clock=clock) == 0
    assert out.getvalue().decode().splitlines() == [
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
    out = io.BytesIO()
    printer = LogPrinter(out)
    asked = AskedRun(paths=paths, attempt=0)
    follower = LogFollower(asked, LogChoice(), printer, tail=1, clock=clock)
    assert follow_to_end(asked, follower, clock=clock) == 75
    assert out.getvalue() == b"[rank 0] line 19\n"


def test_logs_of_a_run_that_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, clock = story(tmp_path)
    hidden = paths.root / "later"
    paths.attempt(0).root.rename(hidden)
    clock.happens = [(clock.now + 1.0, lambda: hidden.rename(paths.attempt(0).root)), *clock.happens[:1]]
    out = io.BytesIO()
    asked = AskedRun(paths=paths, attempt=None)
    follower = LogFollower(asked, LogChoice(), LogPrinter(out), tail=1, clock=clock)
    clock.happens.append((clock.now + 5.0, lambda: (paths.attempt(0).result_json).write_text(RESULT)))
    assert follow_to_end(asked, follower, clock=clock) == 0
    assert out.getvalue().count(b"\n") == 20, "what was not there at first is new"
    assert "has started no worker yet: waiting" in capsys.readouterr().err


RESULT = (
    '{"version": 1, "outcome": "succeeded", "reason": "", "exit_code": 0, "action": "end", "decision": "", '
    '"fingerprint": "", "step": -1}'
)


def test_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, clock = story(tmp_path)
    asked = AskedRun(paths=paths, attempt=None)
    follower = events_module.EventFollower(
        asked,
        events_module.EventChoice(names=frozenset({"attempt_started", "attempt_ended"}), nodes=None),
        events_module._Printer(as_json=False, colours=False),
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
