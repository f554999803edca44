"""An attempt's directory: the next free number, for one supervisor alone."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hpc_elastic.launch import run_directory
from hpc_elastic.launch.run_directory import claim_attempt, slurm_job_ids
from hpc_elastic.run.paths import RunPaths, load_attempt
from tests.rigs.specs import make_attempt


def test_numbers_follow_each_other_and_latest_follows_them(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number in range(3):
        attempt = claim_attempt(paths)
        assert attempt.number == number
        assert os.readlink(paths.latest) == attempt.root.name
        assert attempt.events.is_dir()
        for folder in (attempt.root, attempt.events):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_number_after_the_highest_is_taken_and_no_other_name_counts(tmp_path: Path) -> None:
    for name in ("attempt-007", "attempt-x", "attempt-9", "round-009", "attempt-008.old", "latest"):
        (tmp_path / name).mkdir()
    assert claim_attempt(RunPaths(tmp_path)).number == 8
    (tmp_path / "attempt-999").mkdir()
    assert claim_attempt(RunPaths(tmp_path)).root.name == "attempt-1000"
    assert claim_attempt(RunPaths(tmp_path)).number == 1001


def test_supervisors_that_race_get_different_numbers(tmp_path: Path) -> None:
    paths, racers = RunPaths(tmp_path), 8
    barrier = threading.Barrier(racers)
    found: list[int] = []

    def race() -> None:
        for _ in range(5):
            barrier.wait(30)
            found.append(claim_attempt(paths).number)

    threads = [threading.Thread(target=race, daemon=True) for _ in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == list(range(racers * 5))


def test_a_listing_that_lags_behind_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may show a folder that another host made only after seconds."""
    paths = RunPaths(tmp_path)
    for _ in range(3):
        claim_attempt(paths)

    def stale(path: Path) -> list[str]:
        return ["attempt-000"]

    monkeypatch.setattr(run_directory.os, "listdir", stale)
    assert claim_attempt(paths).number == 3


def test_what_stands_in_the_way_of_latest_is_no_obstacle(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.latest.mkdir()
    (paths.latest / "mine").touch()
    assert claim_attempt(paths).number == 0
    assert (paths.latest / "mine").exists()


def test_the_jobs_of_all_attempts_are_known_to_each(tmp_path: Path) -> None:
    """A requeued job keeps its id; a follow-on job has another one, and ends what its run left on a node, too."""
    paths = RunPaths(tmp_path)
    for job, expected in (("12", ("12",)), ("12", ("12",)), ("15", ("15", "12")), ("", ("15", "12"))):
        attempt = claim_attempt(paths)
        found = slurm_job_ids(paths, attempt.number, job)
        assert found == expected
        make_attempt(number=attempt.number, started_ns=1, slurm_job_ids=found).save(attempt.attempt_json)
        claim_attempt(paths)  # one that gave way, or could not be begun
    assert load_attempt(attempt.attempt_json).slurm_job_ids == ("15", "12")


def test_a_run_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        claim_attempt(RunPaths(tmp_path / "gone"))
