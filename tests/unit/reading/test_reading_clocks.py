"""Clocks that are set right before anything is put in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_elastic.reading.clocks import clock_offsets_ns
from hpc_elastic.run_paths import AttemptPaths

HOUR = 3600 * 10**9


def write(attempt: AttemptPaths, *events: dict[str, Any]) -> None:
    attempt.events.mkdir(parents=True, exist_ok=True)
    for node in {event["node"] for event in events}:
        lines = [json.dumps(event) + "\n" for event in events if event["node"] == node]
        (attempt.events / f"agent-{node:05d}-u.jsonl").write_text("".join(lines))


def test_from_the_events_measured_before_concluded(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    final = [
        {"event": "round_final", "round": index, "node": node, "t": 10**18 + index + (node > 0) * HOUR, "host": "x"}
        for index in range(2)
        for node in range(3)
    ]
    write(attempt, *final)
    assert clock_offsets_ns(attempt) in ({1: 0, 2: 0, 0: -HOUR}, {0: -HOUR})
    # Node 1 was booted 300 ns before node 0, by whose clock it is an hour ahead all the same.
    own = {"role": "agent", "event": "clock_offset", "bound_ns": 0, "reference": 0}
    measured = [
        {**own, "node": 0, "t": 10**18, "uptime_ns": 500, "offset_ns": 0},
        {**own, "node": 1, "t": 10**18 + HOUR, "uptime_ns": 800, "offset_ns": 300},
        {**own, "node": 2, "reference": None, "t": 1, "uptime_ns": "x"},
    ]
    write(attempt, *final, *measured)
    assert clock_offsets_ns(attempt) == {1: HOUR, 2: HOUR}, "node 2 as the rounds show it"
