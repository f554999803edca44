"""The judge of a rehearsal: from steps and faults to what a script is guilty of."""

from __future__ import annotations

import pytest

from hpc_elastic.rehearsal.faults import Fault, Kind
from hpc_elastic.rehearsal.journal import StepSeen
from hpc_elastic.rehearsal.judge import (
    Comparison,
    Guilt,
    InjectionSeen,
    NoticeUse,
    Rehearsed,
    compare_losses,
    find_guilt,
    judge_notice,
)


def step(
    number: int, loss: float | None, *, rank: int = 0, place: tuple[int, int] = (0, 0), world: int = 2
) -> StepSeen:
    return StepSeen(at=float(number), place=place, rank=rank, position=(number,), loss=loss, world=world)


def injection(kind: Kind = Kind.WORKER_KILLED, **facts: object) -> InjectionSeen:
    fault = Fault(number=1, kind=kind, gap=1.0, pick=0.0, seconds=0.0)
    known: dict[str, object] = {
        "run": 1, "what": "rank 0", "at": 2.5, "before": (0, 0), "trained_at": 3.5, "after": (0, 1),
        "last": (4,), "resumed": (3,), "redone": 2,
    }  # fmt: skip
    return InjectionSeen(fault=fault, **{**known, **facts})  # type: ignore[arg-type]


def judged(comparison: Comparison, *injections: InjectionSeen, **facts: object) -> list[Guilt]:
    found = Rehearsed(comparison=comparison, injections=injections, first=(1,), steps=10, **facts)  # type: ignore[arg-type]
    return [finding.guilt for finding in find_guilt(found)]


EXPECTED = [step(number, 1.0 / number, rank=rank) for number in range(1, 6) for rank in (0, 1)]


def test_equal_losses_within_the_tolerance_are_no_guilt() -> None:
    again = [step(number, 1.0 / number * (1 + 1e-5), rank=1) for number in (3, 4, 3, 4, 5)]
    found = compare_losses(EXPECTED, {1: again}, tolerance=1e-3)
    assert found.parting is None
    assert found.compared == 5
    assert judged(found, injection()) == []


def test_the_first_step_that_parts_is_named_with_its_rank_and_by_how_much() -> None:
    later = [step(3, 1 / 3, rank=1), step(4, 0.5, rank=1), step(5, 9.0, rank=1)]
    found = compare_losses(EXPECTED, {1: later}, tolerance=1e-3)
    assert found.parting is not None
    assert (found.parting.step, found.parting.rank, found.parting.by) == ((4,), 1, pytest.approx(1.0))
    assert judged(found, injection()) == [Guilt.LOSSES_PART]
    (finding,) = find_guilt(Rehearsed(comparison=found, injections=(injection(),), first=(1,), steps=5))
    assert "at step 4 (rank 1), after #1 worker killed -9 (rank 0): 0.5, undisturbed 0.25 (100.00% off)" in finding.text


def test_a_script_that_does_not_repeat_itself_undisturbed_is_not_judged_by_its_losses() -> None:
    found = compare_losses(EXPECTED, {1: [step(4, 0.5)]}, tolerance=1e-3)
    assert judged(Comparison(compared=1, parting=found.parting, repeatable=False), injection()) == []


def test_a_ranks_own_loss_is_not_compared_in_a_round_of_another_size() -> None:
    assert compare_losses(EXPECTED, {1: [step(4, 0.5, world=1)]}, tolerance=1e-3).compared == 0
    alone = [step(number, 1.0 / number) for number in range(1, 6)]
    assert compare_losses(alone, {1: [step(4, 0.5, world=1)]}, tolerance=1e-3).parting is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_no_numbers_are_compared_too(value: float) -> None:
    assert compare_losses(EXPECTED, {1: [step(4, value)]}, tolerance=1e-3).parting is not None
    same = [step(4, value)]
    assert compare_losses(same, {1: same}, tolerance=1e-3).parting is None


def test_a_run_that_does_not_train_again_or_leaves_something_behind_is_guilty() -> None:
    assert judged(Comparison(compared=1), injection(trained_at=None, resumed=None)) == [Guilt.DID_NOT_GO_ON]
    assert judged(Comparison(compared=1), injection(), left=("process 7",)) == [Guilt.LEFT_BEHIND]


def test_beginning_anew_is_guilt_only_where_much_was_done_and_never_resumed() -> None:
    anew = injection(resumed=(1,), redone=5)
    assert judged(Comparison(compared=1), anew) == [Guilt.NO_CHECKPOINT]
    assert judged(Comparison(compared=1), injection(resumed=(1,), redone=2)) == [], (
        "its first checkpoint may come later"
    )
    assert judged(Comparison(compared=1), injection(resumed=(1,), redone=2, saved_before=True)) == [Guilt.NO_CHECKPOINT]
    assert judged(Comparison(compared=1), anew, injection()) == []


@pytest.mark.parametrize(
    ("facts", "use"),
    [
        ({"saved": True, "asked": True, "ended_by_signal": False, "redone": 0}, NoticeUse.USED),
        ({"saved": True, "asked": True, "ended_by_signal": True, "redone": 2}, NoticeUse.USED),
        ({"saved": True, "asked": False, "ended_by_signal": False, "redone": 0}, NoticeUse.USED),
        ({"saved": True, "asked": False, "ended_by_signal": True, "redone": 0}, NoticeUse.IGNORED),
        ({"saved": False, "asked": False, "ended_by_signal": True, "redone": 3}, NoticeUse.IGNORED),
        (
            {"saved": True, "asked": False, "ended_by_signal": True, "redone": 0, "saves_each_step": True},
            NoticeUse.NEEDLESS,
        ),
        (
            {"saved": True, "asked": False, "ended_by_signal": True, "redone": 1, "saves_each_step": True},
            NoticeUse.IGNORED,
        ),
        ({"saved": False, "asked": True, "ended_by_signal": False, "redone": 3}, NoticeUse.IGNORED),
        ({"saved": False, "asked": True, "ended_by_signal": False, "redone": 0}, NoticeUse.NEEDLESS),
    ],
)
def test_what_became_of_a_notice(facts: dict[str, bool], use: NoticeUse) -> None:
    assert judge_notice(**facts) is use  # type: ignore[arg-type]
    guilt = [Guilt.NOTICE_IGNORED] if use is NoticeUse.IGNORED else []
    assert judged(Comparison(compared=1), injection(Kind.PREEMPTION, notice=use)) == guilt
