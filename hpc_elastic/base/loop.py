"""What a loop waits for: descriptors, the first of several times, what other threads put in."""

from __future__ import annotations

import _thread
import math
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.base.clock import Clock  # it needs msgspec, and the in-process wrapper runs without

T = TypeVar("T")
_LONGEST_MS = 2**31 - 1
"""Poll takes a C int: 24.8 days. The end of a job without a time limit is later."""


def wait_readable(watched: Iterable[FileDescriptorLike], seconds: float) -> set[int]:
    """Wait until a descriptor is readable, has ended or is broken, or the time (rounded up to milliseconds) has passed.

    Not `select.select`: it takes no descriptor beyond 1023, and an agent of 200 workers has more. One whose number is
    negative is never readable; infinite seconds have no end, others end after 24 days. Returns the ready descriptors'
    numbers.
    """
    poller = select.poll()
    for one in watched:
        if (fd := one if isinstance(one, int) else one.fileno()) >= 0:
            poller.register(fd, select.POLLIN)
    wait = None if seconds == math.inf else min(max(0, math.ceil(seconds * 1000)), _LONGEST_MS)
    return {fd for fd, _ in poller.poll(wait)}


def seconds_until(dues: Iterable[float | None], clock: Clock, *, most: float = math.inf) -> float:
    """Seconds until the first of some monotonic times; None is never."""
    return max(0.0, min([most, *(due - clock.monotonic() for due in dues if due is not None)]))


def start_thread(action: Callable[[], object]) -> None:
    """Start a daemon thread. Raises RuntimeError.

    Not threading's: its `start` waits for the thread, forever where memory is short (CPython 3.10 to 3.14).
    """
    _thread.start_new_thread(action, ())


class Waker:
    """Ends a loop's wait: the loop watches it and calls `drain` when it is readable; any thread calls `wake`.

    As the process' wake-up descriptor (`write_fd`, for `signal.set_wakeup_fd`) it collects the numbers of signals.
    Started programs inherit neither end.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Readable from `wake` to `drain`."""
        return self._read.fileno()

    @property
    def write_fd(self) -> int:
        return self._write.fileno()

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except OSError:
            pass  # full: there is a reason to wake up already

    def drain(self) -> bytes:
        """Read the bytes since the last call, one for each wake or signal."""
        parts = []
        try:
            while part := self._read.recv(4096):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts)

    def peek(self) -> bytes:
        try:
            return self._read.recv(4096, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Inbox(Generic[T]):
    def __init__(self) -> None:
        self._waker = Waker()
        self._items: deque[T] = deque()

    def fileno(self) -> int:
        return self._waker.fileno()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._waker.wake()

    def take(self) -> list[T]:
        self._waker.drain()
        return [self._items.popleft() for _ in range(len(self._items))]
