from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.report.fold import fold_failures, rank_ranges
from tests.rigs.run_builder import GLOO, make_failure


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((5,), "5"), ((1, 0), "0-1"), ((12, 7, 6, 5, 0), "0,5-7,12"), ((3, 3), "3")],
)
def test_rank_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert rank_ranges(ranks) == text


@given(st.sets(st.integers(min_value=0, max_value=60)))
def test_rank_ranges_name_exactly_the_ranks(ranks: set[int]) -> None:
    named: set[int] = set()
    for part in filter(None, rank_ranges(tuple(ranks)).split(",")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


def test_the_same_failure_on_many_ranks_is_one_entry() -> None:
    texts = [f"RuntimeError: {GLOO.format(rank=rank)}" for rank in range(500)]
    failures = [make_failure(rank, at=2 - rank / 1000, exception=text) for rank, text in enumerate(texts)]
    failures.append(make_failure(500, at=1, exception="ValueError: bad"))
    folds = fold_failures(failures)
    assert [(fold.first.global_rank, rank_ranges(fold.ranks)) for fold in folds] == [(500, "500"), (499, "0-499")]
    assert folds[1].hosts[:2] == ("n1", "n2")
    assert len(folds[1].hosts) == 500


def test_another_exit_code_or_class_is_another_entry() -> None:
    one, other = make_failure(0, at=1, exitcode=3), make_failure(1, at=1, exitcode=4)
    ended = make_failure(2, at=1, exitcode=-9, stopped_by_agent=True)
    killed = make_failure(3, at=1, exitcode=-9)
    assert len(fold_failures([one, other, ended, killed])) == 4
