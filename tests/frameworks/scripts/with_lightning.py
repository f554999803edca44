"""A small network with Lightning's Trainer, its ModelCheckpoint and our callback; "async": with an asynchronous one."""

import os
import sys
import time

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torn import kill_at, say

from hpc_elastic.integrations import last_whole_checkpoint
from hpc_elastic.integrations.lightning import ElasticCallback


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Shown(Callback):
    def on_train_start(self, trainer, module):
        say(f"resuming after step {trainer.global_step}")

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        say(f"step {trainer.global_step}: loss={outputs['loss'].item():.4f}")
        time.sleep(0.05)


def main():
    folder, steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    kill_at("os.rename", "step=20.ckpt")
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_steps=steps, min_epochs=3, logger=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1), Shown(), ElasticCallback()],
        plugins=[AsyncCheckpointIO()] if kind else [], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loaders = [DataLoader(data, batch_size=16) for _ in range(2)]
    trainer.fit(Model(), *loaders, ckpt_path=last_whole_checkpoint(folder))
    say(f"final: step={trainer.global_step} ranks={trainer.world_size}")


main()
