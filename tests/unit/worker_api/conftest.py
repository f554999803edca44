"""For the tests of what a worker and its agent say to each other through one file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_elastic.worker_api import flight_recorder, heartbeat
from hpc_elastic.worker_api.records import VARIABLE, empty_file, lease_beside


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a worker that is this process."""
    path = tmp_path / "page"
    path.write_bytes(empty_file())
    Path(lease_beside(str(path))).write_bytes(empty_file())
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(heartbeat, "reporter", heartbeat._Reporter())
    monkeypatch.setattr(heartbeat, "_optimizer_steps", heartbeat._OptimizerSteps())
    yield path
    if heartbeat.reporter._lock_fd >= 0:
        os.close(heartbeat.reporter._lock_fd)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], bytes, str], Path]:
    """Starts the flight recorder of this process, writes a byte into its pipe, and waits for the file that answers."""

    def ask(start: Callable[[], object], byte: bytes, suffix: str) -> Path:
        monkeypatch.setenv(flight_recorder.VARIABLE, str(tmp_path / "x"))
        replaced, move = threading.Event(), os.replace
        monkeypatch.setattr(flight_recorder.os, "replace", lambda *paths: (move(*paths), replaced.set()))
        start()
        fd = os.open(tmp_path / f"x.{os.getpid()}.ask", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, byte)
        os.close(fd)
        assert replaced.wait(20)
        return tmp_path / f"x.{os.getpid()}.{suffix}"

    return ask
