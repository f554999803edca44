"""In-process restart on a real Slurm: one worker dies and is replaced, the others keep their processes."""

from __future__ import annotations

import re

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import SlurmRuns

pytestmark = pytest.mark.torch

# The last rank dies in the first iteration, when all have told where they are; the others wait for it in a collective.
TRAINS = """
import os, pathlib, signal, time
import torch
import torch.distributed as dist
import hpc_elastic.inprocess as inprocess

@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=4))
def train(call: inprocess.CallWrapper):
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"iteration{call.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    print("in iteration", call.iteration, "rank", rank, "of", world, "is process", os.getpid())
    pathlib.Path(f"told-{call.iteration}-{rank}").touch()
    if call.iteration == 0:
        while len(list(pathlib.Path().glob("told-0-*"))) < world:
            time.sleep(0.01)
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

train()
"""


def test_one_worker_is_replaced_and_the_others_keep_their_processes(cluster: SlurmCluster) -> None:
    runs = SlurmRuns(cluster)
    run = runs.submit_and_follow(
        *("--nodes", "2", "-t", "10", "--nproc-per-node", "2", "--restart-policy", "in-process"),
        runs.script(TRAINS),
        timeout=240,
    )
    assert run.done is not None
    assert run.done.returncode == 0, run.log
    line = re.compile(r"^\[(\w+):\d+\] in iteration (\d) rank (\d) of 4 is process (\d+)$", re.M)
    places = {(int(i), int(rank)): (node, int(pid)) for node, i, rank, pid in line.findall(run.log)}
    assert sorted(places) == [(i, rank) for i in range(2) for rank in range(4)], run.log
    for rank in range(3):
        assert places[0, rank] == places[1, rank]
    (before, after) = places[0, 3], places[1, 3]
    assert before[0] == after[0], "on the same node"
    (replaced,) = [event for event in run.events() if event["event"] == "worker_replaced"]
    assert (replaced["rank"], replaced["exitcode"]) == (3, -9)
    assert before[1] != after[1]
    assert {event["round"] for event in run.events() if event["event"] == "round_final"} == {0}
    (told,) = run.report()["attempts"][0]["rounds"][0]["in_process"]
    assert (told["iteration"], told["joined"]) == (1, [3])
