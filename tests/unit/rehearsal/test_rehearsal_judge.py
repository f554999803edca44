"""The judge of a rehearsal: from steps and faults to what a script is guilty of."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.rehearsal.journal import LossCurve, LossSource, RunJournal, StepSeen
from hpc_elastic.rehearsal.judge import (
    DISK_FULL,
    NOTICE,
    WORKER_KILLED,
    Guilt,
    InjectionSeen,
    Kind,
    LossComparison,
    PlannedFault,
    Rehearsed,
    attribute_failure,
    compare_losses,
    find_remarks,
    look_back,
)
from hpc_elastic.run.paths import RunPaths


def step(
    number: int, loss: float | None, *, rank: int = 0, place: tuple[int, int] = (0, 0), world: int = 2
) -> StepSeen:
    return StepSeen(at=float(number), place=place, rank=rank, position=(number,), loss=loss, world=world)


def injection(kind: Kind = WORKER_KILLED, **facts: object) -> InjectionSeen:
    fault = PlannedFault(number=1, kind=kind)
    known: dict[str, object] = {
        "run": 1, "what": "rank 0", "at": 2.5, "before": (0, 0), "trained_at": 3.5,
        "resumed": (3,), "redone": 2,
    }  # fmt: skip
    return InjectionSeen(fault=fault, **{**known, **facts})  # type: ignore[arg-type]


def judged(comparison: LossComparison, *injections: InjectionSeen, **facts: object) -> list[Guilt]:
    found = Rehearsed(comparison=comparison, injections=injections, first=(1,), steps=10, **facts)  # type: ignore[arg-type]
    return [finding.guilt for finding in attribute_failure(found)]


EXPECTED = [step(number, 1.0 / number, rank=rank) for number in range(1, 6) for rank in (0, 1)]


def test_equal_losses_within_the_tolerance_are_no_guilt() -> None:
    again = [step(number, 1.0 / number * (1 + 1e-5), rank=1) for number in (3, 4, 3, 4, 5)]
    found = compare_losses(EXPECTED, {1: again}, tolerance=1e-3)
    assert found.divergence is None
    assert found.compared == 5
    assert judged(found, injection()) == []


def test_the_first_step_that_parts_is_named_with_its_rank_and_by_how_much() -> None:
    later = [step(3, 1 / 3, rank=1), step(4, 0.5, rank=1), step(5, 9.0, rank=1)]
    found = compare_losses(EXPECTED, {1: later}, tolerance=1e-3)
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.rank, found.divergence.by) == ((4,), 1, pytest.approx(1.0))
    assert judged(found, injection()) == [Guilt.LOSSES_PART]
    (finding,) = attribute_failure(Rehearsed(comparison=found, injections=(injection(),), first=(1,), steps=5))
    assert "at step 4 (rank 1), after #1 worker killed -9 (rank 0): 0.5, undisturbed 0.25 (100.00% off)" in finding.text


def test_a_script_that_does_not_repeat_itself_undisturbed_is_not_judged_by_its_losses() -> None:
    found = compare_losses(EXPECTED, {1: [step(4, 0.5)]}, tolerance=1e-3)
    assert judged(LossComparison(compared=1, divergence=found.divergence, repeatable=False), injection()) == []


def test_a_ranks_own_loss_is_not_compared_in_a_round_of_another_size() -> None:
    assert compare_losses(EXPECTED, {1: [step(4, 0.5, world=1)]}, tolerance=1e-3).compared == 0
    alone = [step(number, 1.0 / number) for number in range(1, 6)]
    assert compare_losses(alone, {1: [step(4, 0.5, world=1)]}, tolerance=1e-3).divergence is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_no_numbers_are_compared_too(value: float) -> None:
    assert compare_losses(EXPECTED, {1: [step(4, value)]}, tolerance=1e-3).divergence is not None
    same = [step(4, value)]
    assert compare_losses(same, {1: same}, tolerance=1e-3).divergence is None


def test_a_run_that_does_not_train_again_or_leaves_something_behind_is_guilty() -> None:
    assert judged(LossComparison(compared=1), injection(trained_at=None, resumed=None)) == [Guilt.DID_NOT_GO_ON]
    assert judged(LossComparison(compared=1), injection(), left=("process 7",)) == [Guilt.LEFT_BEHIND]


def test_beginning_anew_is_guilt_only_where_much_was_done_and_never_resumed() -> None:
    anew = injection(resumed=(1,), redone=5)
    assert judged(LossComparison(compared=1), anew) == [Guilt.NO_CHECKPOINT]
    assert judged(LossComparison(compared=1), injection(resumed=(1,), redone=2)) == [], (
        "its first checkpoint may come later"
    )
    assert judged(LossComparison(compared=1), injection(resumed=(1,), redone=2, saved_before=True)) == [
        Guilt.NO_CHECKPOINT
    ]
    assert judged(LossComparison(compared=1), anew, injection()) == []


def test_a_notice_that_was_not_used_is_a_remark_where_steps_were_lost_and_no_guilt() -> None:
    for used, redone, remarks in ((True, 0, 0), (True, 2, 0), (False, 0, 0), (False, 3, 1)):
        one = injection(NOTICE, used_notice=used, redone=redone)
        found = Rehearsed(comparison=LossComparison(compared=1), injections=(one,), first=(1,), steps=10)
        assert attribute_failure(found) == ()
        assert len(find_remarks(found)) == remarks, (used, redone)
    assert "done again: 3 steps; call hpc_elastic.should_checkpoint" in find_remarks(found)[0]


@pytest.mark.parametrize(
    ("saved_at", "asked", "resumed", "used"),
    [(6.5, True, 7, True), (6.5, False, 7, True), (6.5, False, 5, False), (6.5, True, 5, True), (4.0, True, 7, False)],
)
def test_a_notice_was_used_where_a_checkpoint_was_saved_after_it(
    saved_at: float, asked: bool, resumed: int, used: bool, tmp_path: Path
) -> None:
    journal = RunJournal(tmp_path, paths=RunPaths(tmp_path), work=tmp_path, source=LossSource())
    again = [StepSeen(at=10.0 + number, place=(1, 0), rank=0, position=(number,)) for number in range(resumed, 11)]
    journal.steps = [*(step(number, 1.0) for number in range(1, 7)), *again]
    course = LossCurve([step(number, 1.0) for number in range(1, 11)], started=0.0)
    done = InjectionSeen(run=1, fault=PlannedFault(number=1, kind=NOTICE), what="", at=5.5, before=(0, 0))
    seen = look_back(done, journal, [saved_at], course, is_asked=asked)
    assert (seen.used_notice, seen.redone, seen.resumed) == (used, 7 - resumed, (resumed,))


def test_a_fault_that_need_not_restart_is_over_with_a_step_after_it(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, paths=RunPaths(tmp_path), work=tmp_path, source=LossSource())
    journal.steps = [step(number, 1.0) for number in range(1, 9)]
    done = InjectionSeen(
        run=1, fault=PlannedFault(number=1, kind=DISK_FULL, seconds=3.0), what="", at=2.5, before=(0, 0)
    )
    seen = look_back(done, journal, [], LossCurve(journal.steps, started=0.0))
    assert (seen.resumed, seen.trained_at, seen.redone) == (None, 3.0, 0)
