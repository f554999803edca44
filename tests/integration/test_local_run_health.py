"""Nodes that are unfit: what becomes of the run, and where the reason can be read. On real agents and a real check."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hpc_elastic.run.paths import UNHEALTHY_CODE, ExitCode
from tests.rigs.local_run import LocalRun

_TRAINS = """
tell("here")
others_in_round()
wait_for("end")
"""
_ODD = "echo warming up >&2; echo fan 3 of GPU 2 stands still >&2; exit 4"


def check(folder: Path, text: str) -> str:
    path = folder / "check.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_the_others_go_on_without_a_node_that_is_unfit_after_a_failure(tmp_path: Path) -> None:
    unfit = f'[ "$HPC_ELASTIC_NODE$HPC_ELASTIC_LAST_ROUND" != 20 ] || {{ {_ODD}; }}'
    options = ["--health-check", check(tmp_path, unfit)]
    with LocalRun(tmp_path, _TRAINS, nodes=3, min_nodes=2, options=options) as run:
        run.wait_moments("here", count=3, round_index=0)
        run.kill_worker(0, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        run.finish_well()
        why = "health check failed: fan 3 of GPU 2 stands still"
        (failed,) = run.events("health_check_failed")
        assert (failed["node"], failed["round"], failed["checks"], failed["reason"]) == (2, 0, ["script"], why)
        (left,) = run.events("node_left")
        assert (left["node"], left["host"], left["round"], left["reason"]) == (2, "node2", 0, why)
        assert [event["code"] for event in run.events("agent_ended") if event["node"] == 2] == [UNHEALTHY_CODE] * 2
        assert run.events("agent_relaunched") == []
        (frozen,) = [event for event in run.events("round_frozen") if event["round"] == 1]
        assert frozen["nodes"] == [0, 1]
        assert f"without node2 (left: {why})" in frozen["reason"]
        log = run.log()
        assert f"[node2] error: this node leaves the run: {why}" in log
        assert "[hpc-elastic] node2 has left the run: it failed a health check, or its workers alone failed" in log
        # The report: the failure is the worker's, and the node that left stands beside it.
        assert f"  node2 left: {why}" in run.attempt().report_text.read_text().splitlines()
        (loss,) = run.report()["attempts"][0]["rounds"][0]["lost_nodes"]
        assert (loss["node"], loss["left"]) == (2, why)


def test_an_unfit_coordinators_place_goes_to_a_spare(tmp_path: Path) -> None:
    """With MIN of all nodes: the spare is what keeps the run going, with the ranks of the node that left."""
    unfit = f'[ "$HPC_ELASTIC_NODE$HPC_ELASTIC_LAST_ROUND" != 00 ] || {{ {_ODD}; }}'
    options = ["--health-check", check(tmp_path, unfit), "--spares", "1", "--rdzv-conf", "last_call_timeout=100"]
    with LocalRun(tmp_path, _TRAINS, nproc=2, options=options) as run:
        run.wait_moments("here", count=4, round_index=0)
        run.until(lambda: bool(run.events("nodes_waiting")), "a spare that waits")
        run.kill_worker(3, round_index=0)
        run.wait_moments("here", count=4, round_index=1)
        run.finish_well()
        seats = {event["node"]: event["ranks"] for event in run.events("round_final") if event["round"] == 1}
        assert seats == {2: [0, 1], 1: [2, 3]}
        (replaced,) = run.events("node_replaced")
        assert (replaced["node"], replaced["replaces_node"], replaced["group_rank"]) == (2, 0, 0)
        assert {event["reason"] for event in run.events("node_left")} == {
            "health check failed: fan 3 of GPU 2 stands still"
        }


def test_a_check_that_hangs_is_ended_with_all_that_it_started_and_the_job_comes_back(tmp_path: Path) -> None:
    """With MIN of all nodes the attempt ends, and another one is worth a try."""
    hangs = """
        [ "$HPC_ELASTIC_ATTEMPT$HPC_ELASTIC_NODE" = 01 ] || exit 0
        trap '' TERM
        sleep 1000 &
        (setsid sh -c 'trap "" TERM HUP; sleep 1000' &)
        sleep 1000
        """
    options = ["--health-check", check(tmp_path, hangs), "--health-check-timeout", "1", "--max-requeues", "1"]
    with LocalRun(tmp_path, _TRAINS, options=options) as run:
        run.finish_well()
        run.check_nothing_left()
        first, second = run.report(1)["attempts"]
        assert (first["outcome"], second["outcome"]) == ("too_few_nodes", "succeeded")
        why = f"health check failed: {tmp_path / 'check.sh'} has not answered for 1 s"
        assert f"node1 (left: {why})" in first["reason"]
        assert run.report(0)["verdict"]["summary"] == f"node1 left: {why}"
        assert first["decision"].startswith("requeue: requeue 1 of 1")
        assert run.moments("here", attempt=0) == []


def test_the_last_node_that_is_unfit_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    began = time.monotonic()
    with LocalRun(tmp_path, _TRAINS, nodes=1, options=["--health-checks", "memory=1,tmp=900000T"]) as run:
        assert run.finish() == ExitCode.WORKERS_FAILED
        assert time.monotonic() - began < 60.0, "nobody waits for others until the timeout"
        assert run.report()["outcome"] == "too_few_nodes"
        summary = run.report()["verdict"]["summary"]
        assert summary.startswith(f"node0 left: health check failed: {run.tmp} has ")
        assert "less than 878.9 PiB" in summary
        (failed,) = run.events("health_check_failed")
        assert failed["checks"] == ["tmp"]


def test_ctrl_c_does_not_wait_for_a_check(tmp_path: Path) -> None:
    slow = 'echo "$HPC_ELASTIC_NODE" >> started; exec sleep 1000'
    options = ["--health-check", check(tmp_path, slow), "--health-check-timeout", "1000"]
    with LocalRun(tmp_path, _TRAINS, options=options) as run:
        started = tmp_path / "started"
        run.until(lambda: started.exists() and len(started.read_text().split()) == 2, "checks")
        began = time.monotonic()
        run.signal(signal.SIGINT)
        assert run.finish() == ExitCode.INTERRUPTED
        assert time.monotonic() - began < 30.0, "the check would last 1000 s"
        run.check_nothing_left()


def test_a_healthy_node_joins_and_the_check_finds_its_environment(tmp_path: Path) -> None:
    tells = 'env | grep -a ^HPC_ELASTIC_ > "$LOCAL_RUN_STAGE/env-$HPC_ELASTIC_NODE-$HPC_ELASTIC_LAST_ROUND"; pwd >&2'
    options = ["--health-check", check(tmp_path, tells), "--health-checks", "default"]
    with LocalRun(tmp_path, _TRAINS, options=options) as run:
        run.wait_moments("here", count=2)
        run.kill_worker(1, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        probes = sorted(path.name[:10] for path in (run.paths.attempt(0).root / "health").iterdir())
        assert probes == ["node-00000", "node-00001"]
        run.finish_well()
        files = sorted(path.name for path in run.stage.glob("env-*"))
        assert files == ["env-0--1", "env-0-0", "env-1--1", "env-1-0"], "before each round, and after the failure"
        env = dict(line.split("=", 1) for line in (run.stage / "env-1-0").read_text().splitlines())
        assert env["HPC_ELASTIC_RUN_DIR"] == str(run.paths.root)
        assert (env["HPC_ELASTIC_ATTEMPT"], env["HPC_ELASTIC_HOST"]) == ("0", "node1")
        assert os.listdir(run.tmp) == []
