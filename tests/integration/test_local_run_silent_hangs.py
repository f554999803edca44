"""A rank hangs, in a script that knows nothing of heartbeats: torch's flight recorder and the stacks name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from tests.rigs.local_run import ROOT, LocalRun

pytestmark = pytest.mark.torch
SCRIPT = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()

def fetch(step):
    HOW

for step in range(100):
    gradient = torch.ones(4)
    if step == 5:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
        if rank == 2:
            fetch(step)
    dist.all_reduce(gradient)
    time.sleep(0.01)
"""
ENTRY_POINT = "[torch.backends]\nhpc_elastic = hpc_elastic.worker_api.torch_import:start\n"
HOWS = {
    "never": ("while True: time.sleep(1)", "never entered all_reduce #6 of group default_pg (16 B fp32)"),
    "other": (
        "dist.broadcast(torch.ones(4), 2)",
        "called broadcast #6 of group default_pg (16 B fp32) where the others called all_",
    ),
    "shape": ("dist.all_reduce(torch.ones(6))", "called all_reduce #6 of group default_pg with [6] fp32 where the oth"),
    "late": ("time.sleep(60)", "never entered all_reduce #6 of group default_pg (16 B fp32)"),
    "exit": ("sys.exit(0)", "it ended with 0"),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)", "it was stopped by a signal (SIGSTOP, a debugger)"),
    "loader": (
        "next(iter(torch.utils.data.DataLoader([0], num_workers=1, collate_fn=lambda _: time.sleep(1000))))",
        "it was waiting for a worker of its DataLoader",
    ),
}


def installed(folder: Path) -> dict[str, str]:
    """What installing the package does: its entry points can be found."""
    (folder / "site" / "hpc_elastic_here-0.dist-info").mkdir(parents=True)
    (folder / "site" / "hpc_elastic_here-0.dist-info" / "METADATA").write_text("Name: hpc_elastic_here\nVersion: 0\n")
    (folder / "site" / "hpc_elastic_here-0.dist-info" / "entry_points.txt").write_text(ENTRY_POINT)
    return {"PYTHONPATH": f"{ROOT}:{folder / 'site'}"}


# "late" and "shape" are found as "never" and "other" are; unit/failures/test_flight_recorder.py has the comparison.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("late", "shape"))) for name in HOWS]
)
def test_the_rank_that_the_others_wait_for_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how, why = HOWS[name]
    script = SCRIPT.replace("HOW", how)
    environ = installed(tmp_path)
    with LocalRun(tmp_path, script, nproc=2, prelude="", options=("--max-restarts", "0"), environ=environ) as run:
        assert run.finish() == 1
        verdict = run.report()["verdict"]
        assert (verdict["cause"], verdict["suspects"][0]["rank"]) == ("unknown", 2)
        assert why in verdict["suspects"][0]["why"]
        assert len(verdict["suspects"]) == 1
        if name in ("never", "late"):
            dumps = [str(run.rank(rank).root / f"flight-recorder-{rank}.json") for rank in range(4)]
            assert main(["hangs", "--json", *dumps]) == 0
            assert [one["rank"] for one in json.loads(capsys.readouterr().out)["suspects"]] == [2]


def test_ranks_that_wait_in_several_gloo_groups_seem_to_hang(tmp_path: Path) -> None:
    """gloo's timeout is half an hour; a thread of each group looks for messages 100 times a second meanwhile."""
    script = SCRIPT.replace(", timeout=datetime.timedelta(seconds=60)", "").replace("HOW", HOWS["never"][0])
    script = script.replace("dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))", "")
    script = script.replace("rank = dist", "groups = [dist.new_group() for _ in range(3)]\nrank = dist")
    options = ("--max-restarts", "0", "--hangs", "act:3")
    with LocalRun(tmp_path, script, nproc=2, prelude="", options=options, environ=installed(tmp_path)) as run:
        assert run.finish() == 124
        (suspected,) = run.events("hang_suspected")
        assert (suspected["source"], suspected["ranks"]) == ("kernel", [2])
        verdict = run.report()["verdict"]
        assert (verdict["cause"], verdict["failure"]["global_rank"], verdict["confidence"]) == ("worker", 2, "high")
