"""Train a small network with Hugging Face accelerate: a script as for ``accelerate launch`` or torchrun.

Nothing in it knows about hpc_elastic: `Accelerator` finds RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment.
"""

import argparse
import os
import sys

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
    """The epoch that `folder`/latest names, as rank 0 sees it: another node may still see an older file."""
    found = [0]
    if accelerator.is_main_process and os.path.exists(f"{folder}/latest"):
        with open(f"{folder}/latest") as file:
            found = [int(file.read())]
    return broadcast_object_list(found)[0]


def save(accelerator, folder, epoch):
    """Model, optimizer and random states; then rank 0 says that it is whole."""
    accelerator.save_state(f"{folder}/epoch-{epoch}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(f"{folder}/latest.tmp", "w") as file:
            file.write(str(epoch))
        os.replace(f"{folder}/latest.tmp", f"{folder}/latest")


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

    done = last_checkpoint(accelerator, args.checkpoint)
    if done:
        accelerator.load_state(f"{args.checkpoint}/epoch-{done}")
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
        save(accelerator, args.checkpoint, epoch)

    say(accelerator, f"final: epoch={args.epochs} ranks={accelerator.num_processes}")
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
