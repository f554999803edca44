"""Slow ranks of a user's DDP script, which imports nothing of this project: which are named, and what that costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import ROOT, LocalRun
from tests.rigs.slowed_training import SCRIPT, paces, share_lost, slow_down

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # a busy machine has slow ranks of its own


@contextmanager
def training(folder: Path, *options: str, nodes: int, nproc: int, min_nodes: int | None = None) -> Iterator[LocalRun]:
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scratch,  # a short path, of sockets
        LocalRun(
            folder,
            SCRIPT,
            nodes=nodes,
            min_nodes=min_nodes,
            nproc=nproc,
            options=options,
            environ={"TMPDIR": scratch},
        ) as run,
    ):
        run.until(lambda: len(paces(run.log())) > 5, "steps")
        yield run
        (folder / "end").touch()
        assert run.finish(within=240) == ExitCode.OK


@pytest.mark.parametrize(("how", "slow", "nodes"), [("compute", [3], 2), ("compute", [2, 5], 4), ("loader", [5], 4)])
def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path, how: str, slow: Sequence[int], nodes: int) -> None:
    with training(tmp_path, nodes=nodes, nproc=2) as run:
        before = paces(run.log())[2:]
        slow_down(tmp_path, how, slow)
        run.until(lambda: len(run.events("slow_rank_found")) >= len(slow), "slow ranks", within=120)
        command = [sys.executable, "-m", "hpc_elastic", "status", str(run.paths.root), "--json"]
        shown = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        assert {one["rank"] for one in shown["slow_ranks"]} <= set(slow)
        after = paces(run.log())[len(before) + 4 :]
    found = [event["slow"] for event in run.events("slow_rank_found")]
    assert sorted({one["rank"] for one in found}) == list(slow)
    for one in found:
        assert one["node"] == one["rank"] // 2
        assert one["share"] == pytest.approx(share_lost(before, after), rel=0.2, abs=0.04)
    assert {event["slow"]["rank"] for event in run.events("slow_rank_ended")} == set(slow)
    lines = [line for line in run.report()["lines"] if line["name"] == "slow rank"]
    assert len(lines) == len(slow)


def test_a_rank_that_saves_is_not_named(tmp_path: Path) -> None:
    with training(tmp_path, nodes=4, nproc=2) as run:
        slow_down(tmp_path, "saves", [0])
        run.until(lambda: len(paces(run.log())) > 50, "steps", within=200)
    assert not run.events("slow_rank_found")


def test_the_next_restart_leaves_the_node_of_a_slow_rank_out(tmp_path: Path) -> None:
    with training(tmp_path, "--slow-ranks", "exclude", nodes=3, nproc=1, min_nodes=2) as run:
        slow_down(tmp_path, "compute", [2])
        (found,) = run.until(lambda: run.events("slow_rank_found"), "slow rank", within=120)
        assert {event["round"] for event in run.events("workers_started")} == {0}, "nothing is restarted because of it"
        pids = {event["node"]: event["pids"][0] for event in run.events("workers_started")}
        os.kill(pids[(found["slow"]["node"] + 1) % 3], signal.SIGKILL)
        run.until(lambda: len({e["node"] for e in run.events("workers_started") if e["round"] == 1}) == 2, "restart")
    assert f"this node leaves the run: slow rank: rank 2 on {found['slow']['host']} enters" in run.log()
    last = run.report()["attempts"][0]["rounds"][-1]
    assert len(last["nodes"]) == 2
    assert found["slow"]["node"] not in [node["node"] for node in last["nodes"]]
