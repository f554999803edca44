"""Each event in a line with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.base.codec import to_json
from hpc_elastic.report.event_text import describe_event
from hpc_elastic.run.event_reader import EVENTS, event_line
from hpc_elastic.run.events import RunEvent, SupervisorEvent
from tests.rigs.event_samples import KINDS, sample


def event(name: str, second: float, node: int = 0, **fields: object) -> dict[str, object]:
    head = {"v": 1, "t": int(second * 1e9), "n": 0, "host": f"n{node}", "node": node, "role": "agent"}
    return {**head, "event": name, **fields}


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
            "n7 is taken out of round 1: no heartbeat for 8.2 s",
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
    assert describe_event(event_line({**event(name, 1), **fields})) == line


@given(
    st.sampled_from(sorted(EVENTS)),
    st.dictionaries(
        st.sampled_from(
            ["round", "ranks", "nodes", "reason", "exitcode", "age", "streams", "groups", "seconds", "pids"]
        ),
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2), st.floats()),
    ),
)
def test_whatever_a_file_holds_there_is_a_line(name: str, fields: dict[str, object]) -> None:
    line = describe_event(event_line({**event(name, 1), **fields}))
    assert "\n" not in line
    assert "\x1b" not in line


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_has_its_sentence(kind: type[RunEvent]) -> None:
    role = "supervisor" if issubclass(kind, SupervisorEvent) else "agent"
    line = describe_event(event_line({"role": role, "node": 7, "host": "n7", **to_json(sample(kind))}))
    assert line
    assert "=" not in line, "the fields of an event without a sentence"
