"""The FSDP example under ``hpc-elastic run``: sharded checkpoints, a killed rank, the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.training_scripts import check_that_it_resumed, run_alone, run_with_a_killed_rank

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_killed_rank_costs_a_restart_and_no_accuracy(tmp_path: Path, start_method: str) -> None:
    undisturbed = run_alone("train_fsdp.py", tmp_path / "alone")
    result = run_with_a_killed_rank("train_fsdp.py", tmp_path, moved=".metadata", start_method=start_method)
    check_that_it_resumed(result, undisturbed)
