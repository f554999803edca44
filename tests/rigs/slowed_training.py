"""A user's DDP script on gloo, which imports nothing of this project, and whose ranks a test slows as it runs.

A forward pass sleeps for `STEP_SECONDS`, as a process does whose GPU works: eight ranks then fit onto two cores. The
script reads two files in its folder: ``slow``, in JSON which ``ranks`` are slow and ``how``; and ``end``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

STEP_SECONDS = 0.1
SLOWER = 0.3
LOADER_SECONDS = 0.17
"""Of a slow batch: a loader is felt where it takes longer than all that it hides behind."""
SCRIPT = f"""
import json, os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK, SECONDS = int(os.environ["RANK"]), {STEP_SECONDS}

def slow(how):
    try:
        with open("slow") as file:
            found = json.load(file)
    except (FileNotFoundError, ValueError):
        return False
    return found["how"] == how and RANK in found["ranks"]

class Numbers(Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        if slow("loader"):
            time.sleep({LOADER_SECONDS / 2})  # two samples a batch, read by one process
        return torch.randn(64)

class Model(nn.Sequential):
    def forward(self, batch):
        time.sleep(SECONDS * ({1 + SLOWER} if slow("compute") else 1))
        return super().forward(batch)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(Model(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
over, began = torch.zeros(1), time.monotonic()
for step, batch in enumerate(DataLoader(Numbers(), batch_size=2, num_workers=1)):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if slow("saves") and step % 40 == 39:
        time.sleep(1)
    if step % 20 == 19:
        over[0] = os.path.exists("end")
        dist.broadcast(over, 0)
        if RANK == 0:
            now = time.monotonic()
            print(f"pace {{(now - began) / 20:.4f}}", flush=True)
            began = now
        if over[0]:
            break
dist.destroy_process_group()
"""


def paces(log: str) -> list[float]:
    """Seconds a step, of each twenty steps."""
    return [float(found) for found in re.findall(r"pace ([\d.]+)", log)]


def slow_down(folder: Path, how: str, ranks: Sequence[int]) -> None:
    (folder / ".slow").write_text(json.dumps({"how": how, "ranks": list(ranks)}))
    (folder / ".slow").rename(folder / "slow")


def share_lost(before: Sequence[float], after: Sequence[float]) -> float:
    """The share of the time that is lost, by the medians of two runs of paces."""
    usual, slow = (sorted(values)[len(values) // 2] for values in (before, after))
    return 1 - usual / slow
