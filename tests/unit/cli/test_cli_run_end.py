"""When somebody who follows a run is told that it has ended: by its own word, or by a long silence."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from hpc_elastic.cli.follow import SILENT_SECONDS, RunEnd, RunWatch
from hpc_elastic.run.attempt import StoredResult
from hpc_elastic.run.index import record
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock
from tests.unit.launch.test_launch_run_status import Run


def store(paths: RunPaths, attempt: int, code: int, outcome: str = "failed") -> None:
    folder = paths.attempt(attempt)
    folder.root.mkdir(exist_ok=True)
    StoredResult(outcome=outcome, reason="so it is", exit_code=code, action="end", decision="").save(folder.result_json)


def watch(paths: RunPaths, clock: FakeClock, attempt: int | None = None) -> RunWatch:
    return RunWatch(paths, attempt=attempt, clock=clock)


def look(watched: RunWatch, clock: FakeClock, seconds: float = 60.0) -> RunEnd | None:
    """Ask now and then for so long; the first end counts."""
    until = clock.now + seconds
    while clock.now < until:
        end = watched.end()
        if end is not None:
            return end
        clock.now += 5.0
    return None


def test_by_its_result(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    watched = watch(paths, clock)
    assert look(watched, clock) is None, "it has no attempt yet"
    store(paths, 0, 93)
    assert look(watched, clock) == RunEnd(code=93, why="failed: so it is (exit code 93)")


def test_a_requeue_is_no_end_however_long_the_queue_is(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    store(paths, 0, 75)
    watched = watch(paths, clock)
    assert look(watched, clock, 10 * SILENT_SECONDS) is None
    assert watched.is_requeued
    store(paths, 1, 0, "succeeded")
    end = look(watched, clock)
    assert end is not None
    assert end.code == 0
    assert look(watch(paths, clock, attempt=0), clock) == RunEnd(code=75, why="failed: so it is (exit code 75)")


class Gone:
    """A Slurm whose job was cancelled in the queue."""

    asked = 0

    def queue_states(self, jobs: object) -> tuple[JobState, ...]:
        self.asked += 1
        return (JobState(job_id="5", state="CANCELLED" if self.asked > 2 else "PENDING", reason=""),)

    def accounted(self, jobs: object) -> tuple[JobState, ...]:
        return ()


def test_by_slurm_where_no_attempt_ever_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = Run(tmp_path)
    record(cluster="", job_id="5", submitted_ns=1, run_dir=run.paths.root)
    clock, slurm = FakeClock(), Gone()
    watched = RunWatch(run.paths, attempt=None, clock=clock, client=cast("SlurmClient", slurm))
    end = look(watched, clock, 100.0)
    assert end == RunEnd(code=143, why="cancelled while it waited in the queue (exit code 143)")
    assert slurm.asked == 3, "rarely"


def test_by_silence(tmp_path: Path) -> None:
    clock, paths = FakeClock(), RunPaths(tmp_path)
    sign = paths.attempt(0).store / "node" / "00000-n1"
    sign.parent.mkdir(parents=True)
    watched = watch(paths, clock)
    for number in range(20):
        sign.write_text("x" * number)  # an agent's sign of life
        assert look(watched, clock, SILENT_SECONDS / 3) is None
    end = look(watched, clock, SILENT_SECONDS + 60)
    assert end is not None
    assert end.code == 1
    assert "none of its files has changed for 5 minutes" in end.why
