"""The judge of the calibration catalogue: what counts as right, honest and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.verdicts.case import Case
from tests.verdicts.judge import Grade, judge

_TIMEOUT = "RuntimeError: Timed out waiting 3000ms for recv operation to complete"


def _grade(case: Case, *, named: int | None = None, text: str = "", suspects: tuple[int, ...] = ()) -> Grade:
    """A report that names a rank with `text`, or states "not known" with `suspects`."""
    failure = {"global_rank": named or 0, "host": f"node{(named or 0) // 2}"}
    verdict: dict[str, Any] = {
        "cause": "unknown" if named is None else "worker",
        "confidence": "none" if named is None else "high",
        "summary": text,
        "evidence": "",
        "failure": failure,
        "lost_node": None,
        "suspects": [{"rank": rank} for rank in suspects],
        "category": "worker",
        "retryable": True,
    }
    return judge(case, {"verdict": verdict}, f"----\nRoot Cause:\n  {text}\n").grade


def _case(*ranks: int, says: tuple[str, ...] = (), unknown_is_right: bool = True) -> Case:
    return Case("a", "b", "", ranks=ranks, says=says, unknown_is_right=unknown_is_right)


@pytest.mark.parametrize(
    ("suspects", "grade"), [((1,), Grade.RIGHT), ((), Grade.HONEST), ((2,), Grade.WRONG), ((1, 2), Grade.RIGHT)]
)
def test_of_an_unknown_cause_the_suspects_decide(suspects: tuple[int, ...], grade: Grade) -> None:
    assert _grade(_case(1), suspects=suspects) is grade


def test_not_known_is_honest_where_an_exception_has_the_cause() -> None:
    assert _grade(_case(1, says=("boom",), unknown_is_right=False), suspects=(1,)) is Grade.HONEST


@pytest.mark.parametrize(("text", "grade"), [("KeyError: boom", Grade.RIGHT), (_TIMEOUT, Grade.WRONG)])
def test_the_right_rank_for_what_a_victim_reports_is_wrong(text: str, grade: Grade) -> None:
    assert _grade(_case(1), named=1, text=text) is grade


def test_the_right_rank_must_state_what_happened() -> None:
    assert _grade(_case(1, says=("boom",)), named=1, text="ValueError: BOOM at step 3") is Grade.RIGHT
    assert _grade(_case(1, says=("boom",)), named=1, text="ValueError: crash") is Grade.WRONG
    assert _grade(_case(1, says=("boom",)), named=2, text="ValueError: boom") is Grade.WRONG


def test_where_no_rank_is_at_fault_none_is_to_be_suspected() -> None:
    assert _grade(_case()) is Grade.RIGHT
    assert _grade(_case(), suspects=(3,)) is Grade.WRONG
    assert _grade(_case(), named=0, text=_TIMEOUT) is Grade.WRONG
    assert _grade(_case(says=("4/5 clients",)), named=0, text="4/5 clients joined") is Grade.RIGHT
