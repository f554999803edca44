"""When what was printed: the lines of a file that stands beside the output files of one node's ranks.

Below a line with the version: ``RANK STREAM PIECE OFFSET MICROSECONDS``, up to every 10 ms of a stream. What stands at
OFFSET of that piece (a rotated file's number, from 0; the one that is being written has the next free one), up to the
next such place, was printed at that time of the node's wall clock, or after it. The
file stays below 512 KiB: when it is full, its older three quarters lose every second entry of each stream, so that the
end of a round, where failures are, is known best. Entries wait in memory for a second; what can't be written is
dropped.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from hpc_elastic.base.files import Owner, open_checked, write_private
from hpc_elastic.errors import UnsafePathError

HEADER = b"log times 1\n"
LARGEST = 512 << 10
"""Bytes from which on it is thinned out."""
FINEST_US = 10_000
STDOUT, STDERR = 1, 2
_LINE = re.compile(rb"(\d{1,9}) ([12]) (\d{1,9}) (\d{1,15}) (\d{1,18})")
_LONGEST_NUMBER = 18
_WHOLE_SHARE = 4
"""One part of so many, the newest, stays whole."""


def times_path(round_dir: Path, node: int) -> Path:
    return round_dir / f"times-node-{node:05d}"


def times_node(name: str) -> int | None:
    """``times-node-00012`` → 12; None for any other name."""
    match = re.fullmatch(r"times-node-(\d{5,})", name)
    return int(match[1]) if match else None


def read_marks(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Rank, stream, piece, offset, microseconds. Torn and foreign lines are left out, and all of another version."""
    if not raw.startswith(HEADER):
        return
    body = raw[len(HEADER) : raw.rfind(b"\n") + 1]
    words = body.split()
    is_plain = len(words) == 5 * body.count(b"\n") and max(map(len, words), default=0) <= _LONGEST_NUMBER
    if is_plain and body.count(b" ") == 4 * body.count(b"\n") and b"".join(words).isdigit():
        numbers = map(int, words)
        yield from zip(numbers, numbers, numbers, numbers, numbers, strict=True)
        return
    for line in body.split(b"\n"):
        match = _LINE.fullmatch(line)
        if match is not None:
            rank, stream, piece, offset, time_us = map(int, match.groups())
            yield rank, stream, piece, offset, time_us


def thinned(raw: bytes) -> bytes:
    """A file's bytes without every second entry of each stream in its older part, but for the first of each piece."""
    whole_from = raw.find(b"\n", len(raw) - len(raw) // _WHOLE_SHARE) + 1 or len(raw)
    kept = [HEADER]
    seen: dict[bytes, int] = {}
    for line in raw[: min(whole_from, len(raw))].split(b"\n"):
        if _LINE.fullmatch(line) is None:
            continue
        key = b" ".join(line.split(b" ", 3)[:3])
        count = seen.get(key, 0)
        seen[key] = count + 1
        if count % 2 == 0:
            kept.append(line + b"\n")
    kept.append(raw[whole_from:])
    return b"".join(kept)


MOST_RECENT = 1024


class RecentTimes:
    """The end of one stream, where failures are, to 10 ms, in memory. Two threads may use it."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []

    def note(self, offset: int, at_us: int) -> None:
        marks = self._marks
        if marks and 0 <= at_us - marks[-1][1] < FINEST_US:
            return
        if len(marks) >= MOST_RECENT:
            whole = len(marks) - len(marks) // _WHOLE_SHARE
            marks = self._marks = marks[:whole:2] + marks[whole:]
        marks.append((offset, at_us))

    def at_us(self, offset: int) -> int:
        """When the byte at `offset` was printed, or up to 10 ms before that; 0: not known."""
        marks = self._marks
        at = bisect_right(marks, offset, key=lambda mark: mark[0]) - 1
        return marks[at][1] if at >= 0 else 0


FLUSH_S = 1.0
_RETRY_S = 10.0
_MOST_WAITING = 4096


class TimesFile:
    def __init__(self, path: Path, *, largest: int = LARGEST) -> None:
        self.path = path
        self._largest = largest
        self._fd = -1
        self._size = 0
        self._waiting: list[bytes] = []
        self._users = 0
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._is_torn = False
        """The last write was cut short: the next one begins on a line of its own."""

    def stream(self, rank: int, number: int) -> StreamTimes:
        with self._lock:
            self._users += 1
        return StreamTimes(self, rank, number)

    @property
    def is_used(self) -> bool:
        return self._users > 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, line: bytes) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(line)

    def flush(self, now: float) -> None:
        """Write what waits at `now`, seconds, monotonic. Never raises."""
        if not self._waiting or now < self._retry_at:
            self._waiting.clear()
            return
        data = b"".join(self._waiting)
        self._waiting.clear()
        try:
            self._open()
            if self._is_torn:
                data = b"\n" + data
            self._is_torn = True
            done = os.pwrite(self._fd, data, self._size)
            self._size += done
            self._is_torn = done < len(data)
            if self._size > self._largest:
                write_private(self.path, thinned(os.pread(self._fd, self._size, 0)))
                self._close()
        except (OSError, UnsafePathError):
            self._retry_at = now + _RETRY_S
            self._close()

    def release(self, now: float) -> None:
        with self._lock:
            self._users -= 1
        if not self.is_used:
            self.flush(now)
            self._close()

    def _open(self) -> None:
        if self._fd >= 0:
            return
        self._fd = open_checked(self.path, os.O_RDWR | os.O_CREAT, owner=Owner.OWN)
        self._size = os.fstat(self._fd).st_size or os.pwrite(self._fd, HEADER, 0)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                pass  # a quota may be noticed only here


class StreamTimes:
    __slots__ = ("_at_us", "_file", "_number", "_place", "_rank")

    def __init__(self, file: TimesFile, rank: int, number: int) -> None:
        self._file = file
        self._rank = rank
        self._number = number
        self._place = -1
        self._at_us = 0

    def note(self, piece: int, offset: int, at_us: int) -> None:
        if piece == self._place and 0 <= at_us - self._at_us < FINEST_US:
            return
        self._place, self._at_us = piece, at_us
        self._file.add(b"%d %d %d %d %d\n" % (self._rank, self._number, piece, offset, at_us))

    def release(self, now: float) -> None:
        self._file.release(now)
