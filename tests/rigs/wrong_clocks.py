"""Local runs whose nodes have clocks of their own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.rigs.local_run import LocalRun

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = Path(__file__).with_name("node_clocks")
_NODE_0_FIRST = """#!/bin/sh
# A node whose check goes on does not take part yet. Node 0's is over at once, and it opens the first round.
[ "$HPC_ELASTIC_NODE" = 0 ] && exit 0
until [ -h "$HPC_ELASTIC_RUN_DIR/attempt-000/store/log/0000000000000001" ]; do sleep 0.02; done
"""
APART = 0.3
"""Seconds from the one failure to the next."""


def node_clocks(clocks: Mapping[int, tuple[float, float]]) -> dict[str, str]:
    """What to put into the run's environment.

    Args:
        clocks: Node → seconds by which its wall clock, and its time since the boot, are ahead of this machine's.
    """
    return {
        "PYTHONPATH": f"{_FOLDER}:{_ROOT}",
        "TEST_NODE_CLOCKS": json.dumps({str(node): shifts for node, shifts in clocks.items()}),
    }


def with_jumps(folder: Path) -> dict[str, str]:
    """The same for wall clocks that are set while the run goes on: `set_clock` does it."""
    return {**node_clocks({}), "TEST_CLOCK_JUMPS": str(folder)}


def set_clock(folder: Path, node: int, ahead: float) -> None:
    """Set a node's wall clock so many seconds ahead of this machine's."""
    fresh = folder / f".{node}"
    fresh.write_text(str(ahead))
    os.replace(fresh, folder / str(node))


def node_0_coordinates(folder: Path) -> list[str]:
    """Options of ``hpc-elastic run`` with which no other node can open the first round, however slow node 0 starts."""
    check = folder / "node-0-first.sh"
    check.write_text(_NODE_0_FIRST)
    check.chmod(0o755)
    return ["--health-checks", "none", "--health-check", str(check), "--health-check-timeout", "100"]


def fail_one_after_the_other(run: LocalRun, coordinator: int, nodes: Sequence[int], *, round_index: int = 0) -> None:
    """With nobody to act upon it before the workers of all `nodes` have failed."""
    agent = run.agent(coordinator)
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        for node in nodes:
            since = time.monotonic()
            run.until(lambda since=since: time.monotonic() - since > APART, "later moment")
            run.say(f"fail-{round_index}-{rank_on(run, node, round_index)}")
            run.until(partial(told, run, "workers_stopping", node, round_index), f"word of the failure on node {node}")
    finally:
        os.kill(agent.pid, signal.SIGCONT)


def told(run: LocalRun, name: str, node: int, round_index: int) -> list[dict[str, Any]]:
    """A node's words about a round."""
    found = [event for event in run.events(name) if event.get("round") == round_index]
    return [event for event in found if event["node"] == node]


def rank_on(run: LocalRun, node: int, round_index: int) -> int:
    (event,) = told(run, "round_final", node, round_index)
    return int(event["ranks"][0])
