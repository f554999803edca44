"""The reference for a user's script: DDP on gloo with a DataLoader's workers, a checkpoint every N steps, and a resume.

It imports nothing of this project. ``--fail HOW@STEP`` makes one rank fail at a step, each of them once for the whole
training: HOW is ``raise``, ``kill`` or ``hang``.
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbers(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        return x, x.sum().unsqueeze(0)


def fail(how):
    if how == "raise":
        raise ValueError("bad batch: label 1031 out of range [0, 1000)")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10_000)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--fail", action="append", default=[], metavar="HOW@STEP")
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print(f"rank {rank} begins at step {step}", flush=True)
    data = Numbers()
    sampler = DistributedSampler(data)
    while step < args.steps:
        sampler.set_epoch(step)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler, num_workers=2):
            for text in args.fail:
                how, _, at = text.partition("@")
                mark = f"{args.checkpoint}.failed-{text}"
                if rank == args.fail_rank and step == int(at) and not os.path.exists(mark):
                    open(mark, "w").close()
                    fail(how)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.save_every == 0:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, args.checkpoint + ".tmp")
                    os.replace(args.checkpoint + ".tmp", args.checkpoint)
                dist.barrier()
            if step == args.steps:
                break
            time.sleep(args.step_seconds)
    print(f"rank {rank} ends at step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
