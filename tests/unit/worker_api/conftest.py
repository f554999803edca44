"""For the tests of what a worker and its agent say to each other through one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.worker_api import heartbeat
from hpc_elastic.worker_api.heartbeat_record import VARIABLE, empty_file


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a worker that is this process."""
    path = tmp_path / "page"
    path.write_bytes(empty_file())
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(heartbeat, "reporter", heartbeat._Reporter())
    monkeypatch.setattr(heartbeat, "_optimizer_steps", heartbeat._OptimizerSteps())
    yield path
    if heartbeat.reporter._lock_fd >= 0:
        os.close(heartbeat.reporter._lock_fd)
