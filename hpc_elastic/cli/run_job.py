"""From a run to its Slurm job, and from a job that this account's index does not have to its run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.cli.run_argument import RUN_HELP, check_single, find_run_dir
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, newest_job, read_status
from hpc_elastic.options.sbatch import COMMENT_MARK
from hpc_elastic.run.paths import RunPaths, attempt_number, task_index
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError, SlurmMissingError
from hpc_elastic.slurm.job_state import JobState

SLURM_SECONDS = 30.0
SHORT_SECONDS = 10.0
"""For what only shows something: a person waits."""


class RunJob(Struct, frozen=True, kw_only=True):
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
    job = newest_job(status)
    if job is None:
        why = f" ({status.problem})" if status.problem else ""
        raise UsageError(f"run {status.run_id} has no job that this account knows of{why}; see squeue --me")
    return RunJob(paths=paths, status=status, job=job)


def slurm_client(*, timeout: float = SLURM_SECONDS) -> SlurmClient:
    """This cluster's."""
    return CommandSlurmClient(SubprocessRunner(os.environ), SystemClock(), timeout=timeout)


def run_of_job(job: str, client: SlurmClient) -> Path:
    """The run directory of a job, by one question to Slurm.

    Args:
        job: As Slurm's commands take it.
        client: Answers.

    Raises:
        SlurmMissingError: there is no Slurm here.
        UsageError: it is unknown, another user's, or none of this program's.
    """
    try:
        state = client.job_state(JobId(job))
    except SlurmMissingError:
        raise
    except SlurmError as error:
        raise UsageError(
            f"no run of job {job} is known on this account, and Slurm can't be asked ({error.why}); give its directory"
        ) from None
    return _run_of(job, state)


def _run_of(text: str, state: JobState | None) -> Path:
    if state is None:
        raise UsageError(
            f"job {text} is unknown: it is no run of this account's, and Slurm knows no such job (any more); "
            "give the run directory"
        )
    whose = state.user if state.user not in (None, _own_name(), str(os.getuid())) else None
    root = _run_directory_of(state)
    if root is None:
        owner = f"{whose}'s, and " if whose else ""
        raise UsageError(
            f"job {text} ({state.name}) is {owner}no run that is known here: not submitted by hpc-elastic, or its run "
            "directory is elsewhere; see scontrol show job"
        )
    if whose:
        raise UsageError(f"job {text} is {whose}'s: a run's files are their owner's alone ({root})")
    task = text.partition("_")[2]
    paths = RunPaths(root)
    if task.isdecimal() and task_index(root.name) is None:
        paths = paths.task(int(task))
    if not paths.run_json.is_file():
        raise UsageError(
            f"the run directory of job {text} is gone: {paths.root}; if the job runs on, scancel {text} ends it"
        )
    return paths.root


def _run_directory_of(state: JobState) -> Path | None:
    """The run directory by the comment, or where the user gave another, by where the log is."""
    if state.comment.startswith(COMMENT_MARK):
        return Path(state.comment.removeprefix(COMMENT_MARK))
    folder = Path(state.stdout).parent if state.stdout and state.stdout.endswith("/job.log") else None
    return folder if folder is not None and RunPaths(folder).run_json.is_file() else None


def _own_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
