"""Slow ranks of a user's DDP script, which imports nothing of this project: who is named, and what it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_elastic.base.outcome import ExitCode
from tests.rigs.local_run import ROOT, LocalRun

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # a busy machine has slow ranks of its own
SCRIPT = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SLOW, HOW, SECONDS = {slow!r}, {how!r}, {seconds!r}

class Numbers(Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        if HOW == "loader" and int(os.environ["RANK"]) in SLOW:
            time.sleep(0.0325 * 2)  # two samples a batch, read by one process: 0.13 s a batch
        return torch.randn(64)

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
over, began = torch.zeros(1), time.monotonic()
for step, batch in enumerate(DataLoader(Numbers(), batch_size=2, num_workers=1)):
    time.sleep(0.1 * (1.3 if HOW == "compute" and rank in SLOW else 1))
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if HOW == "saves" and rank == 0 and step % 40 == 39:
        time.sleep(1)
    if step % 20 == 19:
        over[0] = time.monotonic() - began > SECONDS
        dist.broadcast(over, 0)
        if over[0]:
            break
if rank == 0:
    print(f"{{(time.monotonic() - began) / (step + 1):.4f}} s a step", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "slow", "nodes"),
    [
        ("compute", [3], 2),
        ("compute", [2, 5], 4),
        ("loader", [5], 4),
        ("saves", [], 4),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path, how: str, slow: Sequence[int], nodes: int) -> None:
    seconds = 75 if slow else 130
    script = SCRIPT.format(slow=slow, how=how, seconds=seconds)
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scratch,  # a short path, of sockets
        LocalRun(tmp_path, script, nodes=nodes, nproc=2, environ={"OMP_NUM_THREADS": "1", "TMPDIR": scratch}) as run,
    ):
        if slow:
            run.until(lambda: len(run.events("slow_rank_found")) >= len(slow), "slow ranks", within=120)
            command = [sys.executable, "-m", "hpc_elastic", "status", str(run.paths.root), "--json"]
            shown = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
            assert {one["rank"] for one in shown["slow_ranks"]} <= set(slow)
        assert run.finish(within=240) == ExitCode.OK
        found = [event["slow"] for event in run.events("slow_rank_found")]
        assert sorted({one["rank"] for one in found}) == list(slow)
        pace = re.search(r"([\d.]+) s a step", run.rank(0).stdout.read_text())
        assert pace is not None
        for one in found:
            assert one["node"] == one["rank"] // 2
            assert one["share"] == pytest.approx(0.03 / float(pace[1]), rel=0.25)
        ended = run.events("slow_rank_ended")
        assert {event["slow"]["rank"] for event in ended} == set(slow)
        lines = [line for line in run.report()["lines"] if line["name"] == "slow rank"]
        assert len(lines) == len(slow)
