"""A callback for Lightning's ``Trainer``: heartbeats, sections, and a save where the job is going to end."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from hpc_elastic.checkpoints.folders import checkpoint_dir, latest_checkpoint
from hpc_elastic.worker_api.heartbeat import checkpoint_done, heartbeat
from hpc_elastic.worker_api.preemption import should_checkpoint

NAME = "last-before-the-end-step={step}.ckpt"
"""Name of the checkpoint that is saved before the job's end: ``ckpt_path="last"`` finds it, too."""


FILE_NAME = "lightning.ckpt"


def latest_checkpoint_file() -> str | None:
    """The file to continue from that ``ElasticCallback(save_every=…)`` has saved; None: begin from the start."""
    folder = latest_checkpoint()
    return None if folder is None else str(folder / FILE_NAME)


class ElasticCallback(Callback):
    """``Trainer(…, callbacks=[ModelCheckpoint(dirpath=…), ElasticCallback()])``: reports to the node's agent.

    Before the job ends (its time limit, a preemption, ``hpc-elastic requeue``) all ranks save after the same step,
    beside ``ModelCheckpoint``'s files, and ``fit`` returns. Sections for `--section-timeouts`: ``step``, ``evaluation``
    and ``checkpoint``. Give `fit` ``ckpt_path=last_whole_checkpoint(dirpath)``. Outside of a run it does nothing.
    """

    def __init__(self, *, save_every: int = 0) -> None:
        """`save_every`: steps between saves through `checkpoint_dir`, as ``lightning.ckpt``; also before the job ends.
        Give `fit` then ``ckpt_path=latest_checkpoint_file()``. 0: ``ModelCheckpoint`` alone saves.
        """
        self._is_ending, self._save_every, self._saved = False, save_every, -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and "save_checkpoint" not in vars(trainer):
            self._report_saves(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        heartbeat(trainer.global_step, total=int(total) if 0 < total < float("inf") else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and isinstance(outputs, dict) and "loss" in outputs:
            heartbeat(loss=float(outputs["loss"]))  # not at each step: it waits for the GPU
        if should_checkpoint(step) and not self._is_ending:
            self._is_ending = trainer.should_stop = True
            # The time that is left is for the checkpoint; and without these fit would not stop.
            trainer.limit_val_batches = 0
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            saver = trainer.checkpoint_callback
            folder = (saver and saver.dirpath) or trainer.default_root_dir
            if not self._save_every:
                trainer.save_checkpoint(os.path.join(folder, NAME.format(step=step)))
        is_due = step != self._saved and self._save_every and (step % self._save_every == 0 or self._is_ending)
        if is_due:
            self._saved = step
            with checkpoint_dir(step) as folder:
                trainer.save_checkpoint(folder / FILE_NAME)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        heartbeat(section="evaluation")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        heartbeat(section="evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        heartbeat()

    def _report_saves(self, trainer: Any) -> None:
        # An asynchronous save is reported when it is written.
        save, storage = trainer.save_checkpoint, trainer.strategy.checkpoint_io
        is_async = isinstance(storage, AsyncCheckpointIO) and trainer.is_global_zero

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            step = trainer.global_step
            heartbeat(section="checkpoint")
            save(*args, **kwargs)
            if not is_async:
                checkpoint_done(step)
            heartbeat()

        trainer.save_checkpoint = save_checkpoint
        if is_async:
            write = storage.checkpoint_io.save_checkpoint

            def write_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
                write(checkpoint, *args, **kwargs)
                checkpoint_done(checkpoint["global_step"])

            storage.checkpoint_io.save_checkpoint = write_checkpoint
