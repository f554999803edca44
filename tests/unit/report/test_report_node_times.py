"""Clocks that are set right before anything is put in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_elastic.report.clocks import read_offsets_ns
from hpc_elastic.run.paths import AttemptPaths

HOUR = 3600 * 10**9


def write(attempt: AttemptPaths, *events: dict[str, Any]) -> None:
    attempt.events.mkdir(parents=True, exist_ok=True)
    for node in {event["node"] for event in events}:
        lines = [json.dumps({"role": "agent", **event}) + "\n" for event in events if event["node"] == node]
        (attempt.events / f"agent-{node:05d}-u.jsonl").write_text("".join(lines))


def offset(node: int, ahead: int, uptime: int, measured: int) -> dict[str, Any]:
    fields = {"reference": 0, "uptime_ns": uptime, "offset_ns": measured, "bound_ns": 10}
    return {"event": "clock_offset", "node": node, "wall_ns": 10**18 + ahead, **fields}


def test_by_what_the_agents_measured_else_by_what_the_rounds_show(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    final = [
        {"event": "round_final", "round": index, "node": node, "t": 10**18 + index + (node == 2) * HOUR}
        for index in range(2)
        for node in range(3)
    ]
    write(attempt, *final)
    assert read_offsets_ns(attempt) == {2: HOUR}
    # Node 1 was booted 300 ns before node 0; its wall clock is an hour ahead.
    write(attempt, offset(0, 0, 500, 0), offset(1, HOUR, 800, 300))
    assert abs(read_offsets_ns(attempt)[1] - HOUR) < 10


def test_a_clock_that_may_as_well_be_right_is_trusted(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    write(attempt, offset(0, 0, 500, 0), offset(1, 8, 800, 300), offset(2, -50, 800, 300))
    assert read_offsets_ns(attempt) == {2: -50}


def test_what_is_torn_or_foreign_is_trusted(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    write(attempt, {"event": "clock_offset", "node": 2, "t": "x"}, {"event": "round_final", "node": 1, "round": None})
    assert read_offsets_ns(attempt) == {}
    assert read_offsets_ns(AttemptPaths(tmp_path / "nowhere")) == {}
