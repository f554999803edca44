"""Where the files of a submitted function lie in its run's directory, and which of them count. ::

<run>/call.pkl                                  the function and its arguments
<run>/launcher.json                             the process that runs it, without Slurm
<run>/attempt-000/checkpoint/rank-00012.pkl     what checkpoint() gave when a notice came
<run>/attempt-000/round-000/rank-00012/         result.pkl, or exception.pkl
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.atomic_file import ask_about
from hpc_elastic.launch.attempts import begun_attempts
from hpc_elastic.run_paths import AttemptPaths, RunPaths, rank_index, round_index


def call_file(paths: RunPaths) -> Path:
    return paths.root / "call.pkl"


def result_file(rank_dir: Path) -> Path:
    return rank_dir / "result.pkl"


def exception_file(rank_dir: Path) -> Path:
    return rank_dir / "exception.pkl"


def launcher_file(paths: RunPaths) -> Path:
    return paths.root / "launcher.json"


def checkpoint_dir(attempt: AttemptPaths) -> Path:
    return attempt.root / "checkpoint"


def checkpoint_file(attempt: AttemptPaths, rank: int) -> Path:
    return checkpoint_dir(attempt) / f"rank-{rank:05d}.pkl"


def rounds(attempt: AttemptPaths) -> list[int]:
    """Those whose workers have begun, the newest last."""
    return sorted(number for name in _names(attempt.root) if (number := round_index(name)) is not None)


def ranks(folder: Path) -> list[int]:
    """Those that have something in the folder of a round, or of a checkpoint."""
    names = (name.removesuffix(".pkl") for name in _names(folder))
    return sorted(rank for name in names if (rank := rank_index(name)) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlace:
    """One round of one attempt."""

    attempt: AttemptPaths
    round: int

    def rank_dir(self, rank: int) -> Path:
        return self.attempt.rank(self.round, rank).root


def newest_round(paths: RunPaths) -> RoundPlace | None:
    """The last one whose workers have begun; None where none has."""
    for attempt in reversed(begun_attempts(paths)):
        found = rounds(attempt)
        if found:
            return RoundPlace(attempt=attempt, round=found[-1])
    return None


def _names(folder: Path) -> list[str]:
    ask_about(folder)
    try:
        return os.listdir(folder)
    except OSError:
        return []
