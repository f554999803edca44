"""Moving the workers' output: from their pipes into their files, and what is to be shown into the job log.

Three threads, so that nothing waits for what may hang: the pump reads the pipes, `log_files.FileWriter` writes the
per-rank files, `job_log.JobLog` the agent's stdout. Supervision (the main thread) waits for none of them.

What a worker's ``print`` may be held up for, at most: 0.5 s by a job log that is not read, and 1/50 of the time in the
long run; 5 s by files on a disk that takes nothing, and as long as it takes by one that takes more than 1 MiB/s. The
rest is lost, counted and logged (`losses`). Memory, whatever the workers print: 4 MiB for the files, 2 MiB for the job
log, 64 KiB per stream for lines that have begun and for its reserve, and some hundred KiB for what is being moved.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import Waker
from hpc_elastic.output.job_log import JobLog, JobLogSource, LossBook, StreamAccount
from hpc_elastic.output.log_files import STDERR, STDOUT, FileWriter, LogFile, times_path
from hpc_elastic.output.terminal import LineSplitter
from hpc_elastic.run.agent_events import OutputLost
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.log_pieces import PieceLimit
from hpc_elastic.run.option_values import Std
from hpc_elastic.workers.spawn import WorkerProcess

_READ_BYTES = 256 << 10
_PARTIAL_S = 1.0
_AGAIN_S = 5.0
"""Between two states of a progress bar in the job log."""
_NAP_S = 0.01
_PAUSED_LOOK_S = 0.5
# How long the pump, and so a worker that prints without end, may be held up by a job log that cannot keep up: half a
# second for a burst, and one fiftieth of the time in the long run. The rest is dropped and counted.
_PATIENCE_S = 0.5
_PATIENCE_SHARE = 0.02
_PATIENCE_STEP_S = 0.02
_HELD_S = 10.0
"""A worker that goes on for longer after a traceback has only logged it."""
_HELD_AFTER_END_S = 60.0
_HELD_BYTES = 64 << 10
_LAST_WORDS = (b"Traceback (most recent call last)", b"Fatal Python error: ", b"terminate called ")
DISK_PATIENCE_S = 5.0
SLOWEST_DISK = 1 << 20
"""Bytes per second from which on a disk is slow, not hung, and workers wait for it as long as it takes."""
_SMALLEST_PIPE = 4096
_F_GETPIPE_SZ = 1032  # fcntl.F_GETPIPE_SZ, which some builds lack


class HoldBudget:
    """`DISK_PATIENCE_S` at first; each second of it that is used comes back with a MiB that the disk takes. Pure."""

    def __init__(self, *, now: float) -> None:
        self._left = DISK_PATIENCE_S
        self._at = now
        self._written = 0

    def may_hold(self, *, now: float, written: int, holding: bool) -> bool:
        """`written`: bytes that the disk has taken; `holding`: whether a writer was held up since the last call."""
        self._left += (written - self._written) / SLOWEST_DISK
        if holding:
            self._left -= now - self._at
        self._left = min(self._left, DISK_PATIENCE_S)
        self._at, self._written = now, written
        return self._left > 0


class HeldEnd(Struct):
    """The traceback at the end of a worker's stderr. The job log has it once its agent knows what it is worth."""

    text: bytes
    """Empty: the job log has it, since the worker took long to end."""
    since: float
    show: Callable[[bytes], object]

    def add(self, lines: bytes) -> bytes:
        self.text += lines
        text, self.text = (self.text, b"") if len(self.text) > _HELD_BYTES else (b"", self.text)
        return text


class _Duplicate:
    def __init__(self, path: Path, texts: Sequence[str], prefix: str, limit: PieceLimit | None) -> None:
        self.file = LogFile(path, on_end=lambda: None, on_loss=lambda count, why: None, limit=limit)
        self._texts = [text.encode() for text in texts]
        self._prefix = prefix.encode()

    def choose(self, lines: bytes) -> bytes:
        kept = (line for line in lines.splitlines(keepends=True) if any(text in line for text in self._texts))
        return b"".join(self._prefix + line for line in kept)


class _Stream:
    def __init__(
        self, fd: int, file: LogFile, account: StreamAccount, duplicate: _Duplicate | None, pid: int | None
    ) -> None:
        self.fd = fd
        self.pid = pid
        """The worker whose traceback is held; None: not on this stream."""
        self.held: HeldEnd | None = None
        self.duplicate = duplicate
        self.file = file
        self.account = account
        self.source = account.source
        """None: not shown in the job log."""
        self.splitter = LineSplitter()
        self.partial_since: float | None = None
        self.shown_again_at = -math.inf
        try:
            capacity: int = fcntl.fcntl(fd, _F_GETPIPE_SZ)
        except OSError:
            capacity = _SMALLEST_PIPE
        self.flood = min(_READ_BYTES, capacity) // 4
        """Bytes in one read from which on the pipe fills so fast that the pump must not nap."""


