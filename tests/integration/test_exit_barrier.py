"""A node whose workers have all ended with 0 while others train: what it goes on doing, and whom its end concerns.

The rule: it waits, and serves. A failure elsewhere starts the workers of *all* nodes again, those that were done too:
ranks and world size hold for all nodes or for none. A done node that dies is not missed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

_RANK_0_IS_DONE = """
signal.signal(signal.SIGTERM, lambda *_: (tell("asked"), sys.exit(0)))
tell("here")
others_in_round()
if RANK != 0 or ROUND > 0:
    wait_for(f"end-{ROUND}")
"""
_RANK_1_IS_DONE = _RANK_0_IS_DONE.replace("RANK != 0", "RANK != 1")


def until_done(run: LocalRun, node: int) -> None:
    run.wait_moments("here", count=run.nodes, round_index=0)
    run.until(lambda: [e for e in run.events("workers_succeeded") if e["node"] == node], f"end on node {node}")


def test_the_store_s_host_serves_while_others_train(tmp_path: Path) -> None:
    script = """
        tell("here")
        others_in_round()
        if RANK == 1:
            from torch.distributed import TCPStore
            wait_for("go")
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store.set("key", "value")
            tell("stored", value=store.get("key").decode())
        """
    with LocalRun(tmp_path, script) as run:
        until_done(run, 0)
        run.say("go")
        (stored,) = run.wait_moments("stored", count=1)
        assert stored["value"] == "value"
        assert run.finish() == ExitCode.OK
        assert len(run.events("round_final")) == 2


def test_a_late_failure_starts_all_again_those_that_were_done_too(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _RANK_0_IS_DONE) as run:
        until_done(run, 0)
        run.kill_worker(1, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        run.say("end-1")
        assert run.finish() == ExitCode.OK
        again = [event for event in run.events("round_final") if event["round"] == 1]
        assert sorted((event["node"], event["world_size"], event["restarts_used"]) for event in again) == [
            (0, 2, 1),
            (1, 2, 1),
        ]
        assert run.report()["outcome"] == "succeeded"
        assert run.moments("asked", round_index=0) == [], "there was nobody left to ask"


@pytest.mark.parametrize("node", [0, 1])  # 0 is the coordinator's
def test_a_node_that_dies_when_it_is_done_holds_up_nobody(tmp_path: Path, node: int) -> None:
    with LocalRun(tmp_path, _RANK_1_IS_DONE if node else _RANK_0_IS_DONE, nodes=2) as run:
        until_done(run, node)
        os.kill(run.agent(node).pid, signal.SIGKILL)
        run.until(lambda: run.events("agent_relaunched"), "news of its end")
        run.say("end-0")
        began = time.monotonic()
        assert run.finish() == ExitCode.OK
        assert time.monotonic() - began < 30.0
        assert {event["round"] for event in run.events("round_final")} == {0}
        (closed,) = run.events("closed")
        assert (closed["outcome"], closed["reason"]) == ("succeeded", "all workers ended with 0")
        assert run.report()["verdict"]["cause"] in ("none", "node")
        assert run.report()["outcome"] == "succeeded"


def test_a_failure_after_a_done_node_has_died_goes_on_with_its_new_agent(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _RANK_1_IS_DONE, nodes=2) as run:
        until_done(run, 1)
        os.kill(run.agent(1).pid, signal.SIGKILL)
        run.until(lambda: run.events("agent_relaunched"), "news of its end")
        run.kill_worker(0, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        run.say("end-1")
        assert run.finish() == ExitCode.OK


def test_sigterm_ends_the_run_at_once(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _RANK_0_IS_DONE, options=["--shutdown-timeout", "100"]) as run:
        until_done(run, 0)
        began = time.monotonic()
        run.signal(signal.SIGTERM)
        assert run.finish() == ExitCode.TERMINATED
        assert time.monotonic() - began < 30.0, "the grace is 100 s"
        assert [value["rank"] for value in run.moments("asked")] == [1]
        assert run.report()["outcome"] == "cancelled"


def test_sigterm_to_the_agent_that_is_done_ends_the_run_for_all(tmp_path: Path) -> None:
    """A TERM that reaches one agent means the job, done or not: it tells all the others."""
    with LocalRun(tmp_path, _RANK_0_IS_DONE, options=["--shutdown-timeout", "100"]) as run:
        until_done(run, 0)
        os.kill(run.agent(0).pid, signal.SIGTERM)
        assert run.finish() != ExitCode.OK
        assert [value["rank"] for value in run.moments("asked")] == [1]
        (closed,) = run.events("closed")
        assert (closed["outcome"], closed["reason"]) == ("cancelled", "SIGTERM on node0")
