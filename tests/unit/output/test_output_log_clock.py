"""The file with the times of a node's output: small, bounded, and never a reason to lose output."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpc_elastic.output.log_files import HEADER, LogFile, TimesFile
from hpc_elastic.output.log_streams import read_marks
from hpc_elastic.run.log_pieces import PieceLimit

SECOND = 1_000_000


def marks(path: Path) -> list[tuple[int, int, int, int, int]]:
    return list(read_marks(path.read_bytes()))


def test_an_entry_at_most_every_10_ms(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times")
    stream = file.stream(3, 1)
    for number in range(100):
        stream.note(0, number * 10, SECOND + number * 1000)
    stream.release(1.0)
    assert [mark[3] for mark in marks(file.path)] == list(range(0, 1000, 100))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_clock_that_was_set_back_is_told_at_once(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times")
    stream = file.stream(0, 2)
    stream.note(0, 0, 9 * SECOND)
    stream.note(0, 5, 3 * SECOND)
    stream.release(1.0)
    assert [(mark[3], mark[4]) for mark in marks(file.path)] == [(0, 9 * SECOND), (5, 3 * SECOND)]


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
    found = {(mark[2], mark[3]): mark[4] // SECOND for mark in marks(times.path)}
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
    assert [mark[3] for mark in marks(tmp_path / "times")] == [0, 50]


def test_it_stays_small(tmp_path: Path) -> None:
    file = TimesFile(tmp_path / "times", largest=20_000)
    stream = file.stream(0, 1)
    for number in range(30_000):
        stream.note(0, number * 100, SECOND + number * 50_000)
        if number % 20 == 0:
            file.flush(number / 20)
    stream.release(1e9)
    assert file.path.stat().st_size <= 20_000
    found = marks(file.path)
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
    assert [mark[3] for mark in marks(file.path)] == [0, 40]


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
