"""What is remembered of nodes: written whole, read whatever is there, forgotten when told."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from hpc_elastic.run.node_score import (
    MOST_EVIDENCE,
    Evidence,
    EvidenceKind,
    NodeRecord,
    forget_in,
    load_record,
    save_record,
)

NOW = 1_800_000_000 * 10**9
LOST = Evidence(node="n3", kind=EvidenceKind.LOST, at_ns=NOW, why="node n3 was lost", attempt=0, round=1)
UNFIT = Evidence(node="n4", kind=EvidenceKind.UNHEALTHY, at_ns=NOW - 5, why="/tmp is full")


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    record = NodeRecord(evidence=(UNFIT, LOST), excluded=("n3",), saved_ns=NOW)
    save_record(path, record)
    assert load_record(path) == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_one_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert load_record(tmp_path / "nodes.json") == NodeRecord()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "unreadable"),
        ("{", "unreadable"),
        ("[]", "holds a list"),
        ('{"version": 2}', "format version 2"),
        ('{"version": 1}', ""),
        ('{"version": 1, "evidence": 7, "excluded": "n1", "saved_ns": "x"}', ""),
        ('{"version": 1, "evidence": [7, {}, {"kind": "cursed", "node": "n1"}, {"kind": "lost"}]}', ""),
        ('{"version": 1, "evidence": [{"kind": "lost", "node": "n1", "at_ns": "soon"}]}', ""),
        ('{"version": 1, "evidence": [{"kind": "lost", "node": ["n1"], "at_ns": 1}], "excluded": [1]}', ""),
    ],
)
def test_what_can_not_be_read_counts_for_nothing(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    record = load_record(path)
    assert (record.evidence, record.excluded) == ((), ())
    assert problem in record.problem
    assert bool(problem) is bool(record.problem)


def test_a_record_keeps_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    many = [Evidence(node="n1", kind=EvidenceKind.LOST, at_ns=index) for index in range(MOST_EVIDENCE + 10)]
    save_record(path, NodeRecord(evidence=tuple(many)))
    assert [item.at_ns for item in load_record(path).evidence] == list(range(10, MOST_EVIDENCE + 10))


def test_a_run_forgets_and_keeps_what_else_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    assert forget_in(path, None) == 0
    save_record(path, NodeRecord(evidence=(LOST, UNFIT), excluded=("n3",), saved_ns=NOW))
    assert forget_in(path, ["n3"]) == 1
    assert load_record(path) == NodeRecord(evidence=(UNFIT,), excluded=("n3",), saved_ns=NOW)
    assert (forget_in(path, ["n3"]), forget_in(path, None)) == (0, 1)
