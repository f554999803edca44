"""When what was printed: what is written down, read again, and thinned out."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.output.log_files import FINEST_US, HEADER, MOST_RECENT, RecentTimes, thinned, times_path
from hpc_elastic.output.log_streams import read_marks, times_node

MARKS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(1, 2),
        st.integers(0, 3),
        st.integers(0, 10**12),
        st.integers(0, 2 * 10**15),
    ),
    max_size=60,
)


Mark = tuple[int, int, int, int, int]


def marks_in(raw: bytes) -> list[Mark]:
    return list(read_marks(raw))


def text(marks: list[Mark]) -> bytes:
    return HEADER + b"".join(b"%d %d %d %d %d\n" % mark for mark in marks)


@given(MARKS)
def test_what_is_written_is_read_again(marks: list[Mark]) -> None:
    assert marks_in(text(marks)) == marks


@given(MARKS, st.integers(0, 40))
def test_a_torn_end_costs_its_own_line_alone(marks: list[Mark], cut: int) -> None:
    raw = text(marks)[: len(text(marks)) - cut]
    found = marks_in(raw)
    assert found == marks[: len(found)]
    whole = max(0, raw.count(b"\n") - 1)
    assert len(found) == whole


def test_foreign_lines_are_left_out_and_other_versions_altogether() -> None:
    line = b"3 1 0 10 20\n"
    assert marks_in(HEADER + b"\n\0\xff garbage\n" + line + b"3 1 0 -5 9\n3 7 0 5 9\n") == [(3, 1, 0, 10, 20)]
    assert marks_in(HEADER + line + b"3 1 0 9 %d\n" % 10**30 + line) == marks_in(HEADER + line + line)
    assert marks_in(HEADER + line + b"3 1 0\n3 1\n") == marks_in(HEADER + line), "five numbers in two lines are none"
    assert marks_in(b"log times 2\n" + line) == []
    assert marks_in(b"") == []


@given(MARKS)
def test_thinning_keeps_the_newest_and_the_first_of_each_piece(marks: list[Mark]) -> None:
    raw = text(marks)
    left = marks_in(thinned(raw))
    assert all(mark in marks for mark in left)
    newest: list[Mark] = []
    while len(newest) < len(marks) and len(text(marks[len(marks) - len(newest) - 1 :])) - len(HEADER) < len(raw) // 4:
        newest = marks[len(marks) - len(newest) - 1 :]
    assert left[len(left) - len(newest) :] == newest
    for mark in marks:
        first = next(m for m in marks if m[:3] == mark[:3])
        assert first in left


def test_thinning_takes_a_good_third() -> None:
    raw = text([(number % 16, 1 + number % 2, 0, number, number) for number in range(10_000)])
    assert len(thinned(raw)) < 0.65 * len(raw)


def test_names() -> None:
    path = times_path(Path("/run/attempt-000/round-001"), 12)
    assert path.name == "times-node-00012"
    assert times_node(path.name) == 12
    assert times_node("rank-00012") is None
    assert times_node(".times-node-00012.55.ab") is None


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40_000)), min_size=1, max_size=80))
def test_a_byte_was_printed_at_the_time_that_is_known_or_up_to_10_ms_after_it(chunks: list[tuple[int, int]]) -> None:
    times, offset, now = RecentTimes(), 0, 10**15
    printed = []
    for count, later in chunks:
        now += later
        times.note(offset, now)
        printed += [now] * count
        offset += count
    assert all(0 <= at - times.at_us(place) < FINEST_US for place, at in enumerate(printed))
    assert times.at_us(-1) == 0


def test_the_newest_times_are_known_best() -> None:
    times = RecentTimes()
    for number in range(20 * MOST_RECENT):
        times.note(number * 100, number * 2 * FINEST_US)
    last = 20 * MOST_RECENT - 1
    assert all(times.at_us(number * 100) == number * 2 * FINEST_US for number in range(last - MOST_RECENT // 4, last))
    assert times.at_us(5) == 0 or times.at_us(5) <= 2 * FINEST_US
