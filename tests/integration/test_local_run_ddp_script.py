"""A user's DDP script, which imports nothing of this project: its progress is known, and what rests on that."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.render_html_chart import build_timeline
from hpc_elastic.report.timeline_attempt import NodeState, place_attempts
from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import ROOT, LocalRun

pytestmark = pytest.mark.torch
Run = Callable[..., LocalRun]


def status(run: LocalRun) -> dict[str, Any]:
    time.sleep(0.5)  # asked again and again, each time by a new process
    command = [sys.executable, "-m", "hpc_elastic", "status", str(run.paths.root), "--json"]
    value: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    return value


@pytest.mark.parametrize(
    ("source", "start_method"),
    [
        ("collectives", "forkserver"),
        pytest.param("optimizer", "spawn", marks=pytest.mark.slow),
        pytest.param("optimizer", "forkserver", marks=pytest.mark.slow),
        pytest.param("collectives", "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_comes_further_each_time_is_not_given_up(ddp_run: Run, source: str, start_method: str) -> None:
    """The same exception at step 25 and, after a resume at 20, at 55: more steps than in the round before."""
    by_hand = ["--by-hand"] if source == "collectives" else []
    least = 0.3 if start_method == "spawn" else 0.05  # s: the imports, or in a fork the process group and a step
    with ddp_run("--fail", "raise@25", "--fail", "raise@55", *by_hand, start_method=start_method) as run:
        assert run.finish() == ExitCode.OK
        failed = [event for event in run.events("worker_failed") if event["failure_class"] == "root"]
        assert [(event["round"], event["rank"]) for event in failed] == [(0, 1), (1, 1)]
        assert max(event["restarts_used"] for event in run.events("round_final")) == 2
        goodput = run.report()["goodput"]
        assert (goodput["steps_known"], goodput["progress"]) == (True, source)
        for number, cost in enumerate(goodput["costs"]):
            up = min(event["t"] for event in run.events("workers_started") if event["round"] == number + 1)
            until_up = (up - failed[number]["t"]) / 1e9
            assert cost["seconds"] > until_up + least, "a step is done before training is back"
        rows = build_timeline(place_attempts(collect_run(run.paths.root))).nodes
        for row, number in itertools.product(rows, range(3)):
            (starting,) = (span for span in row.spans if (span.state, span.round) == (NodeState.STARTING, number))
            (running,) = (span for span in row.spans if (span.state, span.round) == (NodeState.RUNNING, number))
            assert starting.end_ns == running.start_ns, "the first step ends the start"
            assert starting.end_ns - starting.start_ns > least * 1e9


def test_the_same_failure_after_fewer_steps_is_given_up_and_the_rule_is_named(ddp_run: Run) -> None:
    """25 steps, then 5 after the resume at 20: where that round began is not known, and seconds decide."""
    with ddp_run("--fail", "raise@25", "--fail", "raise@025") as run:
        assert run.finish() == ExitCode.NOT_RETRYABLE
        assert "no progress between, each within 600 s of the start (--restart-window)" in run.log()


@pytest.mark.parametrize("number", [signal.SIGUSR2, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 15))])
def test_a_script_saves_on_sigterm_while_its_data_loader_lives(ddp_run: Run, number: signal.Signals) -> None:
    """Every stop with a grace ends the ranks first, a notice too. A save takes a second, and the next batch, here."""
    arguments = ("--steps", "100000", "--save-every", "100000", "--save-on-sigterm", "--pause", "1")
    with ddp_run(*arguments, options=["--max-requeues", "1"]) as run:
        run.until(lambda: run.paths.root.exists() and (status(run)["steps"] or {}).get("most"), "steps", within=120.0)
        run.signal(number)
        if number is signal.SIGUSR2:
            run.until(lambda: run.log().count(" begins at step ") == 4, "the next attempt", within=120.0)
            run.signal(signal.SIGKILL)
        run.finish()
        saved = re.findall(r"rank \d saved step (\d+) on SIGTERM", run.log())
        assert len(saved) == 2
        assert (run.folder / "checkpoint.pt").exists()
        assert not run.events("worker_failed")
        if number is signal.SIGUSR2:
            assert run.log().count(f" begins at step {saved[0]}\n") == 2
            assert "Asked to requeue: requeued as attempt 1." in run.attempt().report_text.read_text()
            run.until(lambda: not run.processes(), "end of what the killed supervisor left", after_its_end=True)


def test_a_lost_agent_is_the_cause_and_free(ddp_run: Run, tmp_path: Path) -> None:
    """The other rank fails with gloo's closed connection before it is known who is left."""
    checkpoint = tmp_path / "saved.pt"
    arguments = ("--steps", "60", "--step-seconds", "0.1", "--checkpoint", str(checkpoint))
    with ddp_run(*arguments, nodes=2, options=["--max-restarts", "0"], start_method="spawn") as run:
        run.until(checkpoint.exists, "a checkpoint", within=120.0)
        os.kill(run.agent(1).pid, signal.SIGKILL)
        assert run.finish(within=180.0) == ExitCode.OK
        assert {event["restarts_used"] for event in run.events("round_final")} == {0}
        verdict = run.report()["verdict"]
        assert (verdict["cause"], verdict["lost_node"]["host"]) == ("node", "node1")
        assert run.log().count("ends at step 60") == 2
