"""Attempt directories: the next free number, claimed by an exclusive mkdir, and the link to the latest."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_elastic.atomic_file import make_private_dir
from hpc_elastic.run_paths import AttemptPaths, RunPaths, attempt_number


def claim_attempt(paths: RunPaths) -> AttemptPaths:
    """Make the directory of a new attempt, for this process alone, and point ``latest`` at it.

    Raises:
        OSError: it can't be made.
    """
    numbers = [n for name in os.listdir(paths.root) if (n := attempt_number(name)) is not None]
    number = max(numbers, default=-1) + 1
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


def _point_latest(link: Path, target: Path) -> None:
    temporary = link.with_name(f".latest.{os.getpid()}")
    try:
        os.symlink(target.name, temporary)
        os.replace(temporary, link)
    except OSError:
        pass  # a convenience for people; nothing of ours reads it
