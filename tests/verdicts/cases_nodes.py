"""What is wrong with one node, or with its agent."""

from __future__ import annotations

import os
import signal

from tests.rigs.local_run import LocalRun
from tests.verdicts.case import ENVIRON, GLOO, MEET, TORCH, Case, wait_file

GROUP = "nodes"

_NODE = ENVIRON + 'node = int(os.environ["GROUP_RANK"])\n'


def _kill_agent(run: LocalRun) -> None:
    for rank in range(4):
        wait_file(run, f"here-{rank}")
    (run.folder / "second-round").touch()
    os.kill(run.agent(1).pid, signal.SIGKILL)


CASES = (
    Case(
        "package-missing-on-a-node",
        GROUP,
        _NODE
        + """\
sys.path.insert(0, f"node{node}/site-packages")
import fastkernels
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
dist.barrier()
""",
        files={"node0/site-packages/fastkernels.py": "VERSION = 3\n"},
        ranks=(2, 3),
        says=("No module named 'fastkernels'",),
    ),
    Case(
        "data-not-staged-on-a-node",
        GROUP,
        _NODE
        + MEET
        + """\
def open_shards(scratch):
    return [open(os.path.join(scratch, f"shard-{index}.bin"), "rb") for index in range(2)]

open_shards(f"scratch/node{node}")
time.sleep(60)
""",
        files={"scratch/node1/shard-0.bin": "0", "scratch/node1/shard-1.bin": "1"},
        ranks=(0, 1),
        says=("shard-0.bin",),
    ),
    Case(
        "disk-of-a-node-is-full",
        GROUP,
        GLOO
        + """\
node = int(os.environ["GROUP_RANK"])

def cache(path, sample):
    with open(path, "ab") as file:
        file.write(sample)

for step in range(20):
    if node == 1:
        cache(f"local1/cache-{rank}", b"0" * 200_000)
    dist.all_reduce(torch.ones(4))
""",
        tmpfs={"local1": "1m"},
        ranks=(2, 3),
        says=("No space left on device",),
        category="infrastructure",
    ),
    Case(
        "all-ranks-of-a-node-are-killed",
        GROUP,
        GLOO
        + """\
import signal
for step in range(500):
    if rank == 2 and step == 8:
        # what a node's memory guard does to the whole step
        os.kill(int(open("pid-3").read()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 0 and rank == 3:
        with open("pid-3", "w") as file:
            file.write(str(os.getpid()))
    dist.all_reduce(torch.ones(4))
""",
        ranks=(2, 3),
        says=("SIGKILL",),
    ),
    Case(
        "agent-of-a-node-is-killed",
        GROUP,
        _NODE
        + """\
if os.path.exists("second-round"):
    sys.exit()
"""
        + MEET
        + "time.sleep(60)\n",
        ranks=(),
        node="node1",
        # The first expectation had the run fail. A new agent takes the place, and that costs no restart.
        succeeds=True,
        says=("agent", "node1"),
        act=_kill_agent,
    ),
    Case(
        "agent-killed-in-a-collective",
        GROUP,
        GLOO
        + """\
if os.path.exists("second-round"):
    sys.exit()
open(f"here-{rank}", "w").close()
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
""",
        ranks=(),
        node="node1",
        succeeds=True,
        says=("agent", "node1"),
        act=_kill_agent,
    ),
    Case(
        "library-missing-on-a-node",
        GROUP,
        _NODE
        + MEET
        + """\
import ctypes
name = "libm.so.6" if node == 0 else "libcustom_ops.so.2"
ctypes.CDLL(name)
time.sleep(60)
""",
        ranks=(2, 3),
        says=("libcustom_ops.so.2: cannot open shared object file",),
    ),
    Case(
        "configuration-of-another-version",
        GROUP,
        _NODE
        + """\
import json
config = json.load(open(f"opt/node{node}/model.json"))
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
layers = [torch.nn.Linear(config["width"], config["width"]) for _ in range(config["num_layers"])]
for layer in layers:
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, src=0)
""",
        files={
            "opt/node0/model.json": '{"width": 8, "num_layers": 2}',
            "opt/node1/model.json": '{"width": 8, "layers": 2}',
        },
        ranks=(2, 3),
        says=("KeyError: 'num_layers'",),
    ),
    Case(
        "file-missing-for-one-rank-only",
        GROUP,
        _NODE
        + MEET
        + """\
with open(f"parts/part-{rank}.idx") as file:
    file.read()
time.sleep(60)
""",
        files={f"parts/part-{rank}.idx": "" for rank in (0, 1, 2)},
        ranks=(3,),
        says=("part-3.idx",),
    ),
    Case(
        "name-not-resolved-on-a-node",
        GROUP,
        TORCH
        + """\
import socket
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
dist.barrier()
server = "localhost" if int(os.environ["GROUP_RANK"]) == 0 else "feature-store.invalid"
address = socket.getaddrinfo(server, 8080)
dist.barrier()
""",
        ranks=(2, 3),
        says=("gaierror",),
    ),
)
