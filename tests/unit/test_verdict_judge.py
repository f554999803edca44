"""What the calibration catalogue's judge makes of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.verdicts import run
from tests.verdicts.case import Case, all_cases
from tests.verdicts.judge import Grade, Judged, cause_section, judge
from tests.verdicts.run import complaints, high_and_wrong, table

_TEXT = """\
====
train.py FAILED (exit code 1) - attempt 0
  run directory: /runs/1
----
Root Cause (first observed failure):
  ValueError: bad scale
  last words: the table has
    three rows
Other failures in that round: 1
  rank 0: Connection closed by peer
====
"""


def _case(**changes: Any) -> Case:
    values: dict[str, Any] = {"ranks": (1,), "says": ("bad scale",), **changes}
    return Case("one", "group", "", **values)


def _report(**changes: Any) -> dict[str, Any]:
    verdict: dict[str, Any] = {
        "cause": "worker",
        "confidence": "high",
        "summary": "rank 1 on node0: ValueError: bad scale",
        "evidence": "the only failure",
        "category": "worker",
        "retryable": True,
        "failure": {"global_rank": 1, "host": "node0"},
        "lost_node": None,
    }
    return {"verdict": {**verdict, **changes}}


_UNKNOWN = {"cause": "unknown", "confidence": "none"}
_VICTIM = {"summary": "rank 1 on node0: RuntimeError: Timed out waiting 3000ms for recv operation to complete"}


def _suspects(*ranks: int) -> list[dict[str, Any]]:
    return [{"rank": rank, "host": "node0", "why": "it ended with 0"} for rank in ranks]


def test_the_section_of_the_cause() -> None:
    lines = cause_section(_TEXT).splitlines()
    assert lines[0] == "Root Cause (first observed failure):"
    assert lines[-1].strip() == "three rows"


@pytest.mark.parametrize(
    ("case", "report", "grade"),
    [
        (_case(), _report(), Grade.RIGHT),
        (_case(ranks=(0, 1)), _report(), Grade.RIGHT),
        (_case(ranks=(2,)), _report(), Grade.WRONG),
        (_case(says=("BAD   scale", "other")), _report(), Grade.RIGHT),
        (_case(says=("table has three",)), _report(), Grade.RIGHT),
        (_case(says=("Connection closed",)), _report(), Grade.WRONG),
        (_case(not_says=("ValueError",)), _report(), Grade.WRONG),
        (_case(category="infrastructure"), _report(), Grade.WRONG),
        (_case(retryable=True), _report(), Grade.RIGHT),
        (_case(), _report(failure=None), Grade.WRONG),
        (_case(ranks=()), _report(failure=None), Grade.RIGHT),
        (_case(not_says=("refused",)), _report(summary="ValueError (logged just before: refused)"), Grade.RIGHT),
        (_case(), _report(**_UNKNOWN), Grade.HONEST),
        (_case(unknown_is_right=True), _report(**_UNKNOWN), Grade.HONEST),
        (_case(unknown_is_right=True), _report(**_UNKNOWN, suspects=_suspects(1)), Grade.RIGHT),
        (_case(unknown_is_right=True), _report(**_UNKNOWN, suspects=_suspects(0, 1)), Grade.RIGHT),
        (_case(unknown_is_right=True), _report(**_UNKNOWN, suspects=_suspects(0, 1, 2)), Grade.HONEST),
        (_case(unknown_is_right=True), _report(**_UNKNOWN, suspects=_suspects(0, 2)), Grade.WRONG),
        (_case(unknown_is_right=True), _report(**_UNKNOWN, evidence="Look at ranks 0-2: silent"), Grade.HONEST),
        (_case(unknown_is_right=True), _report(**_UNKNOWN, evidence="Look at rank 1: silent"), Grade.RIGHT),
        (_case(), _report(**_UNKNOWN, evidence="Look at rank 3: silent"), Grade.WRONG),
        (_case(ranks=(), node="node0"), _report(), Grade.RIGHT),
        (_case(ranks=(), node="node1"), _report(), Grade.WRONG),
        (_case(ranks=(), node="node1"), _report(lost_node={"host": "node1"}), Grade.RIGHT),
        (_case(), _report(lost_node={"host": "node1"}), Grade.WRONG),
        (_case(ranks=(), node="node1"), _report(**_UNKNOWN, suspects=_suspects(2)), Grade.HONEST),
        # The right rank, by chance: its own timeout is no cause.
        (_case(says=(), unknown_is_right=True), _report(**_VICTIM), Grade.WRONG),
        (_case(says=(), unknown_is_right=True), _report(), Grade.RIGHT),
        # No rank is at fault.
        (_case(ranks=(), says=(), unknown_is_right=True), _report(**_UNKNOWN), Grade.RIGHT),
        (_case(ranks=(), says=(), unknown_is_right=True), _report(**_UNKNOWN, suspects=_suspects(1)), Grade.WRONG),
        (_case(ranks=(), says=(), unknown_is_right=True), _report(), Grade.WRONG),
        (_case(ranks=(), unknown_is_right=True), _report(), Grade.RIGHT),
    ],
)
def test_grades(case: Case, report: dict[str, Any], grade: Grade) -> None:
    judged = judge(case, report, _TEXT)
    assert judged.grade is grade, judged.why
    assert (judged.why == "") == (grade is Grade.RIGHT)


def _judged(grade: Grade, confidence: str, *, group: str = "a") -> Judged:
    return Judged(name="n", group=group, grade=grade, confidence=confidence, why="why", summary="said", text="")


def test_the_table() -> None:
    results = [
        _judged(Grade.RIGHT, "high"),
        _judged(Grade.WRONG, "high"),
        _judged(Grade.WRONG, "low", group="b"),
        _judged(Grade.HONEST, "none", group="b"),
    ]
    lines = table(results)
    assert "| a | 2 | 1 | 0 | 1 | 1 |" in lines
    assert "| b | 2 | 0 | 1 | 1 | 0 |" in lines
    assert "| **all** | 4 | 1 | 1 | 2 | 1 |" in lines
    assert "| high | 2 | 1 | 0 | 1 |" in lines
    assert high_and_wrong(results) == [results[1]]
    assert len(complaints(results)) == 3


def test_the_cases() -> None:
    """Scripts that compile, names that are unlike, and an expectation in each."""
    for case in all_cases():
        compile(case.script, case.name, "exec")
        assert case.says or case.unknown_is_right, case.name
        assert all(0 <= rank < case.nodes * case.nproc for rank in case.ranks), case.name


def test_results_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was ended goes on: what has a result is not run again, and stands in the table."""
    ran: list[str] = []

    def run_case(case: Case, *, start_method: str) -> Judged:
        ran.append(case.name)
        return Judged(
            name=case.name, group=case.group, grade=Grade.RIGHT, confidence="high", why="", summary="", text="report"
        )

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    file = tmp_path / "results"
    run.main(["--results", str(file), "--only", "plain-exception"])
    run.main(["--results", str(file), "--only", "plain-exception", "--only", "finally-barrier"])
    assert sorted(ran) == ["finally-barrier", "plain-exception"]
    assert {one.name for one in run.read_results(file)} == {"finally-barrier", "plain-exception"}
