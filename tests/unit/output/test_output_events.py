"""Events of all writers as one story, each in a line with its reason."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.report.event_text import KNOWN_EVENTS, describe_event
from hpc_elastic.run.event_reader import merged_events, read_events
from hpc_elastic.run.paths import AttemptPaths


def write(folder: Path, name: str, *events: dict[str, object], torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(event) + "\n" for event in events) + torn)


def event(name: str, second: float, node: int = 0, **fields: object) -> dict[str, object]:
    head = {"v": 1, "t": int(second * 1e9), "n": 0, "host": f"n{node}", "node": node, "role": "agent"}
    return {**head, "event": name, **fields}


def test_by_time_and_each_file_in_its_own_order(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-003")
    write(attempt.events, "agent-00000-a.jsonl", event("b", 2), event("d", 4), torn='{"event": "torn')
    write(attempt.events, "agent-00001-b.jsonl", event("a", 1, 1), event("c", 3, 1), event("c2", 2.5, 1))
    write(attempt.events, "supervisor--0001-c.jsonl", {"foreign": 1}, event("e", 5, 7), torn="[1]\nnonsense\n")
    (attempt.events / ".agent-hidden.jsonl").write_text(json.dumps(event("hidden", 1)) + "\n")
    found = list(merged_events(attempt, {}))
    assert [one.value["event"] for one in found] == ["a", "b", "c", "c2", "d", "e"]
    times = [one.time_ns for one in found]
    assert times == sorted(times), "a writer whose clock was set back keeps its order"
    assert {one.attempt for one in found} == {3}
    assert [one.writer for one in found] == [1, 0, 1, 1, 0, -1]
    assert json.loads(found[0].raw) == found[0].value


def test_a_line_with_the_stacks_of_a_whole_node_is_whole(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    write(
        attempt.events, "agent-00000-a.jsonl", event("stacks_taken", 1, stacks="x" * 500_000), event("round_final", 2)
    )
    assert [one.value["event"] for one in merged_events(attempt, {})] == ["stacks_taken", "round_final"]
    assert [value["event"] for value in read_events(attempt.events, names={"round_final", "closed"})] == ["round_final"]


def test_a_clock_that_is_known_to_be_off_is_set_right(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "attempt-000")
    write(attempt.events, "agent-00000-a.jsonl", event("second", 20))
    # The node of the event is another one's: it is the writer's clock.
    write(attempt.events, "agent-00001-b.jsonl", event("first", 3610, 0))
    found = list(merged_events(attempt, {1: 3600 * 10**9}))
    assert [(one.value["event"], one.time_ns // 10**9) for one in found] == [("first", 10), ("second", 20)]


@pytest.mark.parametrize(
    ("name", "fields", "line"),
    [
        (
            "worker_failed",
            {"round": 1, "rank": 3, "exitcode": -9, "failure_class": "root", "message": "killed"},
            "round 1: rank 3 failed, signal 9 (root): killed",
        ),
        (
            "round_frozen",
            {"round": 2, "nodes": [0, 1], "reason": "restart 1 of 3"},
            "round 2: 2 nodes are in: restart 1 of 3",
        ),
        ("requeue_decision", {"action": "end", "reason": "the run succeeded"}, "the job ends: the run succeeded"),
        (
            "node_lost",
            {"round": 1, "age": 8.25, "host": "n7", "node": 7},
            "n7 is taken out of round 1: no sign of it for 8.2 s",
        ),
        (
            "closed",
            {"round": 4, "outcome": "too_few_nodes", "reason": "1 left"},
            "the run is closed in round 4: too few nodes: 1 left",
        ),
        ("verdict", {"outcome": "failed", "reason": "rank 1: x"}, "failed: rank 1: x"),
        ("of_the_future", {"colour": "blue", "reason": "why not"}, "colour=blue: why not"),
        ("worker_failed", {"round": 1}, "round=1"),
        ("agent_failed", {"error": "a\nb\x1b[2J\x07", "where": "f.py:1"}, "the agent itself failed: a b at f.py:1"),
    ],
)
def test_a_line_says_what_happened_and_why(name: str, fields: dict[str, object], line: str) -> None:
    assert describe_event({**event(name, 1), **fields}) == line


@given(
    st.sampled_from(sorted(KNOWN_EVENTS)),
    st.dictionaries(
        st.sampled_from(
            ["round", "ranks", "nodes", "reason", "exitcode", "age", "streams", "groups", "seconds", "pids"]
        ),
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.floats()),
    ),
)
def test_whatever_a_file_holds_there_is_a_line(name: str, fields: dict[str, object]) -> None:
    line = describe_event({**event(name, 1), **fields})
    assert "\n" not in line
    assert "\x1b" not in line


def test_lines_and_files_have_bounds_and_what_they_leave_out_is_told(tmp_path: Path) -> None:
    """2 GiB of nothing took 20 s, a line of 60 MB 1.7 GB."""
    attempt = AttemptPaths(tmp_path / "attempt-000")
    write(attempt.events, "agent-00000-a.jsonl", event("round_final", 2))
    long = attempt.events / "agent-00001-b.jsonl"
    first, last = (json.dumps(event("closed", when)).encode() for when in (3, 5))
    long.write_bytes(first + b'\n{"event": "closed", "x": [' + b"[]," * 20_000_000 + b"0]}\n" + last + b"\n")
    sparse = attempt.events / "agent-00002-c.jsonl"
    sparse.write_bytes(first + b"\n")
    with sparse.open("r+b") as file:
        file.seek(2 << 30)
        file.write(b"\n" + last + b"\n")
    left_out: list[str] = []
    tracemalloc.start()
    try:
        found = [one.value["event"] for one in merged_events(attempt, {}, on_left_out=left_out.append)]
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert found == ["round_final", "closed", "closed", "closed", "closed"]
    assert sorted(sentence.partition(" bytes were")[0].rpartition(" ")[0] for sentence in left_out) == [
        "events/agent-00001-b.jsonl:", "events/agent-00002-c.jsonl:", "events/agent-00002-c.jsonl:",
    ]  # fmt: skip
    assert any(sentence.endswith("it is larger than 67108864 bytes") for sentence in left_out)
    assert any(sentence.endswith("a line is longer than 4194304 bytes") for sentence in left_out)
