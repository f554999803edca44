"""The batch side's entry: what it takes from the environment that sbatch handed on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.launch import batch as launch_batch


def test_a_job_that_a_worker_submitted_is_none_of_that_workers_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By hand, with a script or a template of its own: sbatch hands the whole environment on."""
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(launch_batch, "run_of_this_job", lambda run_dir, env: seen.append(env) or run_dir)
    monkeypatch.setattr(launch_batch, "run_batch", lambda run_dir, env: seen.append(env) or 0)
    own = {"SLURM_JOB_ID": "13", "HPC_ELASTIC_PROFILE": "big"}
    workers = {"HPC_ELASTIC_TAG": "a:host:b", "HPC_ELASTIC_NODE_TAG": "a:host", "RANK": "3", "TORCHELASTIC_RUN_ID": "a"}
    monkeypatch.setattr(os, "environ", {**own, **workers})
    assert main(["batch", str(tmp_path)]) == 0
    assert seen == [own, own]
