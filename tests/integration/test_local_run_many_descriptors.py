"""A run all of whose processes have more descriptors than `select.select` takes: as with 200 workers, and cheaper."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun

FIRST = 1100
"""The number of the first descriptor that each process is left with."""
_FILL = f"""
import os, resource
_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if "RANK" not in os.environ:  # a worker has the limit of the user's shell
    resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))
    while os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) < {FIRST - 1}:
        pass
"""
_WORKERS = """
others_in_round()
tell("up")
if ROUND == 0 and RANK == 1:
    wait_for("fail")
    sys.exit(3)
wait_for("end")
print("done", RANK)
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * FIRST, reason="no such descriptors here")
def test_a_run_restarts_and_ends_with_descriptors_beyond_1023(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_FILL)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    run = LocalRun(
        tmp_path,
        "tell('here')\n" + _WORKERS,
        options=["--health-check", "true"],  # a process of its own each time, waited for while the agent goes on
        environ={"PYTHONPATH": path},
    )
    with run:
        run.wait_moments("up", count=2, round_index=0)
        for node in range(2):
            numbers = [int(name) for name in os.listdir(f"/proc/{run.agent(node).pid}/fd")]
            assert sum(number > FIRST for number in numbers) > 10
        run.say("fail")
        run.wait_moments("up", count=2, round_index=1)
        run.finish_well()
        assert "done 0" in run.rank(0, round_index=1).stdout.read_text()
        (failure,) = run.events("worker_failed")
        assert failure["exitcode"] == 3
