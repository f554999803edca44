"""A callback for transformers' ``Trainer``: heartbeats, sections, and a save where the job is going to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hpc_elastic.checkpoints.folders import checkpoint_dir, move_files, node_folder
from hpc_elastic.worker_api.heartbeat import checkpoint_done, heartbeat
from hpc_elastic.worker_api.preemption import should_checkpoint


class ElasticCallback(TrainerCallback):
    """``Trainer(…, callbacks=[ElasticCallback()])``: reports steps, losses and checkpoints to the node's agent.

    Before the job ends (its time limit, a preemption, ``hpc-elastic requeue``) all ranks save after the same step, and
    ``train()`` returns. Sections for `--section-timeouts`: ``step``, ``evaluation`` and ``checkpoint``. Give `train`
    ``resume_from_checkpoint=last_whole_checkpoint(output_dir)``. Outside of a run it does nothing.
    """

    def __init__(self, *, on_node: bool = False) -> None:
        """`on_node`: the ``Trainer`` saves on the node, and each checkpoint goes through `checkpoint_dir`. Give `train`
        then ``resume_from_checkpoint=latest_checkpoint()``; ``load_best_model_at_end`` does not work with it.
        """
        self._is_ending, self._on_node = False, on_node

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._on_node:
            args.output_dir = str(node_folder("trainer") or args.output_dir)
        heartbeat(state.global_step, total=state.max_steps if state.max_steps > 0 else None)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        heartbeat()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if should_checkpoint(state.global_step):
            self._is_ending = control.should_training_stop = control.should_save = True
            control.should_evaluate = False  # the time that is left is for the checkpoint
        self._begin_section(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_ending:
            control.should_evaluate = control.should_save = False
        self._begin_section(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if isinstance(loss, int | float):
            heartbeat(loss=loss)
            self._begin_section(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        heartbeat(section="evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        heartbeat(section="checkpoint" if control.should_save else None)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._on_node:
            with checkpoint_dir(state.global_step) as folder:
                move_files(Path(args.output_dir, f"checkpoint-{state.global_step}"), folder)
        checkpoint_done(state.global_step)
        heartbeat()

    def _begin_section(self, control: Any) -> None:
        # The Trainer evaluates before it saves.
        if control.should_evaluate or control.should_save:
            heartbeat(section="evaluation" if control.should_evaluate else "checkpoint")
