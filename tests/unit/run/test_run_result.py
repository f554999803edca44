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


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    RESULT.save(path)
    assert load_result(path) == RESULT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_unknown_keys_are_left_alone_and_defaults_fill_in(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    RESULT.save(path)
    value = json.loads(path.read_text())
    del value["fingerprint"], value["step"]
    path.write_text(json.dumps({**value, "from_the_future": 1}))
    found = load_result(path)
    assert found is not None
    assert (found.outcome, found.fingerprint, found.step) == ("failed", "", -1)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"outcome": None},
        {"outcome": 5},
        {"exit_code": "75"},
        {"step": "x"},
        {"step": None},
        {"step": 1.5},
        {"fingerprint": ["F"]},
    ],
)
def test_what_can_not_be_understood_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    """The next attempt compares itself with it, at its very end: it must not fall over it."""
    path = tmp_path / "result.json"
    RESULT.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert load_result(path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', "\0"])
def test_a_torn_file_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    assert load_result(path) is None
    assert load_result(tmp_path / "missing.json") is None
