from __future__ import annotations

import pytest

from hpc_elastic.base.text import duration, first_of, plural, ranges, ranks_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.44, "0.4 s"), (61.24, "61.2 s"), (99.96, "1 min 40 s"), (185, "3 min 05 s"),
        (7 * 3600 + 125, "7 h 02 min"), (51 * 3600, "2 d 03 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_durations_below_a_second() -> None:
    assert [duration(each, fine=True) for each in (0.0004, 0.44, 0.9994, 1)] == ["0 ms", "440 ms", "999 ms", "1.0 s"]


def test_ranges_of_numbers() -> None:
    assert ranges((12, 0, 1, 2, 1)) == "0-2,12"
    assert ranges(()) == ""
    assert ranks_text((3, 3)) == "rank 3"
    assert ranks_text(range(8), limit=20) == "ranks 0-7"
    assert ranges(range(0, 100, 2), limit=10) == "0,2,4,..."


def test_the_first_of_many_names() -> None:
    assert first_of(["a", "b"], 2) == "a, b"
    assert first_of(["a", "b", "c", "d"], 2) == "a, b and 2 more"
    assert first_of(["a", "b"], 1, noun="node") == "a and 1 more nodes"


def test_counted_nouns() -> None:
    assert (plural(1, "node"), plural(3, "node"), plural(0, "node")) == ("1 node", "3 nodes", "0 nodes")
