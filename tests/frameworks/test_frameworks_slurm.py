"""The same scripts submitted to a real Slurm: Lightning and accelerate on two nodes with two workers each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.local_run import START_METHODS
from tests.rigs.slurm_cluster import SlurmCluster, missing_prerequisites
from tests.rigs.slurm_runs import SlurmRuns
from tests.rigs.training_scripts import EPOCHS, FAULTY, losses

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture(scope="module")
def cluster(frameworks_python: str) -> Iterator[SlurmCluster]:
    reasons = missing_prerequisites()
    if reasons:
        pytest.fail(f"real-Slurm tests: {'; '.join(reasons)}", pytrace=False)
    with SlurmCluster(2) as started:
        yield started


@pytest.fixture(scope="module")
def packages(cluster: SlurmCluster, frameworks_python: str) -> Path:
    """The frameworks where all nodes see them; torch is the rig's own."""
    (site,) = Path(frameworks_python).parents[1].glob("lib/python*/site-packages")
    target = Path(cluster.shared) / "frameworks"
    shutil.copytree(site, target, ignore=shutil.ignore_patterns("base.pth", "pip", "pip-*", "__pycache__"))
    return target


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize(("script", "moved"), [("train_accelerate.py", "/epoch-"), ("train_lightning.py", ".ckpt")])
def test_a_killed_rank_costs_a_restart_and_the_run_resumes(
    cluster: SlurmCluster, packages: Path, script: str, moved: str, start_method: str
) -> None:
    runs = SlurmRuns(cluster)
    faulty = runs.script(Path(FAULTY).read_text(encoding="utf-8"), "faulty.py")
    done = runs.hpc_elastic(
        *("submit", "--follow", "--nodes", "2", "-t", "20", "--nproc-per-node", "2"),
        *("--start-method", start_method, faulty, "0", moved, "3"),
        *(str(cluster.environment.examples / script), "--epochs", str(EPOCHS)),
        *("--checkpoint", str(runs.folder / "checkpoint")),
        env={"PYTHONPATH": str(packages)},
        timeout=500,
    )
    log = done.stdout
    assert done.returncode == 0, log + done.stderr
    assert "resuming after epoch 2" in log
    assert sorted(losses(log)) == list(range(1, EPOCHS + 1))
    assert re.search(rf"final: epoch={EPOCHS} ranks=4", log), "not Slurm's number of tasks, which is that of the agents"
    assert "restart 1 of 3" in log
    assert "workers are started fresh" not in log


@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_with_our_callback_it_resumes_before_a_torn_checkpoint(
    cluster: SlurmCluster, packages: Path, framework: str
) -> None:
    runs = SlurmRuns(cluster)
    runs.script((SCRIPTS / "torn.py").read_text(), "torn.py")
    script = runs.script((SCRIPTS / f"with_{framework}.py").read_text())
    done = runs.hpc_elastic(
        *("submit", "--follow", "--nodes", "2", "-t", "20", "--nproc-per-node", "1"),
        *(script, str(runs.folder / "checkpoints"), "40"),
        env={"PYTHONPATH": str(packages)},
        timeout=500,
    )
    log = done.stdout
    assert done.returncode == 0, log + done.stderr
    assert re.findall(r"resuming after step (\d+)", log) == ["0", "10"]
    assert "final: step=40 ranks=2" in log
    assert "restart 1 of 3" in log
