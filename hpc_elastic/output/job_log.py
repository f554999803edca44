"""The way to the job log, which may be stuck: a bounded queue and a thread that alone writes; and what was lost.

Lost output, its rank and stream, and why, are reported once per episode, not once per line.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.base.text import first_of
from hpc_elastic.output.terminal import readable, with_prefix
from hpc_elastic.run.agent_events import OutputLost, StreamLoss
from hpc_elastic.run.paths import round_index

_ITEM_COST = 200  # bytes of bookkeeping per queued item, so that many small ones don't exceed the bound
_PIECE = 64 << 10
_RESERVE = 16 << 10
"""Bytes that each source may have waiting however many others flood."""


class JobLogSource:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode("utf-8", "surrogateescape")
        self.pending = 0
        self.dropped = 0
        self.unsaid = 0


class JobLog:
    """Its methods don't block (but for `close` and patience); any thread may call them."""

    def __init__(self, fd: int, *, total_bytes: int = 2 << 20, source_bytes: int = 512 << 10) -> None:
        """`fd` is not closed here. Blocking or not, a pipe, socket, file or terminal."""
        self._fd = fd
        self._total_bytes = total_bytes
        self._source_bytes = source_bytes
        self._queue: deque[tuple[JobLogSource, bytes]] = deque()
        self._pending = 0
        self._in_flight = 0
        self._sources: set[JobLogSource] = set()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._is_closing = False
        self._is_broken = False
        self.written = 0
        self.dropped = 0
        self._own = self.source("")
        self._writer = FileExecutor(name="job-log")

    def source(self, prefix: str) -> JobLogSource:
        source = JobLogSource(prefix)
        with self._lock:
            self._sources.add(source)
        return source

    def forget(self, source: JobLogSource) -> None:
        with self._lock:
            self._sources.discard(source)
            self._queue_loss_message(source)

    def write_line(self, line: str) -> None:
        self.write(self._own, (line.rstrip("\n") + "\n").encode("utf-8", "surrogateescape"))

    def write(self, source: JobLogSource, lines: bytes, *, patience: float = 0.0) -> bool:
        """`patience`: seconds to wait for room, for each 64 KiB. Returns whether there was room without waiting."""
        had_room = True
        start = 0
        while start < len(lines):
            # In pieces, since a prefix before each of many short lines makes them many times as long when written.
            end = len(lines)
            if end - start > _PIECE:
                end = lines.rfind(b"\n", start, start + _PIECE) + 1 or lines.index(b"\n", start) + 1
            had_room &= self._write_piece(source, lines[start:end], patience)
            start = end
        return had_room

    def _write_piece(self, source: JobLogSource, lines: bytes, patience: float) -> bool:
        size = len(lines) + _ITEM_COST

        def has_room() -> bool:
            if self._is_broken or self._is_closing:
                return False
            if source.pending + size <= _RESERVE:
                return True
            is_in_share = not source.pending or source.pending + size <= self._source_bytes
            return is_in_share and self._pending < self._total_bytes

        with self._lock:
            had_room = has_room()
            if had_room or (patience > 0 and self._freed.wait_for(has_room, patience)):
                self._queue_loss_message(source)
                self._append(source, lines)
            else:
                self._drop(source, len(lines))
        return had_room

    def close(self, timeout: float) -> bool:
        """Returns whether all was written within `timeout` seconds; the rest is lost."""
        with self._lock:
            for source in self._sources:
                self._queue_loss_message(source)
            self._is_closing = True
        self._writer.close(timeout)
        with self._lock:
            for source, data in self._queue:
                self._drop(source, len(data))
            self._queue.clear()
            self.dropped += self._in_flight
            return not self._in_flight and not self._is_broken

    def _append(self, source: JobLogSource, data: bytes) -> None:
        cost = len(data) + _ITEM_COST
        source.pending += cost
        self._pending += cost
        self._queue.append((source, data))
        self._writer.post(self._write_next)

    def _drop(self, source: JobLogSource, count: int) -> None:
        source.dropped += count
        source.unsaid += count
        self.dropped += count

    def _queue_loss_message(self, source: JobLogSource) -> None:
        if source.unsaid and not self._is_broken:
            text = f"[… {source.unsaid} bytes dropped: the job log could not keep up]\n"
            source.unsaid = 0
            self._append(source, text.encode())

    def _write_next(self) -> None:
        with self._lock:
            if not self._queue:
                return  # `close` has given it up
            source, data = self._queue.popleft()
            self._in_flight = len(data)
        # What is never written need not be made fit for it: so here, not where the workers' pipes wait.
        shown = with_prefix(readable(data), source.prefix)
        rest = self._write(shown)
        lost = -(-len(data) * rest // len(shown)) if rest else 0
        with self._lock:
            cost = len(data) + _ITEM_COST
            source.pending -= cost
            self._pending -= cost
            self._in_flight = 0
            self._freed.notify()
            self.written += len(shown) - rest
            if lost:
                self._drop(source, lost)

    def _write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[:_PIECE]) :]
            except BlockingIOError:
                poll = select.poll()  # another process that shares our stdout made it non-blocking
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except BrokenPipeError:
                self._is_broken = True  # srun is gone; nobody will read this any more
                break
            except OSError:
                break  # a full disk: the next lines may find room again
        return len(view)


