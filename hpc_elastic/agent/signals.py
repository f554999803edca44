"""Signals as readable events: a handler that does nothing, and a socket on which the signal's number arrives."""

from __future__ import annotations

import signal
import socket
from collections.abc import Container, Iterable
from types import FrameType


class SignalQueue:
    """The signals of this process, as something a selector can wait on. Main thread only.

    Python's own handler writes the number to the socket at once, whatever the interpreter is doing; nothing runs in the
    middle of other code.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)

    def fileno(self) -> int:
        return self._read.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals since the last call, in order of arrival; equal ones may have merged."""
        try:
            raw = self._read.recv(4096)
        except BlockingIOError:
            return []
        found = []
        for number in raw:
            try:
                found.append(signal.Signals(number))
            except ValueError:
                continue  # a real-time signal without a name
        return found

    def holds(self, numbers: Container[signal.Signals]) -> bool:
        """Whether one of `numbers` has come since the last `take`, which still returns it."""
        try:
            raw = self._read.recv(4096, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        return any(number in numbers for number in raw)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The number has gone through the wake-up socket."""
