"""Waits for one of several descriptors, which another thread or a signal handler can end."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike


def wait_readable(watched: Iterable[FileDescriptorLike], seconds: float) -> set[int]:
    """Wait until a descriptor is readable, has ended or is broken, or the time (rounded up to milliseconds) has passed.

    Not `select.select`: it takes no descriptor beyond 1023, and an agent of 200 workers has more. Returns the ready
    descriptors' numbers.
    """
    poller = select.poll()
    for one in watched:
        poller.register(one, select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0, math.ceil(seconds * 1000)))}


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
        """The same, up to 4096 bytes, without removing them."""
        try:
            return self._read.recv(4096, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._read.close()
        self._write.close()
