"""The workers' output files, and the thread that alone writes them.

A shared filesystem may hang for a minute, and a disk may be full. Neither must reach the worker's ``print``: bytes
wait in a bounded queue. A slow disk slows the worker down in the end, as any redirection does; but where the disk makes
no progress at all for `PATIENCE_S`, or refuses, bytes are counted as lost, and the file says so in their place as soon
as it can be written again.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.atomic_file import make_private_dir
from hpc_elastic.clock import Clock
from hpc_elastic.errors import UnsafePathError

PATIENCE_S = 5.0
_RETRY_S = 1.0
_ITEM_COST = 200
_TOTAL_BYTES = 4 << 20
_FILE_BYTES = 512 << 10


class LogFile:
    """One output file. Its methods are for the writer's thread; `pending` and `skipped` are the queue's."""

    __slots__ = ("_fd", "_on_end", "_retry_at", "_unsaid", "failure", "lost", "path", "pending", "skipped", "written")

    def __init__(self, path: Path, on_end: Callable[[], None]) -> None:
        self.path = path
        self.pending = 0
        """Bytes in the queue."""
        self.skipped = 0
        """Bytes that were not queued, since the last item that was."""
        self.written = 0
        self.lost = 0
        """Bytes that will never be in the file."""
        self.failure: str | None = None
        """Why it cannot be written at the moment."""
        self._fd = -1
        self._unsaid = 0
        self._retry_at = 0.0
        self._on_end = on_end

    def write(self, data: bytes, *, now: float) -> None:
        """Write all of `data`, or count what could not be written. Blocks as long as the disk does."""
        if self.failure is not None and now < self._retry_at:
            self.drop(len(data))
            return
        view = memoryview(data)
        try:
            if self._fd < 0:
                self._fd = _open_for_append(self.path)
            if self._unsaid:
                notice = f"\n[… {self._unsaid} bytes lost here: {self.failure or 'the disk hung'}]\n".encode()
                _write_all(self._fd, memoryview(notice))
                self._unsaid = 0
            while view:
                count = os.write(self._fd, view)
                self.written += count
                view = view[count:]
            self.failure = None
        except (OSError, UnsafePathError) as error:
            self.failure = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self._retry_at = now + _RETRY_S
            self.drop(len(view))

    def drop(self, count: int) -> None:
        """Count bytes that are lost."""
        self.lost += count
        self._unsaid += count

    def finish(self) -> None:
        """Close it, with a last word on what it lacks."""
        if self._fd < 0 or self._unsaid:
            self.write(b"", now=float("inf"))  # a silent worker has its empty file
        if self._fd >= 0:
            try:
                os.close(self._fd)
            except OSError as error:  # a quota may be noticed only here
                self.failure = error.strerror
            self._fd = -1
        self._on_end()


def _open_for_append(path: Path) -> int:
    """Open our own file for writing at its end, making it and its folders (of ours) where they are missing.

    Not O_APPEND, which loses records on some network filesystems: there is one writer.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would block the open
    try:
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
        elif not stat.S_ISCHR(info.st_mode):  # /dev/null, where somebody wants none
            raise UnsafePathError(f"{path} is no regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _cost(item: bytes | int | None) -> int:
    return (len(item) if isinstance(item, bytes) else 0) + _ITEM_COST


class FileWriter:
    """The queue and the thread. `on_room` is called from that thread when a full queue has room again."""

    def __init__(self, *, clock: Clock, on_room: Callable[[], None], on_failure: Callable[[LogFile], None]) -> None:
        self._clock = clock
        self._on_room = on_room
        self._on_failure = on_failure
        self._queue: deque[tuple[LogFile, bytes | int | None]] = deque()  # to write; skipped; None: the end
        self._pending = 0
        self._progress_at = clock.monotonic()
        self._changed = threading.Condition()
        self._is_closing = False
        self._had_no_room = False
        self.written = 0
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="log-files", daemon=True)
        self._thread.start()

    def has_room(self, file: LogFile) -> bool:
        """Whether more of `file` may be queued. Where not, `on_room` will be called."""
        with self._changed:
            if file.pending < _FILE_BYTES and self._pending < _TOTAL_BYTES:
                return True
            self._had_no_room = True
            return False

    def is_hung(self) -> bool:
        """Whether the disk has taken nothing for `PATIENCE_S` though something waits."""
        with self._changed:
            return self._pending > 0 and self._clock.monotonic() - self._progress_at > PATIENCE_S

    def write(self, file: LogFile, data: bytes) -> None:
        """Queue `data`; the caller has asked `has_room`."""
        with self._changed:
            self._put(file, data)

    def skip(self, file: LogFile, count: int) -> None:
        """Give up `count` bytes of a stream whose file hangs. The file will say so in their place."""
        with self._changed:
            file.skipped += count
            self.lost += count

    def end(self, file: LogFile) -> None:
        """No more for `file`: close it behind what is queued."""
        with self._changed:
            self._put(file, None)

    def close(self, timeout: float) -> bool:
        """Write what waits, and end. Returns whether all was written within `timeout` seconds."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, timeout))
        with self._changed:
            self.lost += sum(len(item) for _, item in self._queue if isinstance(item, bytes))
            self._queue.clear()
        return not self._thread.is_alive()

    def _put(self, file: LogFile, item: bytes | int | None) -> None:
        if file.skipped:
            count, file.skipped = file.skipped, 0
            self._put(file, count)
        if not self._pending:
            self._progress_at = self._clock.monotonic()
        file.pending += _cost(item)
        self._pending += _cost(item)
        self._queue.append((file, item))
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closing:
                    self._changed.wait()
                if not self._queue:
                    return
                file, item = self._queue.popleft()
            self._do(file, item)

    def _do(self, file: LogFile, item: bytes | int | None) -> None:
        before, lost_before, failed_before = file.written, file.lost, file.failure is not None
        if item is None:
            file.finish()
        elif isinstance(item, int):
            file.drop(item)
            lost_before = file.lost  # `skip` has counted it
        else:
            file.write(item, now=self._clock.monotonic())
        with self._changed:
            file.pending -= _cost(item)
            self._pending -= _cost(item)
            self.written += file.written - before
            self.lost += file.lost - lost_before
            self._progress_at = self._clock.monotonic()
            tell_room, self._had_no_room = self._had_no_room, False
        if file.failure is not None and not failed_before:
            self._on_failure(file)
        if tell_room:
            self._on_room()