class LogPump:
    """Moves the output of a node's workers. Its methods are for the main thread; only `drained` and `close` wait."""

    def __init__(
        self,
        *,
        host: str,
        clock: Clock,
        job_log: JobLog,
        limit: PieceLimit | None = None,
        node: int | None = None,
        duplicate_filters: Mapping[Std, Sequence[str]] | None = None,
    ) -> None:
        """`clock`: for waits; `node`: whose times are kept beside the ranks' folders; None: nobody's."""
        self._host = host
        self._clock = clock
        self._job_log = job_log
        self._limit = limit
        self._node = node
        self._filters = duplicate_filters or {}
        self._waker = Waker()
        self.files = FileWriter(clock=clock, on_room=self._waker.wake)
        self._losses = LossBook(clock=clock, log=lambda line: job_log.write_line(f"[{host}] {line}"))
        self._budget = HoldBudget(now=clock.monotonic())
        self._streams: dict[int, _Stream] = {}
        self._paused: set[_Stream] = set()
        self._outputs: dict[int, threading.Event] = {}
        """Pid → set when both streams are at their end and in their files."""
        self._held: dict[int, HeldEnd] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._waker, select.EPOLLIN)
        self._hurry = threading.Event()
        self._close_by: float | None = None
        self._is_closed = False
        self.read = 0
        self._patience = _PATIENCE_S
        self._patience_at = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._thread.start()

    def add(self, *, rank: int, worker: WorkerProcess, stdout: Path, stderr: Path, shown: Std) -> LogFile:
        """Returns the file of its stderr; the files and their folder are made as needed, for our user alone."""
        pid, left = worker.pid, [STDOUT, STDERR]
        ended = self._outputs[pid] = threading.Event()

        def end_one() -> None:  # in the thread of the files' writer
            left.pop()
            if not left:
                ended.set()
                if self._outputs.get(pid) is ended:
                    del self._outputs[pid]

        for fd, path, std in zip(worker.take_output(), (stdout, stderr), (Std.OUT, Std.ERR), strict=True):
            prefix = f"[{self._host}:{rank}] "
            account = self._losses.open(
                StreamAccount(
                    rank=rank,
                    stream="stdout" if std is Std.OUT else "stderr",
                    path=path,
                    source=self._job_log.source(prefix) if std & shown else None,
                )
            )
            times = None
            if self._node is not None:
                times = self.files.times(times_path(path.parent.parent, self._node))
            file = LogFile(
                path,
                on_end=end_one,
                on_loss=partial(self._losses.lose, account),
                limit=self._limit,
                makes_empty=std is Std.OUT,
                times=times.stream(rank, STDOUT if std is Std.OUT else STDERR) if times is not None else None,
            )
            duplicate = None
            if std & shown and (texts := self._filters.get(std)):
                duplicate = _Duplicate(path.with_name(f"filtered_{path.name}"), texts, prefix, self._limit)
            self._streams[fd] = _Stream(fd, file, account, duplicate, pid if std is Std.ERR else None)
            self._epoll.register(fd, select.EPOLLIN)
        return file  # the last of the two: stderr

    def drained(self, pid: int, timeout: float) -> bool:
        """A descendant of the worker may hold the pipes open as long as it runs. True: all is in its files, or lost."""
        ended = self._outputs.get(pid)
        if ended is None:
            return True
        self._hurry.set()
        return self._clock.wait(ended, timeout)

    def holds(self, pid: int) -> bool:
        return pid in self._held

    def take_held(self, pid: int) -> HeldEnd | None:
        """It is shown as it came where nobody asks for it within a minute. To be called when its output is drained."""
        return self._held.pop(pid, None)

    def take_losses(self) -> OutputLost | None:
        return self._losses.settle(final=self._is_closed)

    def close(self, timeout: float) -> bool:
        """A hung disk is left to itself after `timeout` seconds. Returns whether everything is in the files."""
        deadline = self._clock.monotonic() + timeout
        self._close_by = self._clock.monotonic() + timeout / 2
        self._hurry.set()
        self._waker.wake()
        self._thread.join(timeout)
        is_moved = not self._thread.is_alive()
        self._show_held(math.inf)
        is_written = self.files.close(max(0.0, deadline - self._clock.monotonic()))
        self._is_closed = True
        if is_moved and is_written:
            self._epoll.close()
            self._waker.close()
        return is_moved and is_written

    def _run(self) -> None:
        while True:
            ready = [fd for fd, _ in self._epoll.poll(self._seconds_until_due())]
            if self._waker.fileno() in ready:
                ready.remove(self._waker.fileno())
                self._waker.drain()
            is_flood = False
            for fd in ready:
                stream = self._streams.get(fd)
                if stream is not None:
                    is_flood |= self._move(stream)
            for stream in list(self._paused):
                if self.files.has_room(stream.file) or not self._may_hold():
                    self._epoll.register(stream.fd, select.EPOLLIN)
                    self._paused.discard(stream)
            now = self._clock.monotonic()
            self._flush_partials(now)
            if self._close_by is not None and (now > self._close_by or not (ready or self._paused)):
                break
            if ready and not is_flood:
                # Little at a time: let more come together, instead of one turn of this loop for every print.
                self._hurry.wait(_NAP_S)
                self._hurry.clear()
        for stream in list(self._streams.values()):
            self._end(stream)

    def _seconds_until_due(self) -> float | None:
        if self._close_by is not None and not self._paused:
            return 0.0
        due = [_PAUSED_LOOK_S] if self._paused else []
        due += [_HELD_S] if self._held else []
        holding = [stream.held.since for stream in list(self._streams.values()) if stream.held and stream.held.text]
        if holding:
            due.append(max(0.0, min(holding) + _HELD_S - self._clock.monotonic()))
        since = [stream.partial_since for stream in list(self._streams.values()) if stream.partial_since is not None]
        if since:
            due.append(max(0.0, min(since) + _PARTIAL_S - self._clock.monotonic()))
        return min(due) if due else None

    def _move(self, stream: _Stream) -> bool:
        has_room = self.files.has_room(stream.file)
        if not has_room and self._may_hold():
            # Not merely masked: epoll reports a hang-up always.
            self._epoll.unregister(stream.fd)
            self._paused.add(stream)
            return True
        try:
            data = os.read(stream.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end(stream)
            return False
        self.read += len(data)
        if stream.source is not None:
            lines = stream.splitter.feed(data)
            self._show(stream, lines)
            if not stream.splitter.has_partial:
                stream.partial_since = None
            elif lines or stream.partial_since is None:
                stream.partial_since = self._clock.monotonic()
        if has_room:
            self.files.write(stream.file, data)
        else:
            self.files.skip(stream.file, len(data))
        return len(data) >= stream.flood

    def _may_hold(self) -> bool:
        now = self._clock.monotonic()
        return self._budget.may_hold(now=now, written=self.files.written, holding=bool(self._paused))

    def _flush_partials(self, now: float) -> None:
        self._show_held(now - _HELD_AFTER_END_S)
        for stream in list(self._streams.values()):
            if stream.held is not None and stream.held.text and now >= stream.held.since + _HELD_S:
                stream.held.show(stream.held.text)
                stream.held.text = b""
            if stream.partial_since is None or now < stream.partial_since + _PARTIAL_S:
                continue
            again = now >= stream.shown_again_at + _AGAIN_S
            if again:
                stream.shown_again_at = now
            if stream.source is not None:
                self._show(stream, stream.splitter.flush(again=again))
            stream.partial_since = now if stream.splitter.has_partial else None

    def _show(self, stream: _Stream, lines: bytes) -> None:
        source = stream.source
        if not lines or source is None:
            return
        if stream.duplicate is not None and (chosen := stream.duplicate.choose(lines)):
            if self.files.has_room(stream.duplicate.file):
                self.files.write(stream.duplicate.file, chosen)
            else:
                self.files.skip(stream.duplicate.file, len(chosen))
        if stream.pid is not None and not (lines := self._hold(stream, source, lines)):
            return
        if self._patience < _PATIENCE_STEP_S:
            now = self._clock.monotonic()
            self._patience = min(_PATIENCE_S, self._patience + _PATIENCE_SHARE * (now - self._patience_at))
            self._patience_at = now
        if self._patience < _PATIENCE_STEP_S:
            self._job_log.write(source, lines)
            return
        began = self._clock.monotonic()
        if not self._job_log.write(source, lines, patience=_PATIENCE_STEP_S):
            self._patience -= self._clock.monotonic() - began

    def _hold(self, stream: _Stream, source: JobLogSource, lines: bytes) -> bytes:
        if stream.held is not None and stream.held.text:
            if shown := stream.held.add(lines):
                stream.held = None
            return shown
        stream.held = None
        found = [at for words in _LAST_WORDS if (at := lines.find(words)) >= 0]
        if not found:
            return lines
        at = lines.rfind(b"\n", 0, min(found)) + 1
        stream.held = HeldEnd(b"", self._clock.monotonic(), partial(self._job_log.write, source))
        if shown := stream.held.add(lines[at:]):
            stream.held = None
        return lines[:at] + shown

    def _show_held(self, before: float) -> None:
        for pid, held in list(self._held.items()):
            if held.since < before and self._held.pop(pid, None) is not None:
                held.show(held.text)

    def _end(self, stream: _Stream) -> None:
        if stream.source is not None:
            self._show(stream, stream.splitter.flush(final=True))
            if stream.held is not None and stream.pid is not None:
                self._held[stream.pid] = stream.held
            self._job_log.forget(stream.source)
        # Out of our table before its number is free: the main thread may get the same one for the next worker.
        del self._streams[stream.fd]
        if stream in self._paused:
            self._paused.discard(stream)
            if left := int.from_bytes(fcntl.ioctl(stream.fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder):
                self.files.skip(stream.file, left)
        else:
            self._epoll.unregister(stream.fd)
        os.close(stream.fd)
        self.files.end(stream.file)
        if stream.duplicate is not None:
            self.files.end(stream.duplicate.file)
        self._losses.end(stream.account)


def log_losses(events: EventLog, pump: LogPump) -> None:
    episode = pump.take_losses()
    if episode is not None:
        events.write(episode)
