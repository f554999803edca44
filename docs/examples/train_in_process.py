"""Train a small network with DistributedDataParallel, and start again *within the processes* where a rank fails.

A script as for torchrun, but for what is marked with "restart". The global batch is fixed and split over the
ranks, so the losses are the same for any number of ranks, interrupted or not.

``--fail-rank R --fail-step S`` plants a fault: that rank raises, or with ``--fail-how kill`` kills itself, once.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpc_elastic
import hpc_elastic.inprocess as inprocess  # restart
from hpc_elastic.integrations import last_whole_checkpoint

BATCH = 24  # of all ranks together
EVERY = 5  # steps between two checkpoints


def parse_args():
    parser = argparse.ArgumentParser(description="Train, and restart within the processes")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", default="in-process-checkpoint", help="a folder that all nodes see")
    parser.add_argument("--fail-rank", type=int, default=-1, help="this rank fails once, for demos")
    parser.add_argument("--fail-step", type=int, default=-1)
    parser.add_argument("--fail-how", choices=("raise", "kill"), default="raise")
    return parser.parse_args()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, 8, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def save(folder, model, optimizer, step):
    """Whole or not at all, and never over another step's."""
    os.makedirs(folder, exist_ok=True)
    path, part = f"{folder}/step-{step:06d}.pt", f"{folder}/step-{step:06d}.{os.getpid()}.part"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    os.replace(part, path)


def fail(args):
    if args.fail_how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("planted")


# restart: the function starts again in all processes that are left, and in fresh ones in dead ones' places. It gives up
# after 5 starts: then its processes end, and the agents start new ones.
@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=5))
def train(args, call: inprocess.CallWrapper):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # restart: read anew in each start
    # restart: a TCPStore is served at MASTER_PORT already, by the agent or by rank 0; each start has keys of its own.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"train/{call.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    print(f"start {call.iteration}: rank {rank} of {world_size}, process {os.getpid()}", flush=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Rank 0's word: not every rank need see the same file yet.
    path = last_whole_checkpoint(args.checkpoint) if rank == 0 else None
    found = [torch.load(path) if path else None]
    dist.broadcast_object_list(found, src=0)
    first = 0
    if found[0] is not None:
        model.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
        first = found[0]["step"]
    replica = DistributedDataParallel(model)
    is_ending = False
    for step in range(first, args.steps):
        if rank == args.fail_rank and step == args.fail_step and call.iteration == 0:
            fail(args)
        x, y = (part.chunk(world_size)[rank] for part in batch_of(step))
        loss = F.mse_loss(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hpc_elastic.heartbeat(step + 1, loss=loss.item())  # for hpc-elastic status, and a rehearsal's judge
        call.ping()  # restart: from the first one on, a minute without one counts as a hang
        is_ending = hpc_elastic.should_checkpoint(step + 1)  # the job is about to end: on all ranks after the same step
        if is_ending or (step + 1) % EVERY == 0:
            if rank == 0:
                save(args.checkpoint, model, optimizer, step + 1)
            dist.barrier()
        if is_ending:  # the next attempt goes on from there
            break
    with torch.no_grad():
        x, y = batch_of(args.steps)
        final = F.mse_loss(model(x), y).item()
    del replica  # before its group: the last to hold a gloo group, it may wait for ever for gloo's threads (torch 2.13)
    dist.destroy_process_group()
    if is_ending:
        return None
    if rank == 0:
        print(f"final: steps={args.steps} loss={final:.6f} starts={call.iteration + 1}", flush=True)
    return final


if __name__ == "__main__":
    train(parse_args())
