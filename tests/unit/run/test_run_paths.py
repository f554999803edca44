"""Names in a run directory, made and read back; and result.json: how an attempt ended, for whoever reads it later."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.run.paths import (
    AttemptPaths,
    RunPaths,
    StoredResult,
    attempt_number,
    load_result,
    rank_index,
    round_index,
)


def test_the_layout() -> None:
    root = "/runs/20261121-053000-train-9f3c"
    run = RunPaths(Path(root))
    attempt = run.attempt(2)
    rank = attempt.rank(7, 12)
    assert run.run_id == "20261121-053000-train-9f3c"
    found = (run.run_json, run.secret, run.script, run.job_log, run.latest, attempt.root, attempt.attempt_json)
    found += (attempt.store, attempt.events, attempt.report_json, attempt.report_text, rank.root)
    assert [str(path) for path in found] == [
        *(f"{root}/{name}" for name in ("run.json", "secret", "job.sbatch", "job.log", "latest", "attempt-002")),
        *(f"{root}/attempt-002/{name}" for name in ("attempt.json", "store", "events", "report.json", "report.txt")),
        f"{root}/attempt-002/round-007/rank-00012",
    ]
    names = [path.name for path in (rank.stdout, rank.stderr, rank.error_file, rank.stacks)]
    assert names == ["stdout.log", "stderr.log", "error.json", "stacks.txt"]


@pytest.mark.parametrize("number", [0, 7, 999, 1000, 123456])
def test_names_read_back_as_their_numbers(number: int) -> None:
    attempt = RunPaths(Path("/r")).attempt(number)
    assert attempt_number(attempt.root.name) == attempt.number == number
    assert round_index(attempt.round_dir(number).name) == number
    assert rank_index(attempt.rank(0, number).root.name) == number


@pytest.mark.parametrize("name", ["attempt-1", "attempt-0x1", "attempt-001\n", "attempt-001.tmp", "xattempt-001", ""])
def test_foreign_names_have_no_number(name: str) -> None:
    assert attempt_number(name) is None
    assert round_index(name.replace("attempt", "round")) is None
    assert rank_index(name.replace("attempt", "rank")) is None
    assert AttemptPaths(Path("/r") / (name or "x")).number == 0


RESULT = StoredResult(
    outcome="failed",
    reason="restarts exhausted: grüße",
    exit_code=75,
    action="requeue",
    decision="requeue 1 of 3",
    fingerprint="F",
    step=120,
)


@pytest.mark.parametrize("change", [{"version": 2}, {"outcome": None}, {"exit_code": "75"}, {"step": 1.5}])
def test_what_can_not_be_understood_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    """The next attempt compares itself with it, at its very end: it must not fall over it."""
    path = tmp_path / "result.json"
    RESULT.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_result(path) == RESULT
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert load_result(path) is None
    path.write_text("{")
    assert load_result(path) is None
    assert load_result(tmp_path / "missing.json") is None
