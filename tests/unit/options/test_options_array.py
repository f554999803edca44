"""``--array``."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import parse_array


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("0-7%2", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("5", (5,)),
        ("1,3,5-7", (1, 3, 5, 6, 7)),
        ("0-15:4%1", (0, 4, 8, 12)),
        ("7,1,1-2", (1, 2, 7)),
    ],
)
def test_the_tasks_that_sbatch_would_make(text: str, tasks: tuple[int, ...]) -> None:
    assert parse_array(text) == tasks


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-3:0", "1-", "%2", "1,,2", "1-3%", "٣", "0-9999999"])
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"^-a "):
        parse_array(text, option="-a")
