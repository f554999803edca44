"""``submitit.JobEnvironment()`` in a worker of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from submitit.core.job_environment import JobEnvironment

from hpc_elastic.submission.job_paths import ElasticJobPaths
from hpc_elastic.submission.worker_place import FOLDER_VARIABLE, JOB_VARIABLE


class ElasticJobEnvironment(JobEnvironment):  # type: ignore[misc]
    """Where a worker is: by the variables that its agent, and torch, know it by."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": JOB_VARIABLE,
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "GROUP_WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def raw_job_id(self) -> str:
        return os.environ.get("SLURM_JOB_ID") or os.environ[JOB_VARIABLE]

    @property
    def job_id(self) -> str:
        return os.environ[JOB_VARIABLE]

    @property
    def array_job_id(self) -> str | None:
        return os.environ.get("SLURM_ARRAY_JOB_ID")

    @property
    def array_task_id(self) -> str | None:
        return os.environ.get("SLURM_ARRAY_TASK_ID")

    @property
    def hostnames(self) -> list[str]:
        """The nodes of this round, that of rank 0 first."""
        from hpc_elastic.clock import SystemClock
        from hpc_elastic.reading.run_status import read_status
        from hpc_elastic.run_paths import RunPaths

        run_dir = os.environ.get("HPC_ELASTIC_RUN_DIR")
        if run_dir is None or "SLURM_JOB_ID" not in os.environ:
            return [self.hostname]
        return list(read_status(RunPaths(Path(run_dir)), clock=SystemClock()).members) or [self.hostname]

    @property
    def paths(self) -> ElasticJobPaths:
        run_dir = Path(os.environ["HPC_ELASTIC_RUN_DIR"])
        return ElasticJobPaths(os.environ[FOLDER_VARIABLE], self.job_id, self.global_rank, run_dir=run_dir)

    def _requeue(self, countdown: int) -> None:
        """Nothing: the supervisor requeues the job when all ranks have saved."""
