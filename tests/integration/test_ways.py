"""A real run passes through the functions of docs/explanation/ways.md in their order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.rigs.local_run import LocalRun
from tests.rigs.ways import ROOT, Tracer, first_missing, read_way

_MEET = 'tell("here"); others_in_round()\n'


def test_a_killed_workers_restart(tmp_path: Path) -> None:
    steps = read_way("How a restart works")
    tracer = Tracer(tmp_path / "trace", steps)
    with LocalRun(tmp_path, _MEET + 'wait_for("end")\n', environ=tracer.environ(str(ROOT))) as run:
        run.wait_moments("here", count=2, round_index=0)
        leader = coordinator_of(run)
        other = 1 - leader
        processes = {
            "failed node": {run.agent(other).pid},
            "coordinator": {run.agent(leader).pid},
            "other node": {run.agent(leader).pid},
            "each node": {run.agent(0).pid, run.agent(1).pid},
        }
        rank = rank_on(run, other)
        began = time.monotonic_ns()
        run.kill_worker(rank, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        run.finish_well()
    calls = [call for call in tracer.calls() if call.at_ns >= began]
    assert first_missing(steps, calls, processes) is None


def test_an_exceptions_line_in_the_report(tmp_path: Path) -> None:
    steps = read_way("How a failure reaches the report")
    tracer = Tracer(tmp_path / "trace", steps)
    script = _MEET + 'if ROUND == 0 and RANK == 1: wait_for("fail"); raise ValueError("planted")\nwait_for("end")\n'
    with LocalRun(tmp_path, script, environ=tracer.environ(str(ROOT))) as run:
        run.wait_moments("here", count=2, round_index=0)
        node = next(node for node in range(2) if rank_on(run, node) == 1)
        processes = {"failed node": {run.agent(node).pid}, "supervisor": {run.supervisor()}}
        began = time.monotonic_ns()
        run.say("fail")
        run.wait_moments("here", count=2, round_index=1)
        run.finish_well()
        assert "ValueError: planted" in run.attempt().report_text.read_text()
    calls = [call for call in tracer.calls() if call.at_ns >= began]
    assert first_missing(steps, calls, processes) is None


def test_a_stopped_nodes_loss(tmp_path: Path) -> None:
    steps = read_way("How a lost node is found")
    tracer = Tracer(tmp_path / "trace", steps)
    script = _MEET + 'wait_for("end")\n'
    with LocalRun(tmp_path, script, nodes=3, min_nodes=2, heartbeat_ttl=30.0, environ=tracer.environ(str(ROOT))) as run:
        run.wait_moments("here", count=3, round_index=0)
        leader = coordinator_of(run)
        lost, left = [node for node in range(3) if node != leader]
        processes = {"coordinator": {run.agent(leader).pid}, "other node": {run.agent(left).pid}}
        agent = run.agent(lost)
        began = time.monotonic_ns()
        os.kill(agent.pid, signal.SIGSTOP)
        run.wait_moments("here", count=2, round_index=1)
        os.kill(agent.pid, signal.SIGKILL)
        run.finish_well()
        assert [event["node"] for event in run.events("node_lost")] == [lost]
    calls = [call for call in tracer.calls() if call.at_ns >= began]
    assert first_missing(steps, calls, processes) is None


def coordinator_of(run: LocalRun) -> int:
    """The node that froze the first round."""
    frozen = run.until(lambda: [one for one in run.events("round_frozen") if one["round"] == 0], "the frozen round")
    return int(frozen[0]["node"])


def rank_on(run: LocalRun, node: int) -> int:
    """Of the node's only worker in the first round."""
    pids = {process.pid for process in run.tagged(node)}
    return int(next(worker["rank"] for worker in run.moments("here", round_index=0) if worker["pid"] in pids))
