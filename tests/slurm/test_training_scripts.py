"""Unchanged training scripts on a real Slurm: what they find in their environment, and FSDP through a killed rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.shown_output import ROOT
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


PAGE = ROOT / "docs" / "how-to" / "from-my-sbatch.md"
HERE = {
    # What the rig's nodes have, in place of the page's cluster: no modules, no conda, two small nodes without mail.
    "module purge\n": "export PURGED=1\n",
    "module load CUDA/12.4 NCCL/2.21\n": "",
    'source "$HOME/miniconda3/etc/profile.d/conda.sh"\n': "",
    "conda activate torch24\n": "",
    "#SBATCH --account=proj-1234\n#SBATCH --partition=gpu\n": "",
    "--nodes=4": "--nodes=2",
    "--gpus-per-node=4\n#SBATCH --cpus-per-task=64\n#SBATCH --mem=480G\n#SBATCH --exclusive": "--gpus-per-node=1",
    "#SBATCH --mail-type=END,FAIL\n": "",
    "--time=24:00:00": "--time=0:10:00",
    "--nproc-per-node=4": "--nproc-per-node=1",
    "OMP_NUM_THREADS=16": "OMP_NUM_THREADS=1",
}


@pytest.mark.torch
def test_the_pages_sbatch_file_becomes_a_run_that_resumes_from_sharded_checkpoints(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    """Converted and submitted as the page says; a rank is killed while all save with FSDP."""
    (text,) = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert 58 <= len(text.splitlines()) <= 64
    faulty = runs.script(Path(FAULTY).read_text(encoding="utf-8"), "faulty.py")
    script = f"{faulty} 0 .metadata 3 {cluster.environment.examples / 'train_fsdp.py'}"
    for old, new in {**HERE, "    train_fsdp.py ": f"    {script} ", "--epochs 90": f"--epochs {EPOCHS}"}.items():
        assert old in text, old
        text = text.replace(old, new)
    runs.script(text, "train.sbatch")
    converted = runs.hpc_elastic("convert", "train.sbatch")
    assert converted.returncode == 0, converted.stderr
    assert "left to you" not in converted.stderr
    line = converted.stdout.replace("hpc-elastic submit ", "hpc-elastic submit --follow ")
    runs.script(f"SCRATCH={runs.folder}; export SCRATCH\n{line}", "submit.sh")
    run = runs.follow_file("submit.sh", timeout=240)
    assert run.done is not None
    (path,) = runs.folder.glob("logs/fsdp-7b-*.out")
    log = path.read_text(encoding="utf-8")
    assert run.done.returncode == 0, log
    assert "resuming after epoch 2" in log
    found = losses(log)
    assert sorted(found) == list(range(1, EPOCHS + 1))
    assert found[EPOCHS] < found[1] / 2
    # Twice from the same state: what the killed round printed of epoch 3, and what came of it again.
    third = re.findall(rf"epoch 3/{EPOCHS}: loss=([0-9.]+)", log)
    assert len(third) == 2
    assert float(third[0]) == pytest.approx(float(third[1]), rel=1e-3)
    killed = run.report()["attempts"][0]["rounds"][0]["failures"][0]["first"]
    assert (killed["global_rank"], killed["signal"]) == (0, "SIGKILL")
