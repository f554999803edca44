"""A store that somebody removes, replaces or damages in mid-run: everybody stops soon, and says what happened."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun

NOTICED = 60.0
"""Seconds in which all is over. An agent looks at the epoch whenever it renews its heartbeat, or the log goes back."""

_TRAINS = """
signal.signal(signal.SIGTERM, lambda *_: (tell("saved"), sys.exit(0)))
tell("here")
others_in_round()
wait_for("end")
"""


def remove(store: Path) -> None:
    shutil.rmtree(store)


def remove_epoch(store: Path) -> None:
    (store / "epoch" / "id").unlink()


def empty(store: Path) -> None:
    for path in store.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def put_a_link(store: Path) -> None:
    store.rename(store.with_name("old-store"))
    os.symlink("/nonexistent", store)


WAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "removed": (remove, "was removed while"),
    "epoch removed": (remove_epoch, "has lost its epoch while"),
    "emptied": (empty, "has lost its epoch while"),
    "a link in its place": (put_a_link, "is not what it was"),
}


@pytest.mark.parametrize("way", WAYS)
def test_everybody_stops_and_says_what_happened(tmp_path: Path, way: str) -> None:
    damage, words = WAYS[way]
    with LocalRun(tmp_path, _TRAINS) as run:
        run.wait_moments("here", count=2)
        store = run.attempt().store
        began = time.monotonic()
        damage(store)
        assert run.finish(within=2 * NOTICED) == ExitCode.WORKERS_FAILED
        assert time.monotonic() - began < NOTICED
        assert len(run.moments("saved")) == 2, "each worker got its SIGTERM"
        assert len(run.moments("here")) == 2, "nobody began anew in an empty folder"
        log = run.log()
        assert f"the run's store {store} {words}" in log
        assert "start the run again" in log
        (attempt,) = run.report()["attempts"]
        assert attempt["outcome"] == "failed"
        assert f"{store}" in attempt["reason"]
        assert run.events("agent_relaunched") == []


@pytest.mark.parametrize("busy", [False, True])
def test_the_run_directory_is_removed_while_workers_train(busy: bool, tmp_path: Path) -> None:
    """``rm -rf`` by the user; `busy`: and a worker fails. Nobody waits for what does not come back."""
    with LocalRun(tmp_path, _TRAINS) as run:
        run.wait_moments("here", count=2)
        root, uid = run.paths.root, run.uid
        began = time.monotonic()
        shutil.rmtree(root)
        assert uid
        if busy:
            run.kill_worker(1, round_index=0)
        assert run.finish(within=2 * NOTICED) == ExitCode.WORKERS_FAILED
        assert time.monotonic() - began < NOTICED
        assert len(run.moments("saved")) == (1 if busy else 2)
        log = run.log()
        assert f"the run's store {root}/attempt-000/store was removed" in log
        assert log.count("neither the result nor a report can be written") == 1
        assert "Traceback" not in log
        assert not root.exists(), "nobody makes a folder in its place"
