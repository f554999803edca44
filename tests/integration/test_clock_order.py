"""Failures on nodes whose clocks are an hour apart: the verdict names the one that was first in truth.

The coordinator's agent stands still (SIGSTOP) while two nodes fail, the one after the other has told of it: else the
first failure would end the second node's workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.rigs.event_pairs import read_events
from tests.rigs.local_run import LocalRun
from tests.rigs.wrong_clocks import (
    fail_one_after_the_other,
    node_0_coordinates,
    node_clocks,
    rank_on,
    set_clock,
    with_jumps,
)

HOUR = 3600.0
SCRIPT = """
    tell("here")
    others_in_round()
    wait_for(f"fail-{ROUND}-{RANK}")
    raise [RuntimeError("zero"), KeyError("one"), ValueError("two"), OSError("three")][RANK]
"""


def run_on_three_machines(folder: Path, *conf: str, more: int = 0, options: Sequence[str] = ()) -> LocalRun:
    """Node 1's wall clock is an hour ahead, node 2's an hour behind; and none was booted when another was."""
    clocks = {1: (HOUR, 5000.0), 2: (-HOUR, -10.0), 3: (0.5, 70_000.0)}
    return LocalRun(
        folder,
        SCRIPT,
        nodes=3 + more,
        min_nodes=3,
        options=["--rdzv-conf", ",".join(conf), *node_0_coordinates(folder), *options],
        environ=node_clocks(clocks),
        heartbeat_ttl=8.0,
    )


def test_without_packets_the_order_is_not_known_and_said_so(tmp_path: Path) -> None:
    with run_on_three_machines(tmp_path, "doorbell=off", options=["--max-restarts", "0"]) as run:
        run.wait_moments("here", count=3)
        fail_one_after_the_other(run, 0, [1, 2])
        assert run.finish() == 1
        report = run.report()
        verdict = report["verdict"]
        assert verdict["confidence"] == "tie"
        assert verdict["resolution_ns"] is None
        assert "its clock was not compared with" in verdict["evidence"]
        assert report["attempts"][0]["clocks"] is None
        assert {verdict["failure"]["global_rank"], verdict["candidates"][0]["global_rank"]} == {1, 2}


def test_after_the_references_death_the_order_is_known_all_the_same(tmp_path: Path) -> None:
    """Node 0 coordinates, and dies; of the three that go on, one coordinates, and the two others fail."""
    with run_on_three_machines(
        tmp_path, "beat_silence=2", "suspect_answer=2", "poll_interval=0.2", more=1, options=["--max-restarts", "1"]
    ) as run:
        run.wait_moments("here", count=4)
        coordinator = run.agent(0)
        os.kill(coordinator.pid, signal.SIGSTOP)
        run.wait_moments("here", count=3, round_index=1)
        run.until(lambda: any(e["round"] == 1 for e in run.events("round_frozen")), "who coordinates the second round")
        (frozen,) = [event for event in run.events("round_frozen") if event["round"] == 1]
        leader = frozen["node"]
        assert leader != 0
        first, second = [node for node in (1, 2, 3) if node != leader]
        fail_one_after_the_other(run, leader, [first, second], round_index=1)
        run.until(lambda: len([e for e in run.events("worker_failed") if e["round"] == 1]) > 1, "evidence of both")
        if coordinator.lives():
            os.kill(coordinator.pid, signal.SIGKILL)
        run.signal(signal.SIGINT)
        run.finish()
        report = run.report()["attempts"][0]
        (part,) = (item for item in report["rounds"] if item["index"] == 1)
        rank = rank_on(run, first, 1)
        assert part["verdict"]["summary"].startswith(f"rank {rank} on node{first}: ")
        assert part["verdict"]["confidence"] == "high", part["verdict"]["evidence"]
        assert "clocks known to within" in part["verdict"]["evidence"]
        others = {1, 2, 3} - {report["clocks"]["reference_node"]}
        assert others <= {item["node"] for item in report["clocks"]["offsets"]}


def test_a_wall_clock_that_is_set_in_mid_run_changes_no_time_that_the_run_records(tmp_path: Path) -> None:
    """Node 1's goes an hour ahead, then two back; node 0's goes the other way."""
    jumps = tmp_path / "jumps"
    jumps.mkdir()
    started = time.time()
    script = """
        tell("here")
        others_in_round()
        wait_for(f"go-{ROUND}")
        if ROUND < 2 and RANK == ROUND:
            raise (RuntimeError, KeyError)[ROUND]("told to")
    """
    with LocalRun(tmp_path, script, nodes=2, environ=with_jumps(jumps)) as run:
        for round_index, ahead in enumerate((HOUR, -HOUR, 0.0)):
            run.wait_moments("here", count=2 * (round_index + 1))
            set_clock(jumps, 1, ahead)
            set_clock(jumps, 0, -ahead)
            run.say(f"go-{round_index}")
        assert run.finish() == 0
        took = time.time() - started
        report = run.report()
        assert report["goodput"]["wall"] < took
        (attempt,) = report["attempts"]
        assert len(attempt["rounds"]) == 3
        assert all(item["seconds"] is not None and item["seconds"] < took for item in attempt["rounds"])
        times = [event["t"] / 1e9 for event in read_events(run.attempt().events)]
        assert started < min(times) <= max(times) < started + took
        assert run.events("health_warning"), "who reads a node's other logs learns that its clock is wrong"
