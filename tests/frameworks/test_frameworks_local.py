"""Unchanged scripts of accelerate and Lightning under ``hpc-elastic run``: a killed rank, a resume, the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_rehearse import rehearse_example
from tests.rigs.local_run import START_METHODS
from tests.rigs.training_scripts import (
    EXAMPLES,
    PATIENCE,
    check_that_it_resumed,
    run_alone,
    run_with_a_killed_rank,
    submit_with_a_killed_rank,
)

MOVED = {"train_accelerate.py": "/epoch-", "train_lightning.py": ".ckpt"}
"""What completes a checkpoint by being moved into place."""


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("script", sorted(MOVED))
def test_a_killed_rank_costs_a_restart_and_the_run_resumes(
    script: str, start_method: str, tmp_path: Path, frameworks_python: str
) -> None:
    undisturbed = run_alone(script, tmp_path / "alone", python=frameworks_python)
    result = run_with_a_killed_rank(
        script, tmp_path, moved=MOVED[script], python=frameworks_python, start_method=start_method
    )
    _check(script, result, undisturbed)


@pytest.mark.parametrize("script", ["train_fsdp.py", *sorted(MOVED)])
def test_the_same_scripts_submitted_by_a_program(script: str, tmp_path: Path, frameworks_python: str) -> None:
    """By `ElasticExecutor`; train_digits.py too, in tests/integration."""
    undisturbed = run_alone(script, tmp_path / "alone", python=frameworks_python)
    moved = MOVED.get(script, ".metadata")
    result = submit_with_a_killed_rank(script, tmp_path, moved=moved, python=frameworks_python)
    _check(script, result, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(MOVED))
def test_the_same_scripts_hold_in_a_rehearsal(script: str, tmp_path: Path, frameworks_python: str) -> None:
    rehearse_example(tmp_path, script, "--epochs", "60", options=("--python", frameworks_python))


def _check(script: str, result: subprocess.CompletedProcess[str], undisturbed: dict[int, float]) -> None:
    if script == "train_lightning.py":
        # Its sampler gives each rank other samples than one process alone: the epochs are compared, not the losses.
        assert result.returncode == 0, result.stdout + result.stderr
        assert "resuming after epoch 2" in result.stdout
        assert "final: epoch=4 ranks=2" in result.stdout
        assert "restart 1 of 3" in result.stdout
    else:
        check_that_it_resumed(result, undisturbed)


def test_lightning_in_a_slurm_job_takes_the_workers_for_the_world(tmp_path: Path, frameworks_python: str) -> None:
    """Two workers on the one node of an allocation, where SLURM_NTASKS is 1; Slurm's own plugin asked for by name."""
    script = tmp_path / "train.py"
    script.write_text(
        "import lightning, os, sys\n"
        "from lightning.fabric.plugins.environments import SLURMEnvironment\n"
        "trainer = lightning.Trainer(accelerator='cpu', devices=2, strategy='ddp', logger=False,\n"
        "    enable_checkpointing=False, plugins=[SLURMEnvironment(auto_requeue=False)] if sys.argv[1:] else [])\n"
        "print('world', trainer.world_size, 'rank', trainer.global_rank, 'local', trainer.local_rank, flush=True)\n"
        "assert (trainer.world_size, trainer.global_rank) == (2, int(os.environ['RANK']))\n"
    )
    task = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    task |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1"}
    task |= {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    for arguments in ([], ["by-slurm"]):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nproc-per-node", "2"),
                *("--max-restarts", "0", "--max-requeues", "0"),
                *("--python", frameworks_python, "--runs-dir", str(tmp_path / "runs"), str(script), *arguments),
            ],
            env={**os.environ, **task}, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        for rank in (0, 1):
            assert f"world 2 rank {rank} local {rank}" in result.stdout


def test_accelerate_finds_its_own_variables(tmp_path: Path, frameworks_python: str) -> None:
    """What ``accelerate launch`` would set, and a user exports instead."""
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "a = Accelerator(cpu=True)\n"
        "print('ranks', a.num_processes, 'rank', a.process_index, a.mixed_precision, a.gradient_accumulation_steps,\n"
        "      flush=True)\n"
    )
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    result = subprocess.run(
        [
            *(sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nproc-per-node", "2"),
            *("--max-restarts", "0", "--max-requeues", "0"),
            *("--python", frameworks_python, "--runs-dir", str(tmp_path / "runs"), str(script)),
        ],
        env=env, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in (0, 1):
        assert f"ranks 2 rank {rank} bf16 4" in result.stdout


def test_the_examples_are_all_run_by_some_test() -> None:
    assert {path.name for path in EXAMPLES.glob("train_*.py")} == {
        "train_digits.py", "train_fsdp.py", "train_in_process.py", *MOVED,
    }  # fmt: skip
