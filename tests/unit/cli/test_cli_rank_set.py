"""``0-3,7``."""

from __future__ import annotations

import pytest

from hpc_elastic.cli.run_argument import check_ranks, parse_numbers
from hpc_elastic.errors import UsageError


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", [3]), ("0-3,7", [0, 1, 2, 3, 7]), (" 2 , 1", [1, 2]), ("0-999999999", list(range(20)))]
)
def test_what_is_in_it(text: str, numbers: list[int]) -> None:
    assert parse_numbers(text, option="--rank").within(range(20)) == numbers


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "1-", "0x1", "1.5", "\u0663", "9" * 30])
def test_what_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="write it as 0-3,7"):
        parse_numbers(text, option="--rank")


def test_ranks_that_are_nowhere() -> None:
    ranks = parse_numbers("2,9", option="--rank")
    check_ranks(ranks, 10, option="--rank", where="round 1")
    check_ranks(ranks, 0, option="--rank", where="a round of which nobody told how large it was")
    with pytest.raises(UsageError, match=r"--rank 2,9: round 1 has ranks 0-8"):
        check_ranks(ranks, 9, option="--rank", where="round 1")
    with pytest.raises(UsageError, match="rank 0 alone"):
        check_ranks(ranks, 1, option="--rank", where="round 1")
