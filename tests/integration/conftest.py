"""For the integration tests."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.local_run import ROOT, LocalRun
from tests.rigs.network_mounts import NetworkMounts, started_together


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # torch is looked for and not imported: its threads would be pytest's, where other tests send signals to themselves.
    if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")


@pytest.fixture(scope="session")
def network_mounts() -> Iterator[Callable[[str], NetworkMounts]]:
    """Gives the network filesystem of that name, two clients; skips the test, or fails it in CI, where it can't run."""
    with started_together() as wait_for:
        yield wait_for


@pytest.fixture
def ddp_run(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    """A run of the DDP script. TMPDIR is a short path (of sockets), not looked at: killed workers leave files there.

    Its workers are forks, which import torch once per node, unless a test asks for `start_method` spawn.
    """

    def make(*arguments: str, environ: dict[str, str] | None = None, **settings: Any) -> LocalRun:
        command = [str(ROOT / "tests" / "rigs" / "ddp_script.py"), *arguments]
        mine = {"TMPDIR": scratch, **(environ or {})}
        return LocalRun(tmp_path, "", interpreter=command, environ=mine, **{"start_method": "forkserver", **settings})

    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scratch:
        yield make
