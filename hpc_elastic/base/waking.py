"""Waiting for one of several descriptors, and ending such a wait from another thread or a signal handler."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Iterable
from typing import Protocol


class HasFileno(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int: ...


def wait_readable(watched: Iterable[int | HasFileno], seconds: float) -> set[int]:
    """Wait until something can be read, has ended or is broken, or the time has passed.

    Not `select.select`: it takes no descriptor beyond 1023, and an agent of 200 workers has more.

    Args:
        watched: Descriptors, or what has one.
        seconds: How long at most; rounded up to whole milliseconds.

    Returns:
        The descriptors (numbers) that are ready; empty when the time has passed.
    """
    poller = select.poll()
    for one in watched:
        poller.register(one if isinstance(one, int) else one.fileno(), select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0, math.ceil(seconds * 1000)))}


class Waker:
    """Ends a loop's wait: the loop watches it and calls `drain` when it can be read; `wake` is for any thread.

    As the process' wake-up descriptor (`write_fd`, for `signal.set_wakeup_fd`) it collects the numbers of signals.
    Neither end is inherited by programs that are started.
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
        """What was written since the last call, one byte for each."""
        parts = []
        try:
            while part := self._read.recv(4096):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts)

    def peek(self) -> bytes:
        """The same, up to 4096 bytes, which `drain` still gives."""
        try:
            return self._read.recv(4096, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._read.close()
        self._write.close()
