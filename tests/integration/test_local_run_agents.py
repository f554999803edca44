"""Agents that are killed, stopped, and brought back, under the local launcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.processes import Process

_FAMILY = """
if ROUND == 0:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sh", "-c", "(setsid sleep 1000 &)"]).wait()
tell("here", group=int(os.environ["GROUP_RANK"]))
others_in_round()
wait_for("end")
"""
_WAIT = """
tell("here", group=int(os.environ["GROUP_RANK"]))
others_in_round()
wait_for("end")
"""


@pytest.mark.parametrize("node", [0, 1])
def test_killed_agent_takes_its_family_along_and_is_started_again(tmp_path: Path, node: int) -> None:
    """Node 0's is the coordinator, and rank 0's. The workers' children, daemons too, go within a second."""
    with LocalRun(tmp_path, _FAMILY) as run:
        run.wait_moments("here", count=2, round_index=0)
        agent = run.agent(node)

        def members() -> list[Process]:
            found = [process for process in run.tagged(node) if process.argv[:1] == ("sleep",)]
            return found + [process for process in run.tagged(node) if str(run.script_path) in process.argv]

        run.until(lambda: len(members()) == 3, "worker with two children, each of which is a program by now")
        family = members()
        os.kill(agent.pid, signal.SIGKILL)
        run.until(lambda: not any(process.lives() for process in family), "end of its family", within=60.0)
        run.wait_moments("here", count=2, round_index=1)
        assert run.agent(node).pid != agent.pid
        run.finish_well()
        finals = run.events("round_final")
        assert {(event["round"], event["restarts_used"]) for event in finals} == {(0, 0), (1, 0)}
        assert [event["group"] for event in run.moments("here", round_index=1)]
        assert {(event["rank"], event["group"]) for event in run.moments("here")} == {(0, 0), (1, 1)}
        assert run.report()["attempts"][0]["agents_relaunched"] == [f"node{node}"]


def test_all_agents_killed_at_once(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _WAIT) as run:
        run.wait_moments("here", count=2, round_index=0)
        for agent in [run.agent(0), run.agent(1)]:
            os.kill(agent.pid, signal.SIGKILL)
        run.until(lambda: len({e["rank"] for e in run.moments("here") if e["round"] > 0}) == 2, "next round of all")
        run.finish_well()
        assert {event["restarts_used"] for event in run.events("round_final")} == {0}


def test_agent_killed_while_another_worker_fails(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _WAIT, nodes=3) as run:
        run.wait_moments("here", count=3, round_index=0)
        os.kill(run.agent(1).pid, signal.SIGKILL)
        run.kill_worker(2, round_index=0)
        run.until(lambda: len({e["rank"] for e in run.moments("here") if e["round"] > 0}) == 3, "next round of all")
        run.finish_well()
        assert max(event["restarts_used"] for event in run.events("round_final")) == 1


def test_node_whose_agent_does_not_stay_is_left_out(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _WAIT, nodes=2, min_nodes=1) as run:
        for _ in range(4):  # the first one and the three that follow it
            run.kill_agent_in_a_round(1)
        alone = run.until(lambda: [e for e in run.events("round_final") if e["group_world_size"] == 1], "smaller round")
        assert alone[-1]["node"] == 0
        run.wait_moments("here", count=1, round_index=alone[-1]["round"])
        run.finish_well()
        assert {event["restarts_used"] for event in run.events("round_final")} == {0}
        assert "giving the node up" in run.log()


def test_too_few_nodes_are_left(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _WAIT, nodes=2) as run:
        for _ in range(4):
            run.kill_agent_in_a_round(1)
        assert run.finish() == ExitCode.WORKERS_FAILED
        report = run.report()
        assert report["outcome"] == "too_few_nodes"
        assert "1 of at least 2 nodes are left" in report["attempts"][0]["reason"]


@pytest.mark.parametrize("node", [0, 1])
def test_stopped_agent_is_left_out_and_taken_back(tmp_path: Path, node: int) -> None:
    script = """
    tell("here", group=int(os.environ["GROUP_RANK"]))
    if WORLD == 1:
        wait_for("end")
    elif ROUND == 0:
        wait_for("never")
    else:
        wait_for("end")
    """
    with LocalRun(tmp_path, script, nodes=2, min_nodes=1) as run:
        run.wait_moments("here", count=2, round_index=0)
        agent = run.agent(node)
        os.kill(agent.pid, signal.SIGSTOP)
        old = run.worker(node, round_index=0)
        (alone,) = run.wait_moments("here", count=1, round_index=1)
        assert alone["rank"] == 0
        run.until(lambda: not run.is_alive(old), "end of the stopped agent's worker")
        os.kill(agent.pid, signal.SIGCONT)
        back = run.until(lambda: [e for e in run.moments("here") if e["round"] > 1], "round with both again")
        run.wait_moments("here", count=2, round_index=back[0]["round"])
        run.finish_well()
        assert {event["restarts_used"] for event in run.events("round_final")} == {0}
        lost = run.events("node_lost")
        assert [event["node"] for event in lost] == [node]
        assert "its guardian has ended the workers" in run.log()
        assert run.events("worker_failed") == []


def test_agents_that_are_all_stopped_for_longer_than_the_lease_cost_nothing(tmp_path: Path) -> None:
    """As by ``scancel -s STOP``: no other goes on without their workers, which no signal has reached."""
    with LocalRun(tmp_path, _WAIT) as run:
        run.wait_moments("here", count=2, round_index=0)
        agents = [run.agent(node) for node in range(2)]
        for agent in agents:
            os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(run.heartbeat_ttl + 2.0)  # the guardians look meanwhile
        for agent in agents:
            os.kill(agent.pid, signal.SIGCONT)
        run.finish_well()
        assert {event["round"] for event in run.events("round_final")} == {0}
