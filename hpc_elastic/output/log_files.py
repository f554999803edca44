"""The workers' output files, and the thread that alone writes them: a hung or full disk must not reach a ``print``.

When a line was printed stands in a file beside those of one node's ranks. Below a line with the version: ``RANK STREAM
PIECE OFFSET MICROSECONDS``, up to every 10 ms of a stream. What stands at OFFSET of that piece (a rotated file's
number, from 0; the one that is being written has the next free one), up to the next such place, was printed at that
time of the node's wall clock, or after it. The file stays below 512 KiB: when it is full, its older three quarters lose
every second entry of each stream, so that the end of a round, where failures are, is known best. Entries wait in memory
for a second; what can't be written is dropped.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import Owner, make_private_dir, open_checked, write_private
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.run.log_pieces import PieceLimit, find_pieces, piece_path, to_remove

HEADER = b"log times 1\n"
LARGEST = 512 << 10
"""Bytes from which on it is thinned out."""
FINEST_US = 10_000
STDOUT, STDERR = 1, 2
MARK = re.compile(rb"(\d{1,9}) ([12]) (\d{1,9}) (\d{1,15}) (\d{1,18})")
_WHOLE_SHARE = 4
"""One part of so many, the newest, stays whole."""


def times_path(round_dir: Path, node: int) -> Path:
    return round_dir / f"times-node-{node:05d}"


def thinned(raw: bytes) -> bytes:
    """A file's bytes without every second entry of each stream in its older part, but for the first of each piece."""
    whole_from = raw.find(b"\n", len(raw) - len(raw) // _WHOLE_SHARE) + 1 or len(raw)
    kept = [HEADER]
    seen: dict[bytes, int] = {}
    for line in raw[: min(whole_from, len(raw))].split(b"\n"):
        if MARK.fullmatch(line) is None:
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
_TIMES_RETRY_S = 10.0
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
            self._retry_at = now + _TIMES_RETRY_S
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


_RETRY_S = 1.0
_ITEM_COST = 200
_TOTAL_BYTES = 4 << 20
_FILE_BYTES = 512 << 10
HANGS = "the disk hangs"
_KEPT_BYTES = 16 << 10
"""Enough for the traceback that a worker ends with, where the disk is full."""


class LogFile:
    """One output file. Its methods are for the writer's thread; `pending` and `skipped` are the queue's."""

    def __init__(
        self,
        path: Path,
        *,
        on_end: Callable[[], None],
        on_loss: Callable[[int, str], None],
        limit: PieceLimit | None = None,
        times: StreamTimes | None = None,
        makes_empty: bool = True,
    ) -> None:
        """`on_loss`: so many bytes will never be in it, and why; it is called from any thread."""
        self.path = path
        self.pending = 0
        self.skipped = 0
        self.written = 0
        self.failure: str | None = None
        self.unwritten = b""
        """The end of what was refused since the last bytes that were written; at most `_KEPT_BYTES`."""
        self.on_loss = on_loss
        self._limit = limit
        self._times = times
        self._makes_empty = makes_empty
        self._recent = RecentTimes()
        self._total = 0
        self._pieces: list[int] | None = None
        self._fd = -1
        self._at = 0
        self._unsaid = 0
        self._retry_at = 0.0
        self._rotate_at = 0.0
        self._on_end = on_end

    def write(self, data: bytes, *, now: float, at_us: int = 0) -> None:
        """Blocks as long as the disk does. `now`: seconds, monotonic; `at_us`: when it was printed; 0: unknown."""
        if self.failure is not None and now < self._retry_at:
            self._lose(data)
            return
        done = 0
        try:
            self._open()
            if self._unsaid:
                mark = f"\n[… {self._unsaid} bytes lost here: {self.failure or HANGS}]\n".encode()
                left = memoryview(mark)
                while left:
                    left = left[os.write(self._fd, left) :]
                self._at += len(mark)
                self._total += len(mark)
                self._unsaid = 0
            if at_us and data:
                self._recent.note(self._total, at_us)
            while done < len(data):
                end = len(data) if self._limit is None else self._piece_end(data, done, self._limit, now)
                if self._times is not None and at_us:
                    self._times.note(self._pieces[-1] + 1 if self._pieces else 0, self._at, at_us)
                count = os.write(self._fd, memoryview(data)[done:end])
                self.written += count
                self._at += count
                self._total += count
                done += count
            self.failure = None
            if data:
                self.unwritten = b""
        except (OSError, UnsafePathError) as error:
            self.failure = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self._retry_at = now + _RETRY_S
            self._lose(data[done:])

    def printed_ns(self, before_end: int) -> int:
        """The wall-clock time at which the byte so many bytes before the end was printed; 0: not known."""
        return self._recent.at_us(self._total - before_end) * 1000

    def skip(self, count: int) -> None:
        self._unsaid += count

    def _lose(self, data: bytes) -> None:
        self._unsaid += len(data)
        if data:
            self.unwritten = (self.unwritten + data)[-_KEPT_BYTES:]
            self.on_loss(len(data), self.failure or HANGS)

    def _open(self) -> None:
        if self._fd < 0:
            self._fd = _open_for_append(self.path)
            try:
                self._at = os.lseek(self._fd, 0, os.SEEK_CUR)
            except OSError:
                self._at = 0  # what is no file has no places in it
            if self._limit is not None and self._pieces is None:
                try:
                    self._pieces = find_pieces(self.path)
                except OSError:
                    pass  # it is asked again when the first piece is full

    def _piece_end(self, data: bytes, done: int, limit: PieceLimit, now: float) -> int:
        """Up to where `data` goes into this piece: to the end of a line, where there is one. Rotates before, if due."""
        end = done + limit.size - self._at
        if end >= len(data):
            return len(data)
        cut = data.rfind(b"\n", done, end) + 1 if end > done else 0
        if cut > done:
            return cut
        is_due = self._at >= limit.size or self._at > limit.size // 2 or data.find(b"\n", done) >= 0
        if self._at and is_due and now >= self._rotate_at:
            self._rotate(limit, now)
            if not self._at:
                return self._piece_end(data, done, limit, now)
        return end if end > done else len(data)

    def _rotate(self, limit: PieceLimit, now: float) -> None:
        """What can't be renamed is written on: rather too large than lost."""
        try:
            if self._pieces is None:
                self._pieces = find_pieces(self.path)
            number = self._pieces[-1] + 1 if self._pieces else 0
            os.rename(self.path, piece_path(self.path, number))
        except OSError:
            self._rotate_at = now + _RETRY_S
            return
        self._pieces.append(number)
        fd, self._fd = self._fd, -1
        os.close(fd)
        for old in to_remove(self._pieces, limit.count):
            try:
                os.unlink(piece_path(self.path, old))
            except FileNotFoundError:
                pass
            except OSError:
                continue  # with the next one
            self._pieces.remove(old)
        self._open()

    def finish(self, *, now: float = 0.0) -> None:
        if self._unsaid or (self._fd < 0 and self._makes_empty):
            self.write(b"", now=math.inf)
        if self._fd >= 0:
            try:
                os.close(self._fd)
            except OSError as error:  # a quota may be noticed only here
                self.failure = error.strerror
            self._fd = -1
        if self._times is not None:
            self._times.release(now)
        self._on_end()


def _open_for_append(path: Path) -> int:
    """Not O_APPEND, which loses records on some network filesystems: there is one writer."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would block the open
    try:
        return os.open(path, flags | os.O_EXCL, 0o600)
    except FileExistsError:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        for folder in (path.parent.parent, path.parent):
            make_private_dir(folder)
        fd = os.open(path, flags, 0o600)
    try:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode):
            if info.st_uid != os.geteuid():
                raise UnsafePathError(f"{path} belongs to uid {info.st_uid}, not to you")
            os.fchmod(fd, 0o600)
            os.lseek(fd, 0, os.SEEK_END)
        elif not stat.S_ISCHR(info.st_mode):  # /dev/null, where the user wants none
            raise UnsafePathError(f"{path} is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _cost(item: bytes | int | None) -> int:
    return (len(item) if isinstance(item, bytes) else 0) + _ITEM_COST


class FileWriter:
    """The queue and the thread. `on_room` is called from that thread when a full queue has room again."""

    def __init__(self, *, clock: Clock, on_room: Callable[[], None]) -> None:
        self._clock = clock
        self._on_room = on_room
        self._queue: deque[tuple[LogFile, bytes | int | None, int]] = deque()  # to write; skipped; None: the end
        self._times: dict[Path, TimesFile] = {}
        self._flush_at = 0.0
        self._pending = 0
        self._in_flight: tuple[LogFile, int] | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._had_no_room = False
        self.written = 0
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="log-files", daemon=True)
        self._thread.start()

    def times(self, path: Path) -> TimesFile:
        """The entries that lie at `path`: one object for all streams. For the thread that adds files alone."""
        for other in [other for other, file in self._times.items() if not file.is_used]:
            del self._times[other]
        return self._times.setdefault(path, TimesFile(path))

    def has_room(self, file: LogFile) -> bool:
        """If no more of `file` may be queued, `on_room` will be called."""
        with self._changed:
            if file.pending < _FILE_BYTES and self._pending < _TOTAL_BYTES:
                return True
            self._had_no_room = True
            return False

    def write(self, file: LogFile, data: bytes) -> None:
        """Queue `data`, which was printed now; the caller has asked `has_room`."""
        at_us = self._clock.time_ns() // 1000
        with self._changed:
            self._put(file, data, at_us)

    def skip(self, file: LogFile, count: int) -> None:
        with self._changed:
            file.skipped += count
            self.lost += count
        file.on_loss(count, file.failure or HANGS)

    def end(self, file: LogFile) -> None:
        with self._changed:
            self._put(file, None)

    def close(self, timeout: float) -> bool:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, timeout))
        with self._changed:
            left = [(file, len(item)) for file, item, _ in self._queue if isinstance(item, bytes)]
            if self._in_flight is not None:
                left.insert(0, self._in_flight)
            self._queue.clear()
            self.lost += sum(count for _, count in left)
        for file, count in left:
            file.on_loss(count, file.failure or HANGS)
        return not self._thread.is_alive()

    def _put(self, file: LogFile, item: bytes | int | None, at_us: int = 0) -> None:
        if file.skipped:
            count, file.skipped = file.skipped, 0
            self._put(file, count)
        file.pending += _cost(item)
        self._pending += _cost(item)
        self._queue.append((file, item, at_us))
        self._changed.notify()

    def _run(self) -> None:
        while True:
            # Times wait for a second at most, also where nothing more is printed.
            is_waiting = any(times.is_waiting for times in list(self._times.values()))
            with self._changed:
                while not self._queue and not self._is_closing:
                    if not self._changed.wait(FLUSH_S if is_waiting else None):
                        break
                found = self._queue.popleft() if self._queue else None
                if found is None and self._is_closing:
                    return
                if found is not None and isinstance(found[1], bytes):
                    self._in_flight = (found[0], len(found[1]))
            now = self._clock.monotonic()
            if found is not None:
                self._do(*found, now)
            if is_waiting and (found is None or now >= self._flush_at):
                self._flush_at = now + FLUSH_S
                for times in list(self._times.values()):
                    times.flush(now)

    def _do(self, file: LogFile, item: bytes | int | None, at_us: int, now: float) -> None:
        before = file.written
        if item is None:
            file.finish(now=now)
        elif isinstance(item, int):
            file.skip(item)
        else:
            file.write(item, now=now, at_us=at_us)
        written = file.written - before
        with self._changed:
            file.pending -= _cost(item)
            self._pending -= _cost(item)
            self.written += written
            if isinstance(item, bytes):
                self.lost += len(item) - written
            self._in_flight = None
            tell_room, self._had_no_room = self._had_no_room, False
        if tell_room:
            self._on_room()