QUIET_S = 10.0
LONGEST_EPISODE_S = 600.0
"""An episode that lasts longer is reported before its end."""
_NAMED = 8
_MOST_STREAMS = 100


class StreamAccount:
    def __init__(self, *, rank: int, stream: str, path: Path, source: JobLogSource | None) -> None:
        self.rank = rank
        self.stream = stream
        self.path = path
        self.source = source
        self.lost = 0
        self.reported = 0
        """Bytes that the job log dropped, of which an episode has reported."""
        self.has_ended = False

    @property
    def dropped(self) -> int:
        return self.source.dropped if self.source is not None else 0

    def take(self) -> StreamLoss:
        loss = StreamLoss(
            round=round_index(self.path.parent.parent.name),
            rank=self.rank,
            stream=self.stream,
            not_in_file=self.lost,
            not_in_job_log=self.dropped - self.reported,
        )
        self.reported += loss.not_in_job_log
        self.lost = 0
        return loss


class LossBook:
    """All accounts of a node. Any thread may call it; none waits for another that writes."""

    def __init__(self, *, clock: Clock, log: Callable[[str], None]) -> None:
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._accounts: set[StreamAccount] = set()
        self._began: float | None = None
        self._changed_at = 0.0
        self._total = 0
        self._lost = 0
        self._reason = ""

    def open(self, account: StreamAccount) -> StreamAccount:
        with self._lock:
            self._accounts.add(account)
        return account

    def end(self, account: StreamAccount) -> None:
        with self._lock:
            account.has_ended = True
            self._forget()

    def lose(self, account: StreamAccount, count: int, reason: str) -> None:
        with self._lock:
            account.lost += count
            self._accounts.add(account)
            self._lost += count
            is_first = not self._reason
            self._reason = self._reason or reason
        if is_first:
            self._log(
                f"{account.path}: {reason}; the workers run on, and what they print is lost until it can be written"
                " again"
            )

    def settle(self, *, final: bool = False) -> OutputLost | None:
        """The episode that has ended, or has lasted long; None: there is none. It is asked for every few seconds."""
        now = self._clock.monotonic()
        with self._lock:
            total = self._lost + sum(account.dropped for account in self._accounts)
            if total != self._total:
                self._total, self._changed_at = total, now
                self._began = now if self._began is None else self._began
            if self._began is None or not (
                final or now - self._changed_at >= QUIET_S or now - self._began >= LONGEST_EPISODE_S
            ):
                self._forget()
                return None
            losses = [
                account.take() for account in self._accounts if account.lost or account.dropped > account.reported
            ]
            losses.sort(key=lambda one: (-one.not_in_file, -one.not_in_job_log, one.rank, one.stream))
            reason = self._reason
            self._began, self._reason = None, ""
            self._forget()
            self._total = self._lost + sum(account.dropped for account in self._accounts)
        lacking = [f"rank {one.rank} {one.stream} {one.not_in_file}" for one in losses if one.not_in_file]
        not_in_files = sum(one.not_in_file for one in losses)
        if lacking:
            why = f" ({reason})" if reason else ""
            whose = first_of(lacking, _NAMED)
            self._log(f"{not_in_files} bytes of the workers' output are not in their files: {whose}{why}")
        return OutputLost(
            reason=reason or "the job log could not keep up",
            not_in_files=not_in_files,
            not_in_job_log=sum(one.not_in_job_log for one in losses),
            streams=tuple(losses[:_MOST_STREAMS]),
        )

    def _forget(self) -> None:
        for account in [account for account in self._accounts if account.has_ended]:
            if not account.lost and account.dropped == account.reported:
                self._accounts.discard(account)
                self._total -= account.dropped
