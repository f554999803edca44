"""In-process restart under torchrun, as far as it goes: an exception restarts the function, a death ends all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.inprocess_ranks import ROOT
from tests.rigs.processes import bare_environ, marked
from tests.rigs.waiting import until

pytestmark = pytest.mark.torch

_TRAINING = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import hpc_elastic.inprocess as inprocess

folder = Path(sys.argv[1])

@inprocess.Wrapper()
def train(call: inprocess.CallWrapper):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"train/{call.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    value = torch.ones(1)
    dist.all_reduce(value)
    (folder / f"{call.iteration}-{rank}.json").write_text(json.dumps([os.getpid(), value.item()]))
    dist.barrier()
    if rank == 1:
        if call.iteration == 0:
            raise ValueError("planted")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(value)
    time.sleep(1000)

train()
"""


def test_an_exception_restarts_the_function_and_a_death_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRAINING)
    env = bare_environ() | {
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "TEST_RING_MARK": str(tmp_path),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with open(tmp_path / "log", "wb") as log:
        ended = subprocess.run(
            [*command, str(tmp_path)], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=300
        )
    output = (tmp_path / "log").read_text(errors="replace")
    assert ended.returncode != 0, output
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    for rank in (0, 1):  # rank 0 may begin once more, before torchrun ends it
        assert told.get(f"1-{rank}", [0, 0])[1] == 2.0, output
        assert told[f"0-{rank}"] == told[f"1-{rank}"], "the same process"
    # The monitor processes too: the store that they need was torchrun's.
    until(lambda: not marked("TEST_RING_MARK", str(tmp_path)), seconds=100)
