"""A run's spec, an attempt's facts and a round's record, as tests need them: each names only what its case is about."""

from __future__ import annotations

from typing import Any

from hpc_elastic.rendezvous.state import Member, RoundRecord, Status
from hpc_elastic.run.paths import AttemptInfo, AttemptPaths, StoredResult
from hpc_elastic.run.spec import EntryKind, Entrypoint, RunSpec


def make_spec(**changes: Any) -> RunSpec:
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
    facts: dict[str, Any] = {"number": 0, "cluster": "slurm", "nodes": ("n1",), "batch_host": "n1", "started_ns": 0}
    return AttemptInfo(**{**facts, **changes})


def make_record(**changes: Any) -> RoundRecord:
    """A round of two nodes with two workers each, which has begun."""
    facts: dict[str, Any] = {"number": 5, "epoch": "e", "term": 1, "leader": "a", "round": 2, "status": Status.FINAL}
    return RoundRecord(**{**facts, "members": (Member("a", 0, 2), Member("b", 1, 2)), **changes})


def store_result(attempt: AttemptPaths, code: int, **changes: Any) -> StoredResult:
    """The end of an attempt, where its supervisor writes it."""
    facts: dict[str, Any] = {"outcome": "failed", "reason": "", "exit_code": code, "action": "end", "decision": ""}
    result = StoredResult(**{**facts, **changes})
    attempt.root.mkdir(exist_ok=True)
    result.save(attempt.result_json)
    return result
