"""A tiny Llama that learns to count, with transformers' Trainer and our callback."""

import os
import sys
import time

import torch
from torch.utils.data import Dataset
from torn import kill_at, say
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hpc_elastic.integrations import last_whole_checkpoint
from hpc_elastic.integrations.transformers import ElasticCallback


class Counting(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 16
        return {"input_ids": ids, "labels": ids}


class Shown(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        say(f"resuming after step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            say(f"step {state.global_step}: loss={logs['loss']:.4f}")


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    kill_at("open", "checkpoint-20/trainer_state.json")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, save_steps=10,
        eval_strategy="steps", eval_steps=10, save_total_limit=3, report_to="none", use_cpu=True, disable_tqdm=True,
        seed=0,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=Counting(), eval_dataset=Counting(),
        callbacks=[Shown(), ElasticCallback()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))
    say(f"final: step={trainer.state.global_step} ranks={os.environ['WORLD_SIZE']}")


main()
