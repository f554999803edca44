"""Real network filesystems, two clients each: torch's ranks in `FileSystemStore` lose no increment, a whole run goes
on after a killed worker. What torch's own FileStore does there: docs/reference/filesystems.md."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.network_mounts import KINDS, NetworkMounts
from tests.rigs.nfs_emulator import NfsEmulator
from tests.rigs.store_ranks import count_together

RANKS, EACH = 8, 25


def check_counting(mounts: list[Path]) -> None:
    counted = count_together(
        [mounts[rank % 2] / "torch-store" for rank in range(RANKS)], "ours", each=EACH, seconds=300
    )
    assert counted.stuck == 0
    assert counted.errors == ()
    assert counted.total == RANKS * EACH
    assert counted.sums == list(range(1, RANKS * EACH + 1))


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_two_clients_lose_no_increment(kind: str, network_mounts: Callable[[str], NetworkMounts]) -> None:
    check_counting(network_mounts(kind).paths)


@pytest.mark.torch
def test_ranks_on_two_emulated_clients_lose_no_increment(tmp_path: Path) -> None:
    with NfsEmulator(tmp_path, mounts=2) as emulator:
        check_counting(emulator.paths)


_TRAIN = """
print("training in round", ROUND)
tell("here")
others_in_round()
wait_for("end" if ROUND else "never")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_after_a_killed_worker(
    kind: str, tmp_path: Path, network_mounts: Callable[[str], NetworkMounts]
) -> None:
    filesystem = network_mounts(kind)
    runs = filesystem.paths[0] / "runs"
    with LocalRun(tmp_path, _TRAIN, runs_dir=runs, heartbeat_ttl=3.0 + filesystem.kind.delay) as run:
        run.wait_moments("here", count=2, round_index=0)
        run.kill_worker(1, round_index=0)
        run.wait_moments("here", count=2, round_index=1)
        run.say("end")
        assert run.finish(within=60) == 0
        assert {event["round"] for event in run.events("round_final")} == {0, 1}
        assert json.loads(_on_the_other(run, filesystem)) == run.report()
        for rank in range(2):
            assert run.rank(rank, round_index=1).stdout.read_text() == "training in round 1\n"


def _on_the_other(run: LocalRun, filesystem: NetworkMounts) -> str:
    """The report as the other client sees it, once its caches show it."""
    here = run.attempt().report_json
    there = filesystem.paths[1] / here.relative_to(filesystem.paths[0])
    deadline = time.monotonic() + 10 + 2 * filesystem.kind.delay
    while True:
        try:
            os.listdir(there.parent)
            return there.read_text()
        except OSError:
            assert time.monotonic() < deadline, "the other client does not see the report"
            time.sleep(0.05)
