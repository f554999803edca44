"""submitit's `JobPaths` and ``submitit.JobEnvironment()`` of a run: the names that programs know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import JobPaths

from hpc_elastic.run.paths import RankPaths, RunPaths
from hpc_elastic.submission.call import FOLDER_VARIABLE, JOB_VARIABLE, newest_round


class ElasticJobPaths(JobPaths):  # type: ignore[misc]
    """Restarts change the paths, so they are looked up on each use."""

    def __init__(self, folder: Path | str, job_id: str, task_id: int | None = None, *, run_dir: Path | None) -> None:
        super().__init__(folder, job_id=job_id, task_id=task_id)
        self.run_dir = Path(os.path.realpath(self._link)) if run_dir is None else run_dir

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.run_dir)

    @property
    def _link(self) -> Path:
        return Path(self.folder) / f"{self.job_id}_run"

    def remember(self) -> None:
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._link.unlink(missing_ok=True)  # ids come back
        self._link.symlink_to(self.run_dir)

    @property
    def submission_file(self) -> Path:
        return self.run.script

    @property
    def submitted_pickle(self) -> Path:
        return self.run.call_pickle

    @property
    def result_pickle(self) -> Path:
        return self._rank.result_pickle

    @property
    def stdout(self) -> Path:
        return self._rank.stdout

    @property
    def stderr(self) -> Path:
        return self._rank.stderr

    @property
    def _rank(self) -> RankPaths:
        place = newest_round(self.run)
        return self.run.attempt(0).rank(0, self.task_id) if place is None else place.rank(self.task_id)


class ElasticJobEnvironment(JobEnvironment):  # type: ignore[misc]
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
        from hpc_elastic.base.clock import SystemClock
        from hpc_elastic.launch.run_status import read_status

        run_dir = os.environ.get("HPC_ELASTIC_RUN_DIR")
        if run_dir is None or "SLURM_JOB_ID" not in os.environ:
            return [self.hostname]
        return list(read_status(RunPaths(Path(run_dir)), clock=SystemClock()).members) or [self.hostname]

    @property
    def paths(self) -> ElasticJobPaths:
        run_dir = Path(os.environ["HPC_ELASTIC_RUN_DIR"])
        return ElasticJobPaths(os.environ[FOLDER_VARIABLE], self.job_id, self.global_rank, run_dir=run_dir)

    def _requeue(self, countdown: int) -> None:
        """No effect: the supervisor requeues the job when all ranks have saved."""
