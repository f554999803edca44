"""Unchanged training scripts on a real Slurm: what they find in their environment, and FSDP through a killed rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import SlurmRuns
from tests.rigs.training_scripts import EPOCHS, FAULTY, losses

# As scripts and libraries do that were written for one srun task per worker.
ASKS_SLURM = """
import os
asked = [int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")]
true = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")]
print("asked", *asked, "true", *true)
"""


def test_a_script_that_asks_slurm_for_its_rank_is_told_the_workers(runs: SlurmRuns) -> None:
    run = runs.submit_and_follow("--nodes", "2", "-t", "10", "--nproc-per-node", "2", runs.script(ASKS_SLURM))
    assert run.done.returncode == 0, run.log
    found = {tuple(map(int, line)) for line in re.findall(r"asked (\d) (\d) (\d) (\d) true \1 \2 \3 \4", run.log)}
    assert found == {(0, 4, 0, 0), (1, 4, 1, 0), (2, 4, 0, 1), (3, 4, 1, 1)}, run.log


@pytest.mark.torch
def test_fsdp_goes_on_from_its_sharded_checkpoint(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    faulty = runs.script(Path(FAULTY).read_text(encoding="utf-8"), "faulty.py")
    example = str(cluster.environment.examples / "train_fsdp.py")
    run = runs.submit_and_follow(
        *("--nodes", "2", "-t", "10", "--nproc-per-node", "1", faulty, "0", ".metadata", "3", example),
        *("--epochs", str(EPOCHS), "--checkpoint", str(runs.folder / "checkpoint")),
        timeout=240,
    )
    assert run.done.returncode == 0, run.log
    assert "resuming after epoch 2" in run.log
    found = losses(run.log)
    assert sorted(found) == list(range(1, EPOCHS + 1))
    assert found[EPOCHS] < found[1] / 2
    # Twice from the same state: what the killed round printed of epoch 3, and what came of it again.
    third = re.findall(rf"epoch 3/{EPOCHS}: loss=([0-9.]+)", run.log)
    assert len(third) == 2
    assert float(third[0]) == pytest.approx(float(third[1]), rel=1e-3)
    killed = run.report()["attempts"][0]["rounds"][0]["failures"][0]["first"]
    assert (killed["global_rank"], killed["signal"]) == (0, "SIGKILL")
