"""One output file: written, rotated, full, back again; and how long a disk may hold workers up."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.output import log_files
from hpc_elastic.output.log_files import LogFile
from hpc_elastic.output.pump import DISK_PATIENCE_S, HoldBudget
from hpc_elastic.run.log_pieces import PieceLimit, find_pieces, piece_path


class _Watched:
    """A file, and what it told."""

    def __init__(self, path: Path, limit: PieceLimit | None = None) -> None:
        self.path = path
        self.lost: list[tuple[int, str]] = []
        self.ended = 0
        self.file = LogFile(path, on_end=self._end, on_loss=lambda *loss: self.lost.append(loss), limit=limit)

    def _end(self) -> None:
        self.ended += 1

    def write(self, *parts: bytes, now: float = 0.0) -> None:
        for part in parts:
            self.file.write(part, now=now)

    def pieces(self) -> list[bytes]:
        paths = [piece_path(self.path, number) for number in find_pieces(self.path)]
        return [path.read_bytes() for path in [*paths, self.path]]


def test_rotated_at_line_ends_with_the_first_and_the_latest_kept(tmp_path: Path) -> None:
    watched = _Watched(tmp_path / "stdout.log", PieceLimit(size=100, count=3))
    lines = [b"line %03d of thirty bytes ......\n" % number for number in range(20)]
    watched.write(*lines)
    watched.file.finish()
    pieces = watched.pieces()
    assert pieces[0] == b"".join(lines[:3]), "the first one stays"
    assert find_pieces(watched.path)[0] == 0
    assert len(pieces) == 3
    assert b"".join(pieces[1:]) == b"".join(lines[-len(b"".join(pieces[1:])) // len(lines[0]) :]), "and the latest"
    assert max(map(len, pieces)) <= 100
    assert not watched.lost
    assert watched.file.written == sum(map(len, lines))
    assert watched.ended == 1


@given(
    chunks=st.lists(
        st.sampled_from([b"a", b"bb\n", b"\n", b"c" * 30, b"d" * 29 + b"\n", b"e" * 130, b"f\n" * 80]), max_size=30
    ),
    size=st.integers(20, 60),
)
def test_every_byte_is_in_one_piece_and_no_piece_is_too_large(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], size: int
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    folder.chmod(0o700)
    watched = _Watched(folder / "stdout.log", PieceLimit(size=size, count=1000))
    watched.write(*chunks)
    watched.file.finish()
    pieces = watched.pieces()
    assert b"".join(pieces) == b"".join(chunks)
    assert max(map(len, pieces)) <= size
    longest = max((len(line) for line in b"".join(chunks).split(b"\n")), default=0)
    if longest < size // 2 and all(chunk.endswith(b"\n") for chunk in chunks):
        assert all(piece.endswith(b"\n") for piece in pieces if piece), "no line is cut that need not be"


def test_an_agent_that_comes_back_goes_on_counting(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        watched = _Watched(tmp_path / "stdout.log", PieceLimit(size=8, count=10))
        watched.write(text * 3)
        watched.file.finish()
    assert watched.pieces() == [b"one\none\n", b"one\ntwo\n", b"two\ntwo\n"]


def test_what_cannot_be_renamed_is_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(tmp_path / "stdout.log", PieceLimit(size=8, count=2))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(log_files.os, "rename", refuse)
        watched.write(b"one\ntwo\nthree\n", b"four\n", now=10.0)
        assert watched.pieces() == [b"one\ntwo\nthree\nfour\n"]
        assert not watched.lost
    watched.write(b"five\n", now=10.5)
    assert len(watched.pieces()) == 1, "not asked again at once"
    watched.write(b"six\n", now=12.0)
    assert watched.pieces() == [b"one\ntwo\nthree\nfour\nfive\n", b"six\n"]


def test_a_disk_that_fills_up_while_rotating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(tmp_path / "stdout.log", PieceLimit(size=8, count=3))
    watched.write(b"one\ntwo\n")
    really_open = os.open

    def full(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(28, "No space left on device")
        return really_open(path, flags, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(log_files.os, "open", full)
        watched.write(b"three\n", now=5.0)
        watched.write(b"four\n", now=5.5)
    assert watched.lost == [(6, "No space left on device"), (5, "No space left on device")]
    watched.write(b"five\n", now=7.0)
    watched.file.finish()
    assert (
        b"".join(watched.pieces()) == b"one\ntwo\n\n[\xe2\x80\xa6 11 bytes lost here: No space left on device]\nfive\n"
    )


def test_skipped_bytes_are_told_of_in_their_place_and_counted_by_who_skipped(tmp_path: Path) -> None:
    watched = _Watched(tmp_path / "stdout.log")
    watched.write(b"one\n")
    watched.file.skip(70)
    watched.write(b"two\n")
    assert watched.path.read_text() == "one\n\n[… 70 bytes lost here: the disk hangs]\ntwo\n"
    assert not watched.lost


def test_workers_wait_for_a_disk_that_hangs_for_five_seconds_in_all() -> None:
    budget = HoldBudget(now=0.0)
    assert budget.may_hold(now=100.0, written=0, holding=False), "idle time costs nothing"
    assert budget.may_hold(now=100.0 + DISK_PATIENCE_S - 0.1, written=0, holding=True)
    assert not budget.may_hold(now=100.0 + DISK_PATIENCE_S, written=0, holding=True)
    assert not budget.may_hold(now=1000.0, written=0, holding=False), "nor does time alone give it back"
    # It woke up, and took 2 MiB: 2 s more, not 5.
    assert budget.may_hold(now=1000.0, written=2 << 20, holding=False)
    assert budget.may_hold(now=1001.9, written=2 << 20, holding=True)
    assert not budget.may_hold(now=1002.1, written=2 << 20, holding=True)


def test_the_end_of_what_a_full_disk_refuses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(tmp_path / "stderr.log")
    watched.write(b"before\n")
    assert watched.file.unwritten == b""
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log_files.os, "write", full)
    watched.write(b"Traceback\n", b"ValueError: bad\n")
    assert watched.file.unwritten == b"Traceback\nValueError: bad\n"
    watched.write(b"x" * 20_000)
    assert watched.file.unwritten == b"x" * (16 << 10), "and no more than that"
    monkeypatch.setattr(log_files.os, "write", write)
    watched.file.finish()
    assert watched.file.unwritten == b"x" * (16 << 10), "the note that stands in its place is no reason to forget it"
    watched.write(b"after\n", now=100.0)
    assert watched.file.unwritten == b""


def test_the_end_of_a_file_has_its_times(tmp_path: Path) -> None:
    watched = _Watched(tmp_path / "stderr.log")
    watched.file.write(b"first line\n", now=0.0, at_us=1_000_000)
    watched.file.write(b"Traceback\n", now=1.0, at_us=2_000_000)
    watched.file.write(b"ValueError\n", now=1.0, at_us=2_005_000)
    watched.file.finish()
    size = len(b"Traceback\nValueError\n")
    assert watched.file.printed_ns(size) == watched.file.printed_ns(1) == 2_000_000_000
    assert watched.file.printed_ns(size + 1) == 1_000_000_000
    assert watched.file.printed_ns(size + 100) == 0
