"""Train a small network whose parameters are sharded over the ranks (FSDP2), on CPUs or GPUs: a script as for torchrun.

Nothing in it knows about hpc_elastic. Every rank saves its shards with torch.distributed.checkpoint; when the script is
started again, on as many ranks as before or not, it goes on from the last checkpoint that is whole.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANK, LOCAL_RANK, WORLD_SIZE = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small network with FSDP")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", default="fsdp-checkpoint", help="a folder that all nodes see")
    return parser.parse_args()


def make_data(device):
    """The same on every rank: 512 points of a function of 16 variables."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    return x.to(device), (x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(512, 1, generator=generator)).to(device)


def last_checkpoint(folder):
    """The newest checkpoint that is whole, as rank 0 sees it (another node may still see an older one); and the time.

    The time goes into the names of what this start saves: no two starts write to one folder, not even where a rank was
    frozen while it saved, and thaws when the others have saved that epoch again.
    """
    whole = [str(path.parent) for path in Path(folder).glob("epoch-*/.metadata")] if RANK == 0 else []
    found = [max(whole, default=""), time.time_ns()]
    dist.broadcast_object_list(found, src=0)
    return found


def save(path, model, optimizer):
    """All ranks write, and rank 0 writes .metadata at the end. Who dies before that leaves the previous one last."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)


def load(path, model, optimizer):
    """Each rank reads what it needs, whichever ranks wrote it."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main():
    args = parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    os.makedirs(args.checkpoint, exist_ok=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    last, started = last_checkpoint(args.checkpoint)
    done = int(Path(last).name.split("-")[1]) if last else 0
    if done:
        load(last, model, optimizer)
        if RANK == 0:
            print(f"resuming after epoch {done} from {args.checkpoint}", flush=True)

    x, y = make_data(device)
    for epoch in range(done + 1, args.epochs + 1):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(x), 64):
            # 64 samples for all ranks together; each takes its share, and FSDP averages over the ranks.
            mine = slice(start + RANK, start + 64, dist.get_world_size())
            loss = F.mse_loss(model(x[mine]), y[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * dist.get_world_size() / 64).backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if RANK == 0:
            print(f"epoch {epoch}/{args.epochs}: loss={total.item() / len(x):.6f}", flush=True)
        save(f"{args.checkpoint}/epoch-{epoch:04d}-{started}", model, optimizer)

    if RANK == 0:
        print(f"final: epoch={args.epochs}", flush=True)
    # gloo's threads let go of the last tensors meanwhile: one that does so while Python ends aborts it (torch 2.13).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
