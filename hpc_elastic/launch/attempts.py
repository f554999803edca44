"""Attempt directories: the next free number, claimed by an exclusive mkdir, and the link to the latest."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.atomic_file import make_private_dir
from hpc_elastic.attempt import UnreadableAttemptError, load_attempt
from hpc_elastic.clock import Clock
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launch.result import StoredResult, load_result
from hpc_elastic.run_paths import AttemptPaths, RunPaths

YOUNG_SECONDS = 5.0
"""How long an attempt that was just begun by another job may take to say which one that is."""
_LOOK_SECONDS = 0.2


class RunElsewhereError(HpcElasticError):
    """Two jobs were submitted for one run directory, and this is the later one."""

    template = "attempt {attempt} of this run is running in job {job}; this job ends, and changes nothing"


def begun_attempts(paths: RunPaths) -> list[AttemptPaths]:
    """Those that can be seen, the newest last; none where the run directory can't be listed."""
    try:
        return paths.attempts()
    except OSError:
        return []


def newest_stored(paths: RunPaths) -> StoredResult | None:
    """What the newest attempt wrote at its end; None where it has not ended, or none has begun."""
    begun = begun_attempts(paths)
    return load_result(begun[-1].result_json) if begun else None


def claim_attempt(paths: RunPaths) -> AttemptPaths:
    """Make the directory of a new attempt, for this process alone, and point ``latest`` at it.

    Raises:
        OSError: it can't be made.
    """
    before = paths.attempts()
    number = before[-1].number + 1 if before else 0
    while True:
        attempt = paths.attempt(number)
        try:
            make_private_dir(attempt.root, exist_ok=False)
        except FileExistsError:
            number += 1  # another supervisor of this run was quicker; a listing may not show it yet
            continue
        make_private_dir(attempt.events)
        _point_latest(paths.latest, attempt.root)
        return attempt


def give_way(
    paths: RunPaths,
    mine: AttemptPaths,
    *,
    job_id: str | None,
    restart_count: int = 0,
    is_running: Callable[[str], bool],
    clock: Clock,
) -> None:
    """Leave a run alone that is going on in another job: of two that begin at once, the later one gives way.

    A batch script that begins late, on a node that Slurm has given up since, gives way to the same job's newer start.

    Args:
        paths: The run's.
        mine: The attempt that was just claimed; it is removed where this job gives way.
        job_id: This job's.
        restart_count: How often Slurm had requeued this job when it started this process.
        is_running: Whether Slurm says that of a job; False where it can't be asked.
        clock: For the time that another one has to say which job it is.

    Raises:
        RunElsewhereError: it gives way.
    """
    deadline = clock.monotonic() + YOUNG_SECONDS
    for number in range(mine.number - 1, -1, -1):
        before = paths.attempt(number)
        while before.root.is_dir() and not before.attempt_json.exists() and clock.monotonic() < deadline:
            clock.wait(threading.Event(), _LOOK_SECONDS)
        if not before.root.is_dir():
            continue  # one that gave way
        try:
            info = load_attempt(before.attempt_json)
        except UnreadableAttemptError:
            return
        other = info.job_id
        is_newer_start = other is not None and other == job_id and info.restart_count > restart_count
        if not is_newer_start and (
            other is None or other == job_id or before.result_json.exists() or not is_running(other)
        ):
            return
        forget_attempt(paths, mine)
        raise RunElsewhereError(attempt=number, job=other)


def forget_attempt(paths: RunPaths, attempt: AttemptPaths) -> None:
    """Remove an attempt that was claimed and started nothing."""
    shutil.rmtree(attempt.root, ignore_errors=True)
    begun = begun_attempts(paths)
    if begun:
        _point_latest(paths.latest, begun[-1].root)


def slurm_job_ids(paths: RunPaths, number: int, own: str) -> tuple[str, ...]:
    """`own`, and those of the attempts before `number`: the agents end what these left on their nodes."""
    found = dict.fromkeys([own] if own else [])
    for before in range(number - 1, -1, -1):
        try:
            found |= dict.fromkeys(load_attempt(paths.attempt(before).attempt_json).slurm_job_ids)
            break  # it names those before it
        except UnreadableAttemptError:
            continue  # it gave way to another one, or was never written
    return tuple(found)


def _point_latest(link: Path, target: Path) -> None:
    temporary = link.with_name(f".latest.{os.getpid()}")
    try:
        os.symlink(target.name, temporary)
        os.replace(temporary, link)
    except OSError:
        pass  # a convenience for people; nothing of ours reads it
