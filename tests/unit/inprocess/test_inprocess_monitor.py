"""What the monitor process makes of its pipe and of the rank's end, with stand-ins for both."""

from __future__ import annotations

import os
import select
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.inprocess import monitor_process
from hpc_elastic.inprocess.state import Interruption

pytestmark = pytest.mark.torch


class Poller:
    """A rank that has closed its pipe, lives on, and is dead at the third look after that."""

    def __init__(self) -> None:
        self.watched: list[int] = []
        self.looks = 0

    def register(self, fd: int, events: int) -> None:
        self.watched.append(fd)

    def unregister(self, fd: int) -> None:
        self.watched.remove(fd)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self.looks += 1
        assert self.looks < 20, "it looks again and again at a pipe that is closed"
        closed = [fd for fd in self.watched if fd == READER]
        if closed:
            return [(closed[0], select.POLLHUP)]
        return [(PIDFD, select.POLLIN)] if self.looks > 3 else []


READER, PIDFD = 101, 102


def test_a_pipe_that_is_closed_while_the_rank_lives_is_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program in the rank's process, say."""
    poller = Poller()
    monkeypatch.setattr(monitor_process, "select", SimpleNamespace(poll=lambda: poller, POLLIN=select.POLLIN))
    monkeypatch.setattr(monitor_process, "os", SimpleNamespace(read=lambda fd, size: b"", getpid=os.getpid))
    times = (
        "monitor_process_interval",
        "hard_timeout",
        "heartbeat_timeout",
        "barrier_timeout",
        "termination_grace_time",
    )
    settings = SimpleNamespace(**dict.fromkeys(times, timedelta(seconds=60)))
    rank: Any = SimpleNamespace(source=None, page=None, unplaced=SimpleNamespace(call="call0"), settings=settings)
    monitor = monitor_process._Monitor(rank, 1, READER, PIDFD, False)
    assert monitor._watch() is Interruption.TERMINATED
    assert poller.watched == [PIDFD]
