"""`hpc-elastic run` with its run directory on a real network filesystem: two nodes, a worker killed, a good end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.network_mounts import KINDS, NetworkMounts

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
