"""Of two jobs in one run directory the later one gives way, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.launch.run_directory import YOUNG_SECONDS, RunElsewhereError, claim_attempt, give_way
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_attempt, store_result


def begin(paths: RunPaths, job: str | None, *, restarts: int = 0) -> AttemptPaths:
    mine = claim_attempt(paths)
    facts = make_attempt(number=mine.number, job_id=job, restart_count=restarts)
    facts.save(mine.attempt_json)
    return mine


def ask(
    paths: RunPaths,
    mine: AttemptPaths,
    *,
    job: str | None = "8",
    restarts: int = 0,
    running: Callable[[str], bool] = lambda job: True,
    clock: FakeClock | None = None,
) -> None:
    give_way(paths, mine, job_id=job, restart_count=restarts, is_running=running, clock=clock or FakeClock())


def test_one_that_runs_elsewhere_is_left_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    begin(paths, "7")
    gone, mine = claim_attempt(paths), claim_attempt(paths)
    for later in (gone, mine):  # one that gave way itself is passed over
        with pytest.raises(RunElsewhereError, match="attempt 0 of this run is running in job 7"):
            ask(paths, later)
        assert not later.root.exists()
    assert os.readlink(paths.latest) == "attempt-000"


def test_what_is_no_reason_to_give_way(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    ask(paths, claim_attempt(paths))  # the first one
    paths = RunPaths(tmp_path / "b")
    paths.root.mkdir()
    before = begin(paths, "7")
    mine = claim_attempt(paths)
    ask(paths, mine, job="7")  # the same job, requeued
    ask(paths, mine, running=lambda job: False)  # killed without a word
    store_result(before, 75)
    ask(paths, mine)  # it has ended, and its job is about to
    before.result_json.unlink()
    before.attempt_json.write_text("{")
    ask(paths, mine)
    make_attempt(number=before.number, job_id=None).save(before.attempt_json)
    ask(paths, mine, job=None)  # one on this machine has no job
    assert mine.root.is_dir()


def test_of_two_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    """The other one has its number, and has not said yet which job it is."""
    paths = RunPaths(tmp_path)
    first, second = claim_attempt(paths), claim_attempt(paths)

    class Clock(FakeClock):
        def wait(self, stop: object, seconds: float) -> bool:  # type: ignore[override]
            make_attempt(job_id="7").save(first.attempt_json)
            return False

    with pytest.raises(RunElsewhereError):
        ask(paths, second, clock=Clock())
    ask(paths, first, job="7")
    assert first.root.is_dir()


def test_one_that_died_before_it_said_so_is_not_waited_for_long(tmp_path: Path) -> None:
    paths, clock = RunPaths(tmp_path), FakeClock()
    claim_attempt(paths)
    mine = claim_attempt(paths)
    ask(paths, mine, clock=clock)
    assert YOUNG_SECONDS <= clock.now - 1000 < YOUNG_SECONDS + 1


def test_a_batch_script_that_begins_late_gives_way_to_the_newer_start_of_its_job(tmp_path: Path) -> None:
    """On a node that Slurm has given up since: the same job was started again elsewhere."""
    paths = RunPaths(tmp_path)
    begin(paths, "7", restarts=1)
    with pytest.raises(RunElsewhereError, match="attempt 0"):
        ask(paths, claim_attempt(paths), job="7", restarts=0)
    mine = claim_attempt(paths)
    ask(paths, mine, job="7", restarts=2)
    assert mine.root.is_dir()
