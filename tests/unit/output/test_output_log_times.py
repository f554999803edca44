"""The times of a node's output: written, bounded, read again, thinned out, and never a reason to lose output."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.output.log_files import (
    FINEST_US,
    HEADER,
    MOST_RECENT,
    LogFile,
    RecentTimes,
    TimesFile,
    thinned,
    times_path,
)
from hpc_elastic.output.log_streams import read_marks, times_node
from hpc_elastic.run.log_pieces import PieceLimit

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


SECOND = 1_000_000


def marks_of(path: Path) -> list[tuple[int, int, int, int, int]]:
    return list(read_marks(path.read_bytes()))


def test_an_entry_at_most_every_10_ms(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times")
    stream = file.stream(3, 1)
    for number in range(100):
        stream.note(0, number * 10, SECOND + number * 1000)
    stream.release(1.0)
    assert [mark[3] for mark in marks_of(file.path)] == list(range(0, 1000, 100))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_clock_that_was_set_back_is_told_at_once(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times")
    stream = file.stream(0, 2)
    stream.note(0, 0, 9 * SECOND)
    stream.note(0, 5, 3 * SECOND)
    stream.release(1.0)
    assert [(mark[3], mark[4]) for mark in marks_of(file.path)] == [(0, 9 * SECOND), (5, 3 * SECOND)]


def test_offsets_count_in_each_piece_and_losses_count_too(tmp_path: Path) -> None:
    times = TimesFile(tmp_path / "times")
    path = tmp_path / "stdout.log"
    log = LogFile(
        path, on_end=list, on_loss=lambda *_: None, limit=PieceLimit(size=100, count=9), times=times.stream(0, 1)
    )
    for number in range(10):
        log.write(b"line %d of thirty bytes ........\n" % number, now=0.0, at_us=(number + 1) * SECOND)
    log.skip(7)
    log.write(b"after\n", now=0.0, at_us=20 * SECOND)
    log.finish()
    found = {(mark[2], mark[3]): mark[4] // SECOND for mark in marks_of(times.path)}
    for (piece, offset), second in found.items():
        where = path if piece == 3 else path.with_name(f"stdout.log.{piece:03d}")
        line = where.read_bytes()[offset:].split(b"\n")[0]
        assert line == (b"after" if second == 20 else b"line %d of thirty bytes ........" % (second - 1))
    assert len(found) == 11


def test_a_second_writer_of_a_round_goes_on_behind_the_first(tmp_path: Path) -> None:
    for offset in (0, 50):
        stream = TimesFile(tmp_path / "times").stream(0, 1)
        stream.note(0, offset, SECOND)
        stream.release(1.0)
    assert [mark[3] for mark in marks_of(tmp_path / "times")] == [0, 50]


def test_it_stays_small(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times", largest=20_000)
    stream = file.stream(0, 1)
    for number in range(30_000):
        stream.note(0, number * 100, SECOND + number * 50_000)
        if number % 20 == 0:
            file.flush(number / 20)
    stream.release(1e9)
    assert file.path.stat().st_size <= 20_000
    found = marks_of(file.path)
    assert found[0][3] == 0
    assert [mark[3] for mark in found[-100:]] == [number * 100 for number in range(29_900, 30_000)]
    assert found == sorted(found, key=lambda mark: mark[3])
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


def test_a_full_disk_costs_times_and_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TimesFile(tmp_path / "times")
    stream = file.stream(0, 1)
    really = os.pwrite
    stream.note(0, 0, SECOND)
    file.flush(1.0)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: really(fd, data[:5], at))
    stream.note(0, 10, 2 * SECOND)
    file.flush(2.0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    stream.note(0, 20, 3 * SECOND)
    file.flush(3.0)
    stream.note(0, 30, 4 * SECOND)
    file.flush(4.0)
    monkeypatch.setattr(os, "pwrite", really)
    stream.note(0, 40, 50 * SECOND)
    file.flush(50.0)
    stream.release(50.0)
    assert [mark[3] for mark in marks_of(file.path)] == [0, 40]


def test_no_file_where_nothing_is_printed(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times")
    streams = [file.stream(rank, 1) for rank in range(2)]
    for stream in streams:
        assert file.is_used
        stream.release(1.0)
    assert not file.is_used
    assert not file.path.exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "times").symlink_to(tmp_path / "elsewhere")
    stream = TimesFile(tmp_path / "times").stream(0, 1)
    stream.note(0, 0, SECOND)
    stream.release(1.0)
    assert not (tmp_path / "elsewhere").exists()
    assert HEADER.startswith(b"log times")
