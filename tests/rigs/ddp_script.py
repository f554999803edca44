"""The reference for a user's script: DDP on gloo with a DataLoader's workers, a checkpoint every N steps, and a resume.

It imports nothing of this project. ``--fail HOW@PLACE`` makes one rank fail, each of them once for the whole training.
HOW is ``raise``, ``kill``, or a hang: ``sleep``, ``stop`` (SIGSTOP), ``lock`` (a lock file), ``gil`` (a loop in C that
holds the interpreter), or what is none: ``evaluate`` (it computes for `--pause` seconds while the other ranks wait),
``download`` (it reads slowly, into memory), ``pause`` (it does nothing for so long). PLACE is a step, ``init`` (before
the process group), ``end`` (after the last step), ``exit`` (a thread of it never ends) or ``atexit``.
"""

import argparse
import atexit
import collections
import fcntl
import itertools
import os
import signal
import socket
import threading
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


class ByHand:
    """SGD without an optimizer of torch's."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            parameter -= 0.01 * parameter.grad

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def fail(how, seconds):
    if how == "raise":
        raise ValueError("bad batch: label 1031 out of range [0, 1000)")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "lock":
        files = [open("lock", "w") for _ in range(2)]  # noqa: SIM115
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX)
    if how == "gil":
        collections.deque(itertools.repeat(0), maxlen=0)
    if how == "evaluate":
        evaluate(seconds)
    elif how == "download":
        download(seconds)
    else:
        time.sleep(seconds if how == "pause" else 10_000)


def evaluate(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)


def download(seconds):
    """100 KB a second, by recv, which no file's counter shows."""
    server = socket.create_server(("127.0.0.1", 0))
    here, there = socket.create_connection(server.getsockname()), server.accept()[0]
    end = time.monotonic() + seconds

    def serve():
        while time.monotonic() < end:
            there.sendall(bytes(10_000))
            time.sleep(0.1)
        there.close()

    threading.Thread(target=serve).start()
    while here.recv(4096):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--fail", action="append", default=[], metavar="HOW@PLACE")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--save-on-sigterm", action="store_true", help="in the step after it, all ranks together")
    parser.add_argument("--by-hand", action="store_true", help="use no optimizer of torch's")
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    args = parser.parse_args()

    rank = int(os.environ["RANK"])

    def perhaps_fail(place):
        for text in args.fail:
            how, _, at = text.partition("@")
            mark = f"{args.checkpoint}.failed-{text}"
            if rank == args.fail_rank and at.lstrip("0") == str(place) and not os.path.exists(mark):
                open(mark, "w").close()
                fail(how, args.pause)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    perhaps_fail("init")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = ByHand(model.parameters()) if args.by_hand else torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = torch.zeros(1)
    if args.save_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: wanted.fill_(1))

    def save():
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
        dist.barrier()

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
            perhaps_fail(step)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.save_every == 0:
                save()
            if step == args.steps:
                break
            if args.save_on_sigterm:
                any_wanted = wanted.clone()
                dist.all_reduce(any_wanted)
                if any_wanted:
                    time.sleep(args.pause)
                    save()
                    print(f"rank {rank} saved step {step} on SIGTERM", flush=True)
                    return
            time.sleep(args.step_seconds)
    print(f"rank {rank} ends at step {step}", flush=True)
    perhaps_fail("end")
    dist.destroy_process_group()
    atexit.register(perhaps_fail, "atexit")
    threading.Thread(target=perhaps_fail, args=("exit",)).start()


if __name__ == "__main__":
    main()
