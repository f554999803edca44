"""The example of the in-process restart group: on 4 ranks, of which one is killed, under agents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.inprocess_ranks import free_ports

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "train_in_process.py"
pytestmark = pytest.mark.torch


def final_loss(output: str) -> float:
    (found,) = re.findall(r"final: steps=30 loss=([0-9.]+)", output)
    return float(found)


def starts(output: str) -> set[tuple[int, int, int, int]]:
    """Iteration, rank, world size and pid of each start."""
    pattern = r"start (\d+): rank (\d+) of (\d+), process (\d+)"
    return {(int(i), int(rank), int(size), int(pid)) for i, rank, size, pid in re.findall(pattern, output)}


def alone(folder: Path) -> float:
    """The loss of one process without any launcher: nothing is restarted."""
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(folder / "alone")]
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return final_loss(result.stdout)


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_killed_rank_is_replaced_and_the_loss_is_that_of_an_undisturbed_run(
    tmp_path: Path, start_method: str
) -> None:
    command = [sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", "2"]
    command += ["--nproc-per-node", "2", "--restart-policy", "in-process", "--runs-dir", str(tmp_path / "runs")]
    command += ["--start-method", start_method, str(SCRIPT), "--checkpoint", str(tmp_path / "ring")]
    command += ["--fail-rank", "2", "--fail-step", "12", "--fail-how", "kill"]
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert final_loss(result.stdout) == pytest.approx(alone(tmp_path), rel=1e-4)
    found = starts(result.stdout)
    before = {rank: pid for iteration, rank, size, pid in found if iteration == 0}
    last = max(iteration for iteration, *_ in found)
    after = {rank: pid for iteration, rank, size, pid in found if iteration == last}
    assert sorted(before) == sorted(after) == [0, 1, 2, 3]
    assert {rank for rank in before if before[rank] != after[rank]} == {2}, "the others keep their processes"
    assert "fresh process in place of rank 2" in result.stdout, "in the report"
