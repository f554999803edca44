"""What the monitor process makes of its pipe and of the rank's end, with stand-ins for both."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.inprocess import monitor_process
from hpc_elastic.inprocess.state import Interruption

pytestmark = pytest.mark.torch


READER, PIDFD = 101, 102


def test_a_pipe_that_is_closed_while_the_rank_lives_is_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program in the rank's process, say."""
    looks: list[list[int]] = []

    def wait(fds: list[int], seconds: float) -> set[int]:
        """It lives on, and is dead at the third look after that."""
        looks.append(fds)
        assert len(looks) < 20, "it looks again and again at a pipe that is closed"
        return {READER} if READER in fds else {PIDFD} if len(looks) > 3 else set()

    monkeypatch.setattr(monitor_process, "wait_readable", wait)
    monkeypatch.setattr(monitor_process, "os", SimpleNamespace(read=lambda fd, size: b"", getpid=os.getpid))
    times = (
        "monitor_process_interval",
        "hard_timeout",
        "heartbeat_timeout",
        "barrier_timeout",
        "termination_grace_time",
    )
    settings = SimpleNamespace(**dict.fromkeys(times, timedelta(seconds=60)))
    rank: Any = SimpleNamespace(page=None, unplaced=SimpleNamespace(call="call0"), settings=settings)
    monitor = monitor_process._Monitor(rank, 1, READER, PIDFD, False)
    assert monitor._watch() is Interruption.TERMINATED
    assert looks[-1] == [PIDFD, -1]
