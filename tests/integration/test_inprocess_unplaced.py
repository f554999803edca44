"""A rank that is killed before its first barrier, while nothing of the group's store answers: its monitor ends soon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.inprocess_ranks import ROOT
from tests.rigs.processes import is_alive
from tests.rigs.waiting import until

pytestmark = pytest.mark.torch

_RANK = """
from datetime import timedelta
import hpc_elastic.inprocess as inprocess

seconds = {"soft": 0.5, "hard": 1, "heartbeat": 1.5, "barrier": 2}
timeouts = {f"{name}_timeout": timedelta(seconds=value) for name, value in seconds.items()}
names = ("monitor_thread", "monitor_process", "progress_watchdog")
inprocess.Wrapper(**timeouts, **{f"{name}_interval": timedelta(seconds=0.1) for name in names})(print)()
"""


@contextmanager
def silent_port() -> Iterator[int]:
    """Where no connection comes about and none is refused, as behind a cut network: the queue of those to accept is
    full."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
        for each in waiting:
            each.close()


def test_its_monitor_waits_no_longer_than_the_others_would_for_it(tmp_path: Path) -> None:
    """And not for the timeout of the store, which is 300 s."""
    with silent_port() as port:
        env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with open(tmp_path / "log", "wb") as log:
            rank = subprocess.Popen(
                [sys.executable, "-c", _RANK],
                env={**env, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
        try:
            (monitor,) = map(int, until(lambda: children.read_text().split(), (tmp_path / "log").read_text))
        finally:
            rank.kill()
            rank.wait()
        try:
            until(lambda: not is_alive(monitor), "the end of the monitor process", seconds=100)
        finally:
            if is_alive(monitor):
                os.kill(monitor, signal.SIGKILL)
