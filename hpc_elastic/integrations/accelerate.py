"""Support for training loops with `Accelerator`: heartbeats, sections, whole checkpoints, a save before the end."""

from __future__ import annotations

import os
import shutil
import time
from glob import escape, glob

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from hpc_elastic.integrations.checkpoints import last_whole_checkpoint
from hpc_elastic.worker_api.heartbeat import heartbeat, section
from hpc_elastic.worker_api.lease import commit
from hpc_elastic.worker_api.preemption import should_checkpoint


class ElasticCallback:
    """Used in the training loop, on every rank, after ``accelerator.prepare``::

        elastic = ElasticCallback(accelerator, "checkpoints", total=steps)
        for step in range(elastic.resume() + 1, steps + 1):
            ...
            if elastic.on_step_end(step, loss=loss, save=step % 500 == 0):
                break  # saved; the job is going to end, and continues from there

    Evaluate in ``with hpc_elastic.section("evaluation")``. Outside of a run it only saves and resumes.
    """

    def __init__(self, accelerator: Accelerator, folder: str | os.PathLike[str], *, total: int | None = None) -> None:
        """`folder` is shared by all nodes and gets the checkpoints, ``step-<number>``; `total` is for `hpc-elastic
        status`."""
        self._accelerator = accelerator
        self._folder = os.fspath(folder)
        self._total = total

    def resume(self) -> int:
        """Load the last whole checkpoint, the same on all ranks. Returns its step; 0 where there is none."""
        found = [last_whole_checkpoint(self._folder) if self._accelerator.is_main_process else None]
        path = broadcast_object_list(found)[0]
        if path is not None:
            self._accelerator.load_state(path)
        step = 0 if path is None else int(path.rpartition("-")[2])
        heartbeat(step, total=self._total)
        return step

    def on_step_end(self, step: int, *, loss: float | None = None, save: bool = False) -> bool:
        """Report that `step` is complete, and save where `save` says so or the job is going to end.

        Args:
            step: From 1 on, the same on all ranks.
            loss: A number; ``item()`` of a tensor waits for the GPU: give it now and then.
            save: A checkpoint is due in any case.

        Returns:
            Whether to leave the loop: the job is going to end, and the checkpoint is complete.
        """
        if loss is not None:
            heartbeat(loss=loss)
        is_ending = should_checkpoint(step)
        if save or is_ending:
            self.save(step)
        return is_ending

    def save(self, step: int) -> None:
        """Save on all ranks, into a folder that gets its name when it is whole, by `hpc_elastic.commit`."""
        accelerator, path = self._accelerator, os.path.join(self._folder, f"step-{step}")
        with section("checkpoint", step=step):
            # A name of its own: a rank that was frozen, and thaws, continues to write into its own round's folder.
            part: str = broadcast_object_list([f"{path}.{time.time_ns()}.part"])[0]
            accelerator.save_state(part)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                commit(part, path)
                for killed in glob(f"{escape(self._folder)}/step-*.part"):
                    shutil.rmtree(killed, ignore_errors=True)
