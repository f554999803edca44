"""result.json: how an attempt ended, for whoever reads it later."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.run.attempt import StoredResult, load_result

RESULT = StoredResult(
    outcome="failed",
    reason="restarts exhausted: grüße",
    exit_code=75,
    action="requeue",
    decision="requeue 1 of 3",
    fingerprint="F",
    step=120,
)


def test_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    RESULT.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("change", [{"version": 2}, {"outcome": None}, {"exit_code": "75"}, {"step": 1.5}])
def test_what_can_not_be_understood_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    """The next attempt compares itself with it, at its very end: it must not fall over it."""
    path = tmp_path / "result.json"
    RESULT.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert load_result(path) is None
    path.write_text("{")
    assert load_result(path) is None
    assert load_result(tmp_path / "missing.json") is None
