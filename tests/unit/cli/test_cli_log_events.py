"""``hpc-elastic logs --events``: which lines, in which order, each with its reason; real runs test following."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.base.codec import to_json
from hpc_elastic.cli.log_events import describe_event
from hpc_elastic.cli.main import main
from hpc_elastic.run.event_reader import EVENTS, event_line
from hpc_elastic.run.events import RunEvent, SupervisorEvent
from tests.rigs.event_samples import KINDS, sample
from tests.rigs.run_builder import RunBuilder, make_failure

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    builder = RunBuilder(tmp_path / "run-1", nodes=2).begin()
    builder.fail(make_failure(1, at=9, exception="ValueError: bad\x1b[2J"))
    builder.stopped(0, 0, at=10)
    builder.end(0, at=11, outcome="failed", code=75, decision="requeue: requeue 1 of 3")
    builder.attempt(1, at=20)
    return builder.root


def shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert main(["logs", "--events", *argv]) == code
    out, err = capsys.readouterr()
    return (out if code == 0 else err).splitlines()


def test_of_one_attempt_node_or_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shown(capsys, str(root), "--attempt", "1")) == 1
    assert len(shown(capsys, str(root / "attempt-001"))) == 1
    for node in ("n2", "1"):
        assert {line.split()[1] for line in shown(capsys, str(root), "--node", node)} == {"n2"}
    assert {line.split()[1] for line in shown(capsys, str(root), "--node", "batch")} == {"batch"}
    names = [line.split()[2] for line in shown(capsys, str(root), "--event", "verdict,worker_failed")]
    assert names == ["worker_failed", "verdict"]
    names = [line.split()[2] for line in shown(capsys, str(root), "--event", "verdict", "--event", "attempt_ended")]
    assert names == ["verdict", "attempt_ended"]
    assert len(shown(capsys, str(root), "--tail", "3")) == 3


def test_json_is_what_was_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {line for path in root.rglob("*.jsonl") for line in path.read_text().splitlines()}
    assert set(shown(capsys, str(root), "--json")) == written
    (line,) = shown(capsys, str(root), "--json", "--event", "worker_failed")
    assert json.loads(line)["rank"] == 1


def test_a_torn_file_and_a_missing_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shown(capsys, str(root))
    for path in root.rglob("agent-00000-*.jsonl"):
        path.unlink()
    for path in root.rglob("agent-00001-*.jsonl"):
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) - 10])
    lines = shown(capsys, str(root))
    assert lines == [line for line in before if line in lines]
    assert 0 < len(lines) < len(before)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--event", "worker_faild"], "--event worker_faild: no event has this name; did you mean worker_failed?"),
        (["--event", ""], "there are agent_ended, agent_failed"),
        (["--node", "n9"], "--node n9: its nodes are n[1-2]"),
        (["--node", "n[1"], "--node n[1: "),
        (["--attempt", "4"], "has no attempt 4; it has 0, 1"),
        (["--tail", "-2"], "--tail"),
        (["--rank", "1"], "--rank can't be used with --events"),
        (["--around-failure"], "--around-failure can't be used with --events"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    root: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    (line,) = shown(capsys, str(root), *argv, code=2)
    assert says in line


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
