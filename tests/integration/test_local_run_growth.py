"""Real runs that grow, shrink, and go on with a spare: who sits where, what it costs, and what is said about it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.rigs.local_run import LocalRun

_SCRIPT = """
import hpc_elastic
tell("here", node=os.environ["GROUP_RANK"], host=int(os.environ["HPC_ELASTIC_TAG"].split(":")[1]))
others_in_round()
if ROUND == 0 and RANK == 0:
    wait_for("save")
    with hpc_elastic.section("checkpoint"):
        tell("saving")
wait_for("end")
"""

_GATE = """#!/bin/sh
# A node whose gate is closed is no node yet. Where there is no gate, the agent that comes again is refused.
cd {stage}
echo started >> .starts-$HPC_ELASTIC_NODE
while [ -e .closed-$HPC_ELASTIC_NODE ]; do sleep 0.02; done
test ! -e .refused-$HPC_ELASTIC_NODE
"""
_QUICK = "heartbeat_ttl=3,poll_interval=0.25,suspect_answer=1,beat_interval=0.25,beat_silence=0.75"


class GatedRun(LocalRun):
    """One whose nodes may be late, and may not be let in again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gate = self.folder / "gate.sh"
        gate.write_text(_GATE.format(stage=self.stage))
        gate.chmod(0o755)
        self.options = ["--health-checks", "none", "--health-check", str(gate), *self.options]

    def close_gate(self, node: int) -> None:
        (self.stage / f".closed-{node}").touch()

    def open_gate(self, node: int) -> None:
        (self.stage / f".closed-{node}").unlink()

    def refuse(self, node: int) -> None:
        (self.stage / f".refused-{node}").touch()

    def seats(self, round_index: int, *, count: int) -> list[int]:
        """The nodes of a round in the order of ranks, waited for. One worker each."""
        return [found["host"] for found in self.wait_moments("here", count=count, round_index=round_index)]

    def waiting(self) -> list[str]:
        return [event["reason"] for event in self.events("nodes_waiting")]

    def opened(self, round_index: int) -> dict[str, Any]:
        return [event for event in self.events("round_opened") if event["round"] == round_index][-1]

    def budgets(self) -> set[tuple[int, int]]:
        return {(event["round"], event["restarts_used"]) for event in self.events("round_final")}


def test_a_spare_takes_a_lost_nodes_place_at_once(tmp_path: Path) -> None:
    """The last call is so long that nobody can have waited for it."""
    options = ["--spares", "1", "--rdzv-conf", f"{_QUICK},last_call_timeout=100"]
    with GatedRun(tmp_path, _SCRIPT, nodes=2, options=options) as run:
        assert run.seats(0, count=2) == [0, 1]
        run.until(lambda: run.waiting() == ["node2 waits as a spare"], "word that a spare waits")
        run.refuse(0)
        os.kill(run.agent(0).pid, signal.SIGKILL)
        assert run.seats(1, count=2) == [2, 1]
        run.finish_well()
        assert run.budgets() == {(0, 0), (1, 0)}
        (replaced,) = run.events("node_replaced")
        assert (replaced["node"], replaced["host"], replaced["group_rank"]) == (2, "node2", 0)
        assert (replaced["replaces_node"], replaced["replaces_host"]) == (0, "node0")
        assert "node2 took the place of node0" in run.log()
        assert "3 nodes, 1 of them spare" in run.log()
        assert "node2 took the place of node0" in run.attempt().report_text.read_text()


def test_spares_wait_for_nobody_and_nobody_waits_for_them(tmp_path: Path) -> None:
    """A node that never comes is replaced at the end of the last call; a spare that never comes is not missed."""
    options = ["--spares", "2", "--rdzv-conf", f"{_QUICK},last_call_timeout=1"]
    gated = GatedRun(tmp_path, _SCRIPT, nodes=2, options=options)
    gated.close_gate(0)
    gated.close_gate(2)
    with gated as run:
        assert run.seats(0, count=2) == [1, 3]
        run.open_gate(2)
        run.open_gate(0)
        run.until(lambda: any("node0, node2 wait as spares" in reason for reason in run.waiting()), "two that wait")
        run.say("save")
        run.finish_well()
        assert run.budgets() == {(0, 0)}


