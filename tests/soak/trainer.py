"""What the soak trains: least squares with DistributedDataParallel, in double precision.

``python trainer.py FOLDER [--pace SECONDS] [--last STEP] [--through-nodes]``. It is convex, and a batch is the same for
any number of ranks, so what interrupts it changes the losses by rounding alone; the checkpoint holds the sum of all
steps' losses, so a step that was left out or counted twice shows. FOLDER has the checkpoint, a journal per process,
faults that are planted for a rank (``plant/<rank>``), and the file ``end``, which ends the training after the next
step.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path

import hpc_elastic

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PLACE = {
    "attempt": int(os.environ.get("HPC_ELASTIC_ATTEMPT", "0")),
    "round": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
}
SAVE_EVERY = 5
PAD = 50_000
BATCH = 24


class Journal:
    """What this process has done, line by line; a full disk is no reason to stop."""

    def __init__(self, folder):
        name = f"{PLACE['attempt']:03d}-{PLACE['round']:03d}-{RANK:03d}-{os.uname().nodename}-{os.getpid()}.jsonl"
        self._path = folder / "journal" / name
        self._fd = None

    def note(self, **facts):
        line = json.dumps({"t": time.time(), **PLACE, **facts}).encode() + b"\n"
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._fd, line)
        except OSError as error:
            print(f"rank {RANK}: journal: {error}", flush=True)


def planted(folder, journal):
    """The fault that waits for this rank, once."""
    path = folder / "plant" / str(RANK)
    try:
        kind = path.read_text()
        path.unlink()
    except OSError:
        return
    journal.note(planted=kind, rank=RANK, pid=os.getpid(), node=os.uname().nodename)
    print(f"rank {RANK}: a planted {kind}", flush=True)
    if kind == "exception":
        raise RuntimeError("a planted exception")
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "hang":
        with hpc_elastic.section("load"):
            time.sleep(3600)


def save(folder, state):
    """Whole or not at all; what can't be saved now is saved a few steps later."""
    import torch

    try:
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")
    except (OSError, RuntimeError) as error:
        print(f"rank {RANK}: not saved: {error}", flush=True)
        return False
    return True


def load_through_nodes():
    """What this rank saved, or rank 0 where there was no such rank. A file that is not whole ends the worker."""
    import torch

    place = hpc_elastic.latest_checkpoint()
    if place is None:
        return None
    own = place / f"rank{RANK}.pt"
    state = torch.load(own if own.exists() else place / "rank0.pt", weights_only=True)
    assert place.name == f"step-{state['step']}", f"{place} has step {state['step']}"
    assert len(state["pad"]) == PAD, f"{own} is not whole"
    assert (state["pad"] == state["step"]).all(), f"{own} is not whole"
    return state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--last", type=int, default=1 << 60)
    parser.add_argument("--through-nodes", action="store_true", help="all ranks save in hpc_elastic.checkpoint_dir")
    args = parser.parse_args()
    journal = Journal(args.folder)

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = torch.Generator().manual_seed(1)
    x = torch.randn(512, 8, generator=data, dtype=torch.float64)
    y = x @ torch.arange(1.0, 9.0, dtype=torch.float64) + torch.randn(512, generator=data, dtype=torch.float64)
    model = torch.nn.Linear(8, 1).double()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    found = [None]
    if args.through_nodes:
        found = [load_through_nodes()]
    elif RANK == 0 and (args.folder / "checkpoint.pt").exists():
        found = [torch.load(args.folder / "checkpoint.pt", weights_only=True)]
    if not args.through_nodes:
        dist.broadcast_object_list(found, src=0)
    step, loss_sum = 0, 0.0
    if found[0] is not None:
        model.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
        step, loss_sum = found[0]["step"], found[0]["loss_sum"]
    ddp = DistributedDataParallel(model)
    journal.note(began=step, rank=RANK, world=WORLD_SIZE, node=os.uname().nodename, pid=os.getpid())

    def checkpoint():
        state = {"step": step, "loss_sum": loss_sum, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if args.through_nodes:
            with hpc_elastic.checkpoint_dir(step) as place:
                assert not (place / f"rank{RANK}.pt").exists(), "an empty folder"
                torch.save({**state, "pad": torch.full((PAD,), step)}, place / f"rank{RANK}.pt")
            journal.note(saved=step)
            return
        with hpc_elastic.section("checkpoint"):
            is_saved = save(args.folder, state)
        if is_saved:
            journal.note(saved=step)

    is_last, saves = False, args.through_nodes or RANK == 0
    while not is_last:
        step += 1
        batch = torch.randint(512, (BATCH,), generator=torch.Generator().manual_seed(step))
        mine = batch[RANK::WORLD_SIZE]
        loss = ((ddp(x[mine]).squeeze(1) - y[mine]) ** 2).sum()
        optimizer.zero_grad()
        (loss * WORLD_SIZE / BATCH).backward()  # DDP averages over the ranks: the batch's mean gradient
        optimizer.step()
        ends = RANK == 0 and (step >= args.last or (args.folder / "end").exists())
        sums = torch.tensor([loss.item() / BATCH, float(ends)], dtype=torch.float64)
        dist.all_reduce(sums)
        loss_sum, is_last = loss_sum + sums[0].item(), sums[1].item() > 0
        if RANK == 0:
            journal.note(step=step, loss=sums[0].item())
        if hpc_elastic.should_checkpoint(step) and not is_last:
            journal.note(notice=True)
            if saves:
                checkpoint()
            return
        if saves and (is_last or step % SAVE_EVERY == 0):
            checkpoint()
        planted(args.folder, journal)
        time.sleep(args.pace)
    if RANK == 0:
        journal.note(final=step, loss_sum=loss_sum)
        print(f"final: step={step} loss_sum={loss_sum!r}", flush=True)
    del ddp  # the group's last holder must not be DDP: see docs/how-to/train-with.md
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
