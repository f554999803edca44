"""A run's spec and an attempt's facts, as tests need them: each names only what its case is about."""

from __future__ import annotations

from typing import Any

from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec


def make_spec(**changes: Any) -> RunSpec:
    """Of a run ``run`` of train.py."""
    facts: dict[str, Any] = {
        "run_id": "run",
        "uid": "0" * 32,
        "name": "x",
        "created_ns": 0,
        "entrypoint": Entrypoint(kind=EntryKind.SCRIPT, target="train.py"),
        "cwd": "/",
    }
    return RunSpec(**{**facts, **changes})


def make_attempt(**changes: Any) -> AttemptInfo:
    """The first attempt of a Slurm job on one node."""
    facts: dict[str, Any] = {"number": 0, "cluster": "slurm", "nodes": ("n1",), "batch_host": "n1", "started_ns": 0}
    return AttemptInfo(**{**facts, **changes})
