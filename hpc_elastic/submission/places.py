"""Where the files of a submitted function lie in its run's directory, which of them count, and where a worker is. ::

<run>/call.pkl                                  the function and its arguments
<run>/launcher.json                             the process that runs it, without Slurm
<run>/attempt-000/checkpoint/rank-00012.pkl     what checkpoint() gave when a preemption notice came
<run>/attempt-000/round-000/rank-00012/         result.pkl, or exception.pkl
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.files import ask_about
from hpc_elastic.errors import UsageError
from hpc_elastic.run.paths import AttemptPaths, RunPaths, rank_index, round_index
from hpc_elastic.submission.call import CallTerms


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


class RoundPlace(Struct, frozen=True, kw_only=True):
    """One round of one attempt."""

    attempt: AttemptPaths
    round: int

    def rank_dir(self, rank: int) -> Path:
        return self.attempt.rank(self.round, rank).root


def newest_round(paths: RunPaths) -> RoundPlace | None:
    """The last one whose workers have begun; None where none has."""
    for attempt in reversed(paths.begun_attempts()):
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


EXECUTOR_VARIABLE = "SUBMITIT_EXECUTOR"
FOLDER_VARIABLE = "SUBMITIT_FOLDER"
JOB_VARIABLE = "HPC_ELASTIC_JOB_ID"
"""Of a submitted function's worker: the job's id as `ElasticJob.job_id` has it."""


class WorkerPlace(Struct, frozen=True, kw_only=True):
    """One worker in one round."""

    run_dir: Path
    attempt: int
    round: int
    rank: int
    world_size: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerPlace:
        """Raises UsageError where this is no worker of a run."""
        try:
            return cls(
                run_dir=Path(env["HPC_ELASTIC_RUN_DIR"]),
                attempt=int(env["HPC_ELASTIC_ATTEMPT"]),
                round=int(env["TORCHELASTIC_RESTART_COUNT"]),
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(f"this is no worker of a run ({error}): an agent starts hpc_elastic's workers") from None


def job_id_of(env: Mapping[str, str], run_dir: Path) -> str:
    """As Slurm's commands take it; of a run on this machine, the run's own."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return env.get("SLURM_JOB_ID") or run_dir.name


def submitit_variables(env: Mapping[str, str], place: WorkerPlace, terms: CallTerms) -> dict[str, str]:
    """By which ``submitit.JobEnvironment()`` finds itself in a worker of ours."""
    return {
        EXECUTOR_VARIABLE: "elastic",
        FOLDER_VARIABLE: terms.folder,
        JOB_VARIABLE: job_id_of(env, place.run_dir),
    }
