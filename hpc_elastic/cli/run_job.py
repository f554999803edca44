"""The Slurm job of a run, for the subcommands that do something about it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.cli.run_argument import RUN_HELP, check_single, find_run_dir
from hpc_elastic.clock import SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.reading.run_status import RunState, RunStatus, read_status
from hpc_elastic.run_index import array_tasks, jobs_of
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
    parser.add_argument(
        "--runs-dir", metavar="DIR", help="where runs are (default: what the configuration says, else ./runs)"
    )


def find_paths(args: argparse.Namespace) -> RunPaths:
    """The run that is meant, whichever of its attempts was named. Raises UsageError where RUN means none."""
    folder = find_run_dir(args.run, args.runs_dir, ask_slurm=not getattr(args, "no_slurm", False))
    return RunPaths(folder.parent if attempt_number(folder.name) is not None else folder)


def job_of(status: RunStatus) -> JobId | None:
    """The run's newest job; None where this account knows of none."""
    if status.job_id is not None:
        return JobId(status.job_id)
    known = jobs_of(status.run_dir)
    if array_tasks(RunPaths(Path(status.run_dir))):
        known = [entry for entry in known if "_" not in entry.job_id]  # not a task's follow-on job
    return JobId(known[0].job_id) if known else None


def find_run_job(args: argparse.Namespace, *, arrays: bool = False) -> RunJob:
    """The run that is meant, and its job.

    Args:
        args: From `add_arguments`.
        arrays: Whether it may be an array of runs.

    Raises:
        UsageError: RUN means none, or one that has no job.
    """
    paths = find_paths(args)
    if not arrays:
        check_single(paths)
    status = read_status(paths, clock=SystemClock())
    if status.cluster == "local" and status.state is RunState.ENDED:
        ended = status.outcome.replace("_", " ")
        raise UsageError(f"run {status.run_id} is no job and has ended already: {ended}; start it again where it was")
    if status.cluster == "local":
        raise UsageError(f"run {status.run_id} is no job: it runs where it was started; press Ctrl-C there")
    job = job_of(status)
    if job is None:
        why = f" ({status.problem})" if status.problem else ""
        raise UsageError(f"run {status.run_id} has no job that this account knows of{why}; see squeue --me")
    return RunJob(paths=paths, status=status, job=job)


def slurm_client(*, timeout: float = SLURM_SECONDS) -> SlurmClient:
    """This cluster's."""
    return CommandSlurmClient(SubprocessRunner(os.environ), SystemClock(), timeout=timeout)
