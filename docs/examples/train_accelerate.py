"""Train a small network with Hugging Face accelerate: a script as for ``accelerate launch`` or torchrun.

Nothing in it knows about hpc_elastic: `Accelerator` finds RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small network with accelerate")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", default="accelerate-checkpoint", help="a folder that all nodes see")
    return parser.parse_args()


def make_data():
    """The same on every rank: 512 points of a function of 16 variables."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def last_checkpoint(accelerator, folder):
    """The newest checkpoint that is whole, as rank 0 sees it (another node may still see an older one); and the time.

    The time goes into the names of what this start saves: no two starts write to one folder, not even where a rank was
    frozen while it saved, and thaws when the others have saved that epoch again.
    """
    whole = [str(path) for path in Path(folder).glob("epoch-*[0-9]")] if accelerator.is_main_process else []
    return broadcast_object_list([max(whole, default=""), time.time_ns()])


def save(accelerator, path):
    """Model, optimizer and random states; then rank 0 gives the folder the name of one that is whole."""
    accelerator.save_state(f"{path}.part")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(f"{path}.part", path)


def say(accelerator, text):
    """On rank 0 alone; `accelerator.print` is for one rank of each node."""
    if accelerator.is_main_process:
        print(text, flush=True)


def main():
    args = parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    os.makedirs(args.checkpoint, exist_ok=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # 64 samples for all ranks together.
    loader = DataLoader(make_data(), batch_size=64 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    last, started = last_checkpoint(accelerator, args.checkpoint)
    done = int(Path(last).name.split("-")[1]) if last else 0
    if done:
        accelerator.load_state(last)
        say(accelerator, f"resuming after epoch {done} from {args.checkpoint}")

    for epoch in range(done + 1, args.epochs + 1):
        losses = []
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        say(accelerator, f"epoch {epoch}/{args.epochs}: loss={mean:.6f}")
        save(accelerator, f"{args.checkpoint}/epoch-{epoch:04d}-{started}")

    say(accelerator, f"final: epoch={args.epochs} ranks={accelerator.num_processes}")
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
