"""Writes down when workers printed what (`log_times`). For the thread that writes their files; never at their expense.

Entries wait in memory for a second, so that whatever is printed costs one small write a second at most. What can't be
written is dropped: the output itself is what counts.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from hpc_elastic.atomic_file import write_private
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.log_times import FINEST_US, HEADER, LARGEST, TimeMark, mark_line, thinned

FLUSH_S = 1.0
_RETRY_S = 10.0
_MOST_WAITING = 4096
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class TimesFile:
    """The entries of one node in one round. It is open while one of its streams is."""

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
        """One stream's part; it is to be released."""
        with self._lock:
            self._users += 1
        return StreamTimes(self, rank, number)

    @property
    def is_used(self) -> bool:
        """Whether one of its streams has not ended."""
        return self._users > 0

    @property
    def is_waiting(self) -> bool:
        """Whether entries wait to be written."""
        return bool(self._waiting)

    def add(self, mark: TimeMark) -> None:
        """Keep an entry until `flush`."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(mark_line(mark))

    def flush(self, now: float) -> None:
        """Write what waits. Never raises.

        Args:
            now: Seconds, monotonic.
        """
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
                self._thin_out()
        except (OSError, UnsafePathError):
            self._retry_at = now + _RETRY_S
            self._close()

    def release(self, now: float) -> None:
        """One stream has ended."""
        with self._lock:
            self._users -= 1
        if not self.is_used:
            self.flush(now)
            self._close()

    def _open(self) -> None:
        if self._fd >= 0:
            return
        self._fd = os.open(self.path, _FLAGS, 0o600)
        info = os.fstat(self._fd)
        if info.st_uid != os.geteuid():
            raise UnsafePathError(f"{self.path} belongs to uid {info.st_uid}, not to you")
        os.fchmod(self._fd, 0o600)
        self._size = info.st_size
        if not self._size:
            self._size = os.pwrite(self._fd, HEADER, 0)

    def _thin_out(self) -> None:
        raw = thinned(os.pread(self._fd, self._size, 0))
        write_private(self.path, raw)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                pass  # a quota may be noticed only here


class StreamTimes:
    """One stream's part of a `TimesFile`."""

    __slots__ = ("_at_us", "_file", "_number", "_place", "_rank")

    def __init__(self, file: TimesFile, rank: int, number: int) -> None:
        self._file = file
        self._rank = rank
        self._number = number
        self._place = -1
        """The piece of the last entry."""
        self._at_us = 0

    def note(self, piece: int, offset: int, at_us: int) -> None:
        """What will be written at `offset` of `piece` was printed at `at_us`."""
        if piece == self._place and 0 <= at_us - self._at_us < FINEST_US:
            return
        self._place, self._at_us = piece, at_us
        self._file.add(TimeMark(self._rank, self._number, piece, offset, at_us))

    def release(self, now: float) -> None:
        """It has ended."""
        self._file.release(now)
