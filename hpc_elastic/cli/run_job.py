"""The Slurm job of a run, for the subcommands that do something about it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from hpc_elastic.cli.run_argument import RUN_HELP, find_run_dir
from hpc_elastic.clock import SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.reading.run_status import RunStatus, read_status
from hpc_elastic.run_index import jobs_of
from hpc_elastic.run_paths import RunPaths, attempt_number
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId

SLURM_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """A run, where it stands, and its job."""

    paths: RunPaths
    status: RunStatus
    job: JobId


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and ``--runs-dir``."""
    parser.add_argument("run", metavar="RUN|JOBID|DIR", help=RUN_HELP)
    parser.add_argument("--runs-dir", metavar="DIR", help="where runs are (default: ./runs)")


def find_run_job(args: argparse.Namespace) -> RunJob:
    """The run that is meant, and its job.

    Raises:
        UsageError: RUN means none, or one that has no job.
    """
    folder = find_run_dir(args.run, args.runs_dir)
    paths = RunPaths(folder.parent if attempt_number(folder.name) is not None else folder)
    status = read_status(paths, clock=SystemClock())
    if status.cluster == "local":
        raise UsageError(f"run {status.run_id} is no job: it runs where it was started; press Ctrl-C there")
    job_id = status.job_id
    if job_id is None:
        known = jobs_of(str(paths.root))
        job_id = known[0].job_id if known else None
    if job_id is None:
        raise UsageError(f"run {status.run_id} has no job that this account knows of; see squeue --me")
    return RunJob(paths=paths, status=status, job=JobId(job_id))


def slurm_client() -> SlurmClient:
    """This cluster's."""
    return CommandSlurmClient(SubprocessRunner(os.environ), SystemClock(), timeout=SLURM_SECONDS)
