"""Our callbacks in scripts of transformers, Lightning and accelerate: killed in mid-save, preempted, resumed, ended."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.training_scripts import PATIENCE

SCRIPTS = Path(__file__).with_name("scripts")
STEPS = 200
TORN = {"transformers": "checkpoint-20", "lightning": "epoch=1-step=20.ckpt", "accelerate": "step-20.part"}
"""What the kill in the second save leaves: half a checkpoint."""


@pytest.mark.parametrize(
    ("framework", "arguments"), [("transformers", ()), ("lightning", ()), ("lightning", ("async",)), ("accelerate", ())]
)
def test_it_resumes_before_a_torn_checkpoint_and_at_the_agreed_step(
    framework: str, arguments: tuple[str, ...], tmp_path: Path, frameworks_python: str
) -> None:
    script = SCRIPTS / f"with_{framework}.py"
    checkpoints = tmp_path / "checkpoints"
    command = [frameworks_python, "-u", str(script), str(checkpoints), str(STEPS), *arguments]
    scratch = tmp_path / "scratch"  # a save that is killed leaves a file there
    scratch.mkdir()
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "HF_HOME": str(scratch), "TMPDIR": str(scratch)}
    with LocalRun(
        tmp_path, "", nproc=2, nodes=1, interpreter=("--no-python", *command), options=("--max-requeues", "1"),
        environ=caches,
    ) as run:  # fmt: skip
        run.until(lambda: "step 25:" in run.log(), "round after the kill", within=PATIENCE)
        assert "resuming after step 10" in run.log(), "of the two, step 20's was torn"
        assert (checkpoints / TORN[framework]).exists() or framework == "accelerate", "nothing had been torn"
        run.signal(signal.SIGUSR2)
        assert run.finish(within=PATIENCE) == 0
    log = run.log()
    agreed = re.search(r"saved in \d+ of \d+ s \(step (\d+)\)", log)
    assert agreed is not None, log
    assert [int(step) for step in re.findall(r"resuming after step (\d+)", log)] == [0, 10, int(agreed[1])]
    assert f"final: step={STEPS} ranks=2" in log
    _check_losses(log, are_the_same=framework != "lightning")  # which begins an epoch's data anew
    status = {rank["rank"]: rank for rank in _heartbeats(run)["ranks"]}
    assert (status[0]["step"], status[0]["saved_step"]) == (STEPS, STEPS)
    assert _heartbeats(run)["loss"] is not None
    seen = set(_heartbeats(run)["progress"]["sections"])
    assert {"step", "checkpoint"} <= seen
    assert framework == "accelerate" or "evaluation" in seen


def _check_losses(log: str, *, are_the_same: bool) -> None:
    """What was done again came out as before: model, optimizer and the data's order were all resumed."""
    found: dict[int, float] = {}
    again = 0
    for step, loss in re.findall(r"step (\d+): loss=([0-9.]+)", log):
        again += int(step) in found
        first = found.setdefault(int(step), float(loss))
        assert not are_the_same or first == pytest.approx(float(loss), rel=1e-3, abs=2e-4), step
    assert again >= 5
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < 0.7 * found[1], "it does not learn"


def _heartbeats(run: LocalRun) -> dict[str, Any]:
    return json.loads(run.attempt(1).heartbeats(0).read_text())  # type: ignore[no-any-return]


ON_NODE = {
    "transformers": (
        ("last_whole_checkpoint(folder)", "hpc_elastic.latest_checkpoint()"),
        ("ElasticCallback()", "ElasticCallback(on_node=True)"),
        ("import os\n", "import os\nimport hpc_elastic\n"),
    ),
    "lightning": (
        ("last_whole_checkpoint(folder)", "latest_checkpoint_file()"),
        ("ElasticCallback()", "ElasticCallback(save_every=10)"),
        ("ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1), ", ""),
        ("logger=False,", "logger=False, enable_checkpointing=False,"),
        ("import ElasticCallback\n", "import ElasticCallback, latest_checkpoint_file\n"),
        ('kill_at("os.rename", "step=20.ckpt")', 'kill_at("open", "step-20/lightning.ckpt")'),
    ),
    "accelerate": (
        (
            "done = elastic.resume()",
            "found = hpc_elastic.latest_checkpoint()\n    done = int(found.name[5:]) if found else 0\n"
            "    if found:\n        accelerator.load_state(found)",
        ),
        (
            "if elastic.on_step_end(step, loss=loss.item(), save=step % 10 == 0):\n            return",
            "if step % 10 == 0:\n            with hpc_elastic.checkpoint_dir(step) as place:\n"
            "                accelerator.save_state(place)",
        ),
        ('"/step-20." in folder', 'str(folder).endswith("/step-20")'),
        ("import sys\n", "import sys\nimport hpc_elastic\n"),
    ),
}
"""What a script says in place of what, for checkpoints on the nodes."""


@pytest.mark.parametrize("framework", list(ON_NODE))
def test_checkpoints_on_the_nodes_are_resumed(framework: str, tmp_path: Path, frameworks_python: str) -> None:
    text = (SCRIPTS / f"with_{framework}.py").read_text()
    for old, new in ON_NODE[framework]:
        assert old in text
        text = text.replace(old, new, 1)
    script = tmp_path / "train_on_node.py"
    script.write_text(text)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "HF_HOME": str(scratch), "TMPDIR": str(scratch)}
    environ["PYTHONPATH"] = f"{SCRIPTS.parents[2]}:{SCRIPTS}"
    with LocalRun(
        tmp_path, "", nproc=1, nodes=2,
        interpreter=("--no-python", frameworks_python, "-u", str(script), str(tmp_path / "own"), "60"),
        options=("--checkpoint-dir", str(tmp_path / "saved")), environ=environ,
    ) as run:  # fmt: skip
        assert run.finish(within=PATIENCE) == 0, run.log_tail()
    assert re.findall(r"resuming after step (\d+)", run.log()) == ["0", "10"]
    assert "final: step=60 ranks=2" in run.log()
    assert run.events("checkpoint_committed")[-1]["step"] == 60
