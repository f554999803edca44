"""Train a small network on scikit-learn's digits with DistributedDataParallel: a script as one writes it for torchrun.

Two lines know about hpc_elastic: `should_checkpoint` says after an epoch whether the job is about to end, and is False
outside of a run; `last_whole_checkpoint` finds the newest file. The rest reads RANK, WORLD_SIZE and MASTER_* through
`init_process_group`, saves a checkpoint after every epoch, and goes on from it when it is started again. The global
batch is fixed and split over the ranks, so the losses are the same for any number of ranks, interrupted or not.

``--kill-rank R --kill-epoch E`` makes rank R kill itself, once, in the middle of epoch E: to see what happens then.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
print(f"rank {RANK} of {WORLD_SIZE} started on {socket.gethostname()}", flush=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hpc_elastic import should_checkpoint  # noqa: E402
from hpc_elastic.integrations import last_whole_checkpoint  # noqa: E402

TRAINING_IMAGES = 1437  # of 1797; the rest measures the accuracy


def parse_args():
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=96, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--checkpoint", default="digits", help="a folder: a file after every epoch, resumed from at the start"
    )
    parser.add_argument("--epoch-delay", type=float, default=0.0, help="seconds to wait in every epoch, for demos")
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank kills itself once, for demos")
    parser.add_argument("--kill-epoch", type=int, default=-1)
    return parser.parse_args()


def load_data():
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[:TRAINING_IMAGES], y[:TRAINING_IMAGES]), (x[TRAINING_IMAGES:], y[TRAINING_IMAGES:])


def load_checkpoint(folder):
    """What rank 0 finds in the newest file, on every rank: a shared filesystem may show others an older one."""
    found = [None]
    if RANK == 0 and (path := last_whole_checkpoint(folder)):
        found = [torch.load(path, weights_only=True)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save_checkpoint(folder, state):
    """Whole or not at all, and never over another epoch's: not even by a rank that was frozen here, and thaws late."""
    path = Path(folder, f"epoch-{state['epoch']:04d}.pt")
    path.parent.mkdir(exist_ok=True)
    torch.save(state, f"{path}.{os.getpid()}.tmp")
    os.replace(f"{path}.{os.getpid()}.tmp", path)
    path.with_name(f"epoch-{state['epoch'] - 3:04d}.pt").unlink(missing_ok=True)


def die_once(folder):
    """The demo's fault. A marker beside the checkpoints says that it has happened."""
    try:
        open(f"{folder}.killed", "x").close()
    except FileExistsError:
        return
    print(f"rank {RANK}: killing myself, as --kill-rank asks", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def train_epoch(epoch, args, model, optimizer, data):
    """One pass. Returns this rank's sum of losses."""
    x, y = data
    total = 0.0
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))  # the same on every rank
    for start in range(0, len(x), args.batch_size):
        if args.kill_rank == RANK and epoch == args.kill_epoch and start >= len(x) // 2:
            die_once(args.checkpoint)
        batch = order[start : start + args.batch_size]
        mine = batch[RANK::WORLD_SIZE]
        loss = F.cross_entropy(model(x[mine]), y[mine], reduction="sum")
        total += loss.item()
        optimizer.zero_grad()
        # DDP averages over ranks, and shares differ by one image: weigh them so that it is the batch's mean gradient.
        (loss * WORLD_SIZE / len(batch)).backward()
        optimizer.step()
    return total


def main():
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    training, test = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = load_checkpoint(args.checkpoint) or {"epoch": 0, "loss": float("nan"), "accuracy": float("nan")}
    if state["epoch"]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if RANK == 0:
            print(f"resuming after epoch {state['epoch']} from {args.checkpoint}", flush=True)
    ddp = DistributedDataParallel(model)

    for epoch in range(state["epoch"] + 1, args.epochs + 1):
        loss_sum = train_epoch(epoch, args, ddp, optimizer, training)
        with torch.no_grad():
            x, y = test[0][RANK::WORLD_SIZE], test[1][RANK::WORLD_SIZE]
            correct = (model(x).argmax(1) == y).sum().item()
        sums = torch.tensor([loss_sum, correct], dtype=torch.float64)
        dist.all_reduce(sums)
        loss, accuracy = sums[0].item() / len(training[0]), sums[1].item() / len(test[0])
        state = {"epoch": epoch, "loss": loss, "accuracy": accuracy}
        if RANK == 0:
            print(f"epoch {epoch}/{args.epochs}: loss={loss:.6f} accuracy={accuracy:.4f}", flush=True)
            save_checkpoint(
                args.checkpoint, {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
        if should_checkpoint(epoch):  # on all ranks after the same epoch; it is saved already
            if RANK == 0:
                print(f"stopping after epoch {epoch}: the job is about to end", flush=True)
            break
        time.sleep(args.epoch_delay)
    else:  # and not where the next attempt goes on
        if RANK == 0:
            print(
                f"final: epoch={state['epoch']} loss={state['loss']:.6f} accuracy={state['accuracy']:.4f}", flush=True
            )
    del ddp  # before its group: the last to hold a gloo group, it may wait for ever for gloo's threads (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
