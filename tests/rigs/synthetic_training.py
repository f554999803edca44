"""A training script like docs/examples/train_digits.py with nothing but torch, on a device and a backend to choose.

A worker's script, not imported. Its data come from a seed, the global batch is fixed and split over the ranks: the
losses are the same for any number of ranks, interrupted or not.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.rigs.torch_ranks import join

SAMPLES, BATCH = 1024, 64
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--way", default="as it is")
    args = parser.parse_args()

    torch.set_num_threads(1)
    device = join(args.backend, args.device, args.way)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 32, generator=generator)
    y = (x @ torch.randn(32, 10, generator=generator)).argmax(1).to(device)
    x = x.to(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        done = state["epoch"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        print(f"resuming after epoch {done} from {args.checkpoint}", flush=True)
    ddp = DistributedDataParallel(model)
    for epoch in range(done + 1, args.epochs + 1):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).to(device)
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for batch in order.split(BATCH):
            mine = batch[RANK::WORLD]
            loss = F.cross_entropy(ddp(x[mine]), y[mine], reduction="sum")
            total += loss.detach().double()
            optimizer.zero_grad()
            (loss * WORLD / BATCH).backward()
            optimizer.step()
        dist.all_reduce(total)
        if RANK == 0:
            print(f"epoch {epoch}/{args.epochs}: loss={total.item() / SAMPLES:.6f}", flush=True)
            state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
        dist.barrier()  # nobody begins an epoch whose predecessor another start would not find
    if RANK == 0:
        print(f"final: epoch={args.epochs} ranks={WORLD} device={device.type}", flush=True)
    del ddp  # the group's last holder must not be DDP: see docs/how-to/train-with.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
