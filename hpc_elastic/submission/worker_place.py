"""Where a worker of a submitted function is: by the environment that its agent gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.submission.call import CallTerms

EXECUTOR_VARIABLE = "SUBMITIT_EXECUTOR"
FOLDER_VARIABLE = "SUBMITIT_FOLDER"
JOB_VARIABLE = "HPC_ELASTIC_JOB_ID"
"""Of a submitted function's worker: the job's id as `ElasticJob.job_id` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
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
