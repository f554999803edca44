"""Real runs that are disturbed at random, on several filesystems: what must hold whatever is done to them.

A failure prints its seed and the command that replays it. The long tier goes on for minutes on each filesystem, with
seeds that nobody has chosen (CHAOS_SEED=N begins with N).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.rigs.chaos.places import sharing_unavailable
from tests.rigs.chaos.runs import PLACES, ChaosResult, ChaosRun, plan_of, run_chaos
from tests.rigs.chaos.schedule import Kind, make_schedule
from tests.rigs.network_mounts import KINDS, require_mounts
from tests.rigs.nfs_emulator import require_fuse
from tests.rigs.requirements import require

LONG_SECONDS = 180.0
IN_CI = [
    ChaosRun(seed=388, place="nfs", nodes=4, bursts=3),
    ChaosRun(seed=357, place="nfs-coarse", nodes=3, bursts=2, doorbell=False),
    ChaosRun(seed=342, place="disk", nodes=5, bursts=4),
    ChaosRun(seed=67, place="nfs-ahead", nodes=16, min_nodes=4, bursts=2, handlers=True),
    ChaosRun(seed=358, place="glusterfs", nodes=32, min_nodes=8, bursts=2, handlers=True, ttl=6.0),
    ChaosRun(seed=358, place="sshfs", nodes=3, bursts=1),
]
LONG = [
    *[ChaosRun(seed=0, place=place, nodes=4, bursts=8) for place in sorted(PLACES)],
    *[ChaosRun(seed=0, place=place, nodes=2, min_nodes=1, bursts=8) for place in ("nfs", "disk")],
    *[ChaosRun(seed=0, place=place, nodes=4, bursts=6, doorbell=False) for place in ("nfs", "nfs-coarse")],
    *[ChaosRun(seed=0, place=place, nodes=16, min_nodes=4, bursts=6, handlers=True) for place in ("nfs", "sshfs")],
    ChaosRun(seed=0, place="nfs", nodes=32, min_nodes=8, bursts=6, handlers=True, ttl=6.0),
]


def named(run: ChaosRun) -> str:
    words = [run.place, str(run.nodes), "handlers" if run.handlers else "agents"]
    return "-".join(words + ([] if run.doorbell else ["files-alone"]))


def need(place: str) -> None:
    if place in KINDS:
        require_mounts(place)
    elif place == "disk":
        require("a small disk", sharing_unavailable())
    else:
        require_fuse()


def check(result: ChaosResult) -> None:
    print(result.summary())
    assert not result.complaints, f"{result.summary()}\n{result.report}"


@pytest.mark.parametrize("run", IN_CI, ids=named)
def test_what_must_hold_holds(run: ChaosRun) -> None:
    need(run.place)
    check(run_chaos(run))


def test_everything_that_can_be_done_is_done_in_these_runs() -> None:
    """Chance may have left something out: then another seed is to be taken above."""
    full = [
        run.place for run in IN_CI if Kind.FULL in {a.kind for a in make_schedule(run.seed, plan_of(run)).actions()}
    ]
    assert {"disk", "glusterfs", "sshfs"} <= set(full), "a server's disk that is full is told in many ways"
    done = {action.kind for run in IN_CI for action in make_schedule(run.seed, plan_of(run)).actions()}
    assert done == set(Kind)
    clocks = {offset for run in IN_CI for offset in make_schedule(run.seed, plan_of(run)).clocks}
    assert clocks == {0.0, 3600.0, -3600.0}


@pytest.mark.slow
@pytest.mark.parametrize("run", LONG, ids=named)
def test_it_holds_for_minutes(run: ChaosRun, tmp_path: Path) -> None:
    need(run.place)
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() // 10**9))
    began = time.monotonic()
    while time.monotonic() - began < LONG_SECONDS:
        check(run_chaos(run.with_seed(seed)))
        seed += 1