def test_a_segment_that_lost_a_node_leaves_as_a_whole(tmp_path: Path) -> None:
    """First a spare segment takes its ranks; then, with none left, the run shrinks by one."""
    options = ["--segment", "2", "--spares", "2", "--rdzv-conf", f"{_QUICK},last_call_timeout=100"]
    with GatedRun(tmp_path, _SCRIPT, nodes=4, min_nodes=2, options=options) as run:
        assert run.seats(0, count=4) == [0, 1, 2, 3]
        run.until(lambda: "node4, node5 wait as spares" in run.waiting(), "word that spares wait")  # one may come first
        run.refuse(1)
        os.kill(run.agent(1).pid, signal.SIGKILL)
        assert run.seats(1, count=4) == [4, 5, 2, 3]
        run.until(lambda: "node0 waits for the rest of a segment" in run.waiting(), "word that a part is left")
        run.refuse(3)
        os.kill(run.agent(3).pid, signal.SIGKILL)
        assert run.seats(2, count=2) == [4, 5]
        run.finish_well()
        assert run.budgets() == {(0, 0), (1, 0), (2, 0)}
        places = [(event["node"], event["replaces_node"]) for event in run.events("node_replaced")]
        assert places == [(4, 0), (5, 1)]
        (frozen,) = [event["reason"] for event in run.events("round_frozen") if event["round"] == 2]
        assert "node0 (the rest of a segment)" in frozen
        assert "node2 (the rest of a segment)" in frozen


def late(tmp_path: Path, grow: str) -> GatedRun:
    options = ["--grow", grow, "--rdzv-conf", f"{_QUICK},last_call_timeout=0.5"]
    run = GatedRun(tmp_path, _SCRIPT, nodes=3, min_nodes=2, options=options)
    run.close_gate(1)
    return run


def test_a_late_node_comes_in_now(tmp_path: Path) -> None:
    with late(tmp_path, "now") as run:
        assert run.seats(0, count=2) == [0, 2]
        run.open_gate(1)
        assert run.seats(1, count=3) == [0, 2, 1]  # nobody is moved for it
        run.finish_well()
        assert run.opened(1)["reason"] == "node1 came"
        assert run.budgets() == {(0, 0), (1, 0)}


def test_a_late_node_comes_in_after_a_checkpoint(tmp_path: Path) -> None:
    with late(tmp_path, "checkpoint") as run:
        assert run.seats(0, count=2) == [0, 2]
        run.open_gate(1)
        run.until(
            lambda: run.waiting() == ["node1 waits for the next checkpoint (--grow checkpoint)"],
            "word that a node waits for a checkpoint",
        )
        run.say("save")
        assert run.seats(1, count=3) == [0, 2, 1]
        run.finish_well()
        assert run.opened(1)["reason"] == "node1 came, and a checkpoint is complete"
        assert run.opened(1)["t"] > run.moments("saving")[0]["t"], "not before"
        assert run.budgets() == {(0, 0), (1, 0)}


def test_a_late_node_that_is_never_taken_in_comes_with_the_next_restart(tmp_path: Path) -> None:
    with late(tmp_path, "never") as run:
        assert run.seats(0, count=2) == [0, 2]
        run.open_gate(1)
        run.until(
            lambda: run.waiting() == ["node1 waits for a new round to begin (--grow never)"],
            "word that a node waits",
        )
        run.say("save")
        run.wait_moments("saving", count=1)
        run.kill_worker(1, round_index=0)
        assert run.seats(1, count=3) == [0, 2, 1]
        run.finish_well()
        assert "rank 1" in run.opened(1)["reason"]
        assert run.budgets() == {(0, 0), (1, 1)}


def test_a_lost_node_shrinks_the_run_and_comes_back_at_once(tmp_path: Path) -> None:
    """Whatever --grow says: it replaces a lost node."""
    options = ["--grow", "never", "--rdzv-conf", f"{_QUICK},last_call_timeout=100"]
    with GatedRun(tmp_path, _SCRIPT, nodes=3, min_nodes=2, options=options) as run:
        assert run.seats(0, count=3) == [0, 1, 2]
        run.close_gate(1)
        os.kill(run.agent(1).pid, signal.SIGKILL)
        assert run.seats(1, count=2) == [0, 2]
        run.open_gate(1)
        assert run.seats(2, count=3) == [0, 2, 1]
        run.finish_well()
        assert run.opened(2)["reason"] == "node1 came for a lost node"
        assert run.budgets() == {(0, 0), (1, 0), (2, 0)}
