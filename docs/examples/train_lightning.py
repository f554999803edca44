"""Train a small network with Lightning: a script as for torchrun.

Lightning's `TorchElasticEnvironment` finds the ranks in the environment, inside of a Slurm job too. One line knows
about hpc_elastic: `last_whole_checkpoint` finds the newest checkpoint by the step in its name. A ``last.ckpt``
(`save_last`) may go back: a node that was frozen while it saved, and thaws, writes an older one over it.
"""

import argparse
import os
import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.integrations import last_whole_checkpoint


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small network with Lightning")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", default="lightning-checkpoint", help="a folder that all nodes see")
    return parser.parse_args()


def make_data():
    """The same on every rank: 512 points of a function of 16 variables."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_start(self):
        if self.trainer.is_global_zero and self.trainer.current_epoch:
            print(f"resuming after epoch {self.trainer.current_epoch}", flush=True)

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"].item()
            print(f"epoch {self.trainer.current_epoch + 1}/{self.trainer.max_epochs}: loss={loss:.6f}", flush=True)


def main():
    args = parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="auto",
        # What the launcher started, on however many nodes are left: Lightning checks that the product is WORLD_SIZE.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(dirpath=args.checkpoint, save_top_k=2, monitor="step", mode="max")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # 64 samples for all ranks together.
    loader = DataLoader(make_data(), batch_size=64 // world_size)
    trainer.fit(Model(), loader, ckpt_path=last_whole_checkpoint(args.checkpoint))
    if trainer.is_global_zero:
        print(f"final: epoch={trainer.current_epoch} ranks={trainer.world_size}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
