"""Every way to end a local run from outside: what is asked of the workers, the exit code, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

_SAVES_ON_SIGTERM = """
def save(*_):
    tell("saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
tell("here")
others_in_round()
wait_for("never")
"""
_IGNORES_SIGTERM = """
signal.signal(signal.SIGTERM, lambda *_: tell("asked"))
subprocess.Popen(["sh", "-c", "trap '' TERM; (setsid sleep 1000 &); sleep 1000; :"])
tell("here")
others_in_round()
wait_for("never")
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.INTERRUPTED),
        (signal.SIGTERM, ExitCode.TERMINATED),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_signal_ends_the_run_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with LocalRun(tmp_path, _SAVES_ON_SIGTERM, options=["--max-requeues", "2"]) as run:
        run.wait_moments("here", count=2)
        run.signal(number)
        assert run.finish(within=25.0) == code
        run.check_nothing_left()
        assert len(run.moments("saved")) == 2
        assert not run.attempt(1).root.exists()
        assert run.report()["outcome"] == "cancelled"
        assert run.events("worker_failed") == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path, number: signal.Signals) -> None:
    """As under nohup, and for what a script starts with ``&``."""
    script = 'tell("here")\nothers_in_round()\nwait_for("go on")\ntime.sleep(1)\n'
    before = signal.signal(number, signal.SIG_IGN)
    try:
        run = LocalRun(tmp_path, script).__enter__()
    finally:
        signal.signal(number, before)
    with contextlib.ExitStack() as stack:
        stack.push(run.__exit__)
        run.wait_moments("here", count=2)
        run.signal(number)
        run.say("go on")
        assert run.finish() == ExitCode.OK


def test_ctrl_c_waits_no_longer_than_the_grace(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _IGNORES_SIGTERM, options=["--shutdown-timeout", "1"]) as run:
        run.wait_moments("here", count=2)
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.finish() == ExitCode.INTERRUPTED
        assert 0.9 <= time.monotonic() - began <= 20.0, "the usual grace is longer"
        run.check_nothing_left()
        assert len(run.moments("asked")) == 2


def test_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _IGNORES_SIGTERM, options=["--shutdown-timeout", "100"]) as run:
        run.wait_moments("here", count=2)
        run.signal(signal.SIGINT)
        run.wait_moments("asked", count=2)
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.finish() == ExitCode.INTERRUPTED
        assert time.monotonic() - began <= 20.0, "nobody waited for the grace of 100 s"
        run.check_nothing_left()
        assert run.report()["outcome"] == "cancelled"


def test_ctrl_c_before_the_agents_have_met(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _SAVES_ON_SIGTERM) as run:
        run.until(lambda: "run directory:" in run.log(), "first line")
        run.signal(signal.SIGINT)
        assert run.finish(within=25.0) == ExitCode.INTERRUPTED
        run.check_nothing_left()


def test_ctrl_c_while_workers_are_restarted(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _SAVES_ON_SIGTERM) as run:
        run.wait_moments("here", count=2)
        run.kill_worker(1, round_index=0)
        run.signal(signal.SIGINT)
        assert run.finish(within=25.0) == ExitCode.INTERRUPTED
        run.check_nothing_left()


@pytest.mark.parametrize("script", [_SAVES_ON_SIGTERM, _IGNORES_SIGTERM])
def test_nothing_outlives_a_killed_supervisor(tmp_path: Path, script: str) -> None:
    with LocalRun(tmp_path, script, options=["--shutdown-timeout", "1"]) as run:
        run.wait_moments("here", count=2)
        run.signal(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
        run.check_nothing_left(within=25.0)
        assert len(run.moments("saved")) + len(run.moments("asked")) == 2
        assert {event["code"] for event in run.events("agent_ended")} == {128 + signal.SIGHUP}
        (closed,) = run.events("closed")
        assert closed["outcome"] == "cancelled"


def test_supervisor_killed_while_agents_start(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _SAVES_ON_SIGTERM) as run:
        run.until(lambda: len([p for p in run.processes() if p.parent == run.supervisor()]) == 2, "agents")
        run.signal(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
        run.check_nothing_left(within=25.0)


def test_agent_that_is_asked_to_end_closes_the_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _SAVES_ON_SIGTERM) as run:
        run.wait_moments("here", count=2)
        os.kill(run.agent(1).pid, signal.SIGTERM)
        assert run.finish(within=25.0) == ExitCode.TERMINATED
        run.check_nothing_left()
        assert len(run.moments("saved")) == 2
