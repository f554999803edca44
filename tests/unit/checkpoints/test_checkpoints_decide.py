"""What is copied next, what is removed, and what a round continues from."""

from __future__ import annotations

import pytest

from hpc_elastic.checkpoints.folders import NodePart, NodeReport, Saving
from hpc_elastic.checkpoints.node import choose_start, next_target, removable_parts, removable_steps


def saving(step: int, round_index: int = 0, count: int = 2) -> Saving:
    return Saving(step, 0, round_index, count)


def part(step: int, index: int = 0, **more: int) -> NodePart:
    return NodePart(saving(step, **more), index)


def report(
    index: int, *steps: int, shape: str = "rank#.pt", copies: tuple[NodePart, ...] = (), **more: int
) -> NodeReport:
    whole = tuple(part(step, index, **more) for step in steps)
    return NodeReport(uid=f"n{index}", whole=whole, shapes=(shape,) * len(whole), copies=copies)


@pytest.mark.parametrize(
    ("whole", "committed", "dead", "expected"),
    [
        ([], -1, [], None),
        ([10, 20, 30], -1, [], 30),
        ([10, 20, 30], -1, [30], 20),
        ([10, 20], 20, [], None),
        ([0], -1, [], 0),
    ],
)
def test_the_newest_is_copied_next(whole: list[int], committed: int, dead: list[int], expected: int | None) -> None:
    found = next_target(list(map(part, whole)), committed=committed, dead=set(map(saving, dead)))
    assert (found.step if found is not None else None) == expected


@pytest.mark.parametrize(
    ("whole", "is_settled", "committed", "kept", "removed"),
    [
        ([10], True, 10, [], []),
        ([10, 20], False, -1, [], []),
        ([10, 20, 30], False, -1, [], [10]),
        ([10, 20, 30], True, -1, [], [10, 20]),
        ([10, 20, 30], True, -1, [10], [20]),
        ([10, 20], False, 20, [], [10]),
        ([10, 20], False, 10, [], []),
    ],
)
def test_no_part_is_removed_that_a_restart_may_need(
    whole: list[int], is_settled: bool, committed: int, kept: list[int], removed: list[int]
) -> None:
    found = removable_parts(
        list(map(part, whole)), is_settled=is_settled, committed=committed, kept=list(map(saving, kept))
    )
    assert [one.saving.step for one in found] == removed


@pytest.mark.parametrize(
    ("steps", "keep", "protected", "removed"),
    [
        ([], 1, [], []),
        ([10], 1, [], []),
        ([10, 20, 30], 1, [], [10, 20]),
        ([30, 10, 20], 2, [], [10]),
        ([10, 20, 30], 1, [10], [20]),
        ([10, 20], 0, [], [10]),
    ],
)
def test_the_newest_steps_are_kept(steps: list[int], keep: int, protected: list[int], removed: list[int]) -> None:
    assert removable_steps(steps, keep=keep, protected=protected) == removed


@pytest.mark.parametrize(
    ("reports", "committed", "start", "is_committed", "better"),
    [
        ([report(0), report(1)], None, None, True, None),
        ([report(0, 10, 20), report(1, 10, 20)], 10, 20, False, None),
        ([report(0, 10, 20), report(1, 10)], None, 10, False, None),
        ([report(0, 20), report(1, 10)], 5, 5, True, None),
        ([report(0, 10), report(1, 10)], 10, 10, True, None),
        ([report(0, 10), report(1, 10)], 30, 30, True, None),
        # Rank 0 alone has written: the others can't read it where it is.
        ([report(0, 20, shape="model.pt"), report(1, 20, shape="")], 10, 10, True, 20),
        ([report(0, 20, shape=""), report(1, 20, shape="")], 10, 10, True, 20),
        # The nodes have changed places, or their number.
        ([report(1, 20), report(0, 20)], 10, 10, True, 20),
        ([report(0, 20), report(1, 20), report(2)], 10, 10, True, 20),
        # A node was lost, and its neighbour has its part.
        ([report(0, 20, copies=(part(20, 1),))], 10, 10, True, 20),
        ([report(0, 20), report(2)], 10, 10, True, None),
    ],
)
def test_a_round_continues_from_what_all_can_read(
    reports: list[NodeReport], committed: int | None, start: int | None, is_committed: bool, better: int | None
) -> None:
    choice, found = choose_start(reports, saving(committed) if committed is not None else None)
    assert (choice.saving.step if choice.saving is not None else None) == start
    assert choice.is_committed is is_committed
    assert (found.step if found is not None else None) == better


def test_the_same_step_of_two_rounds_is_not_mixed() -> None:
    reports = [report(0, 20, round_index=1), report(1, 20, round_index=2)]
    assert choose_start(reports, None)[0].saving is None
