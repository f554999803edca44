"""The examples of docs/examples as a test runs them: alone, and under ``hpc-elastic run`` with a rank killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.submission import ElasticExecutor, ElasticJob, Script
from tests.rigs.inprocess_ranks import free_ports
from tests.rigs.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
FAULTY = ROOT / "tests" / "rigs" / "faulty_script.py"
SYNTHETIC = str(ROOT / "tests" / "rigs" / "synthetic_training.py")
"""Takes an example's place: nothing but torch, and ``--device``, ``--backend``."""
EPOCHS = 4
PATIENCE = 420.0
"""Seconds for a run with two starts of torch, on a machine that is busy with much else."""


def losses(output: str) -> dict[int, float]:
    """Epoch → the loss that was printed of it last."""
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d+)/\d+: loss=([0-9.]+)", output)}


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def output_alone(script: str, checkpoint: Path, *arguments: str, python: str = sys.executable) -> str:
    """What one process prints without any launcher: nothing is restarted."""
    env = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports()), "PYTHONPATH": _path(),
    }  # fmt: skip
    result = subprocess.run(
        [python, str(EXAMPLES / script), "--checkpoint", str(checkpoint), *arguments],
        env=env, cwd=checkpoint.parent, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_alone(
    script: str, checkpoint: Path, *, arguments: Sequence[str] = (), python: str = sys.executable
) -> dict[int, float]:
    """The losses of one process without any launcher."""
    found = losses(output_alone(script, checkpoint, "--epochs", str(EPOCHS), *arguments, python=python))
    assert sorted(found) == list(range(1, EPOCHS + 1))
    return found


def run_with_a_killed_rank(
    script: str,
    folder: Path,
    *,
    moved: str,
    arguments: Sequence[str] = (),
    python: str = sys.executable,
    start_method: str = "spawn",
) -> subprocess.CompletedProcess[str]:
    """Two local nodes; rank 0 is killed as it is about to say that the checkpoint of epoch 3 is whole.

    `moved` is part of the name of the file whose moving into place completes one. Workers that should be forks and are
    not are a failure.
    """
    result = subprocess.run(
        [
            *(sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", "2", "--python", python),
            *("--start-method", start_method, "--runs-dir", str(folder / "runs")),
            *(str(FAULTY), "0", moved, "3", str(EXAMPLES / script)),
            *("--epochs", str(EPOCHS), "--checkpoint", str(folder / "checkpoint"), *arguments),
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": _path()}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert "workers are started fresh" not in result.stdout
    assert result.stdout.count("the fork server is ready") >= 2 * (start_method == "forkserver"), result.stdout
    return result


def submit_with_a_killed_rank(
    script: str, folder: Path, *, moved: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """The same with `ElasticExecutor`. Returns what rank 0 printed, and the report."""
    executor = ElasticExecutor(folder / "jobs", cluster="local", python=python)
    executor.update_parameters(nodes=2, timeout_min=60)
    arguments = ("0", moved, "3", EXAMPLES / script, "--epochs", EPOCHS, "--checkpoint", folder / "checkpoint")
    job: ElasticJob[None] = executor.submit(Script(FAULTY), *arguments)
    return of_job(job)


def of_job(job: ElasticJob[None]) -> subprocess.CompletedProcess[str]:
    """A job's end, as if it were a command's; cancelled where it takes too long."""
    try:
        until(job.done, lambda: f"its end\n{job.log()}\n{job.stdout()}\n{job.stderr()}", seconds=PATIENCE, every=0.1)
        error: Any = job.exception()
    finally:
        if not job.done():
            job.cancel()
    report = until(job.report, "its report, written just after the end is", every=0.1)
    said = f"{job.task(0).stdout()}\n{report}\n"
    return subprocess.CompletedProcess(args=[], returncode=int(error is not None), stdout=said, stderr=f"{error}")


def check_that_it_resumed(result: subprocess.CompletedProcess[str], undisturbed: dict[int, float]) -> None:
    """Killed once, started again from epoch 2's checkpoint, to the same losses."""
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after epoch 2" in result.stdout
    assert "epoch 3/4" in result.stdout.split("resuming after", 1)[1]
    assert losses(result.stdout) == pytest.approx(undisturbed, rel=1e-3)
    report = result.stdout.split("Root Cause (first observed failure)", 1)[1]
    # Not "Root Cause", which is the last failure: Python's end may be another one (torch's, see train_fsdp.py).
    assert re.search(r"round 0: .*: rank 0 on \S+: Signal 9 \(SIGKILL\)", report), report
    assert re.search(r"restart [12] of 3", report), report
