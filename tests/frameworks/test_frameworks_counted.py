"""Frameworks' own loops in scripts that import nothing of this project: their optimizer's steps are counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.training_scripts import PATIENCE

_HEAD = """
import torch
data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(160)]
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": ((self.net(x) - labels) ** 2).mean()}
"""
_LOOPS = {
    "accelerate": """
from accelerate import Accelerator
accelerator, model = Accelerator(gradient_accumulation_steps=2, cpu=True), Model()
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
print("steps", 20)
""",
    "lightning": """
import lightning
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, batch, index):
        return self.model(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=2,
                            logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=2))
print("steps", trainer.global_step)
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
settings = TrainingArguments(output_dir="out", max_steps=30, per_device_train_batch_size=2, use_cpu=True,
                             gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=Model(), args=settings, train_dataset=data)
trainer.train()
print("steps", trainer.state.global_step)
""",
}


@pytest.mark.parametrize("framework", list(_LOOPS))
def test_its_steps_are_counted(framework: str, tmp_path: Path, frameworks_python: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(_HEAD + _LOOPS[framework])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environ = {"HF_HOME": str(scratch), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    command = ("--no-python", frameworks_python, "-u", str(script))
    with LocalRun(tmp_path, "", nproc=2, nodes=1, interpreter=command, environ=environ) as run:
        assert run.finish(within=PATIENCE) == 0, run.log()
        (steps,) = {int(text) for text in re.findall(r"\bsteps (\d+)", run.log())}
        (stopped,) = run.events("workers_stopped")
        assert stopped["progress"]["counted_steps"] == steps >= 20
