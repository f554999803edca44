"""``hpc-elastic cancel RUN``, ``hpc-elastic requeue RUN``: from a run to its Slurm job, or from a job to its run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.cli.run_argument import LAST, LAST_HELP, RUN_HELP, check_single, find_run_dir
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, newest_job, read_status
from hpc_elastic.options.sbatch import COMMENT_MARK
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run import index
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.paths import RunPaths, attempt_number, task_index
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import (
    RequeueDisabledError,
    SlurmError,
    SlurmMissingError,
    SlurmPermissionError,
    UnknownJobError,
)
from hpc_elastic.slurm.job_state import JobPhase, JobState

SLURM_SECONDS = 30.0
SHORT_SECONDS = 10.0
"""For what only shows something: a person waits."""


class RunJob(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    status: RunStatus
    job: JobId


def add_arguments(parser: argparse.ArgumentParser, *, last: bool = False) -> None:
    """Args:
    parser: The subcommand's.
    last: Whether RUN may be left out: not for what ends or changes a run.
    """
    if last:
        parser.add_argument("run", metavar="RUN|JOBID|DIR", nargs="?", default=LAST, help=LAST_HELP)
    else:
        parser.add_argument("run", metavar="RUN|JOBID|DIR", help=RUN_HELP)
    parser.add_argument(
        "--runs-dir", metavar="DIR", help="folder of the runs (default: from the configuration, else ./runs)"
    )


def find_paths(args: argparse.Namespace) -> RunPaths:
    """The run that is meant, whichever of its attempts was named. Raises UsageError where RUN means none."""
    folder = find_run_dir(args.run, args.runs_dir, ask_slurm=not getattr(args, "no_slurm", False))
    return RunPaths(folder.parent if attempt_number(folder.name) is not None else folder)


_START_AGAIN = "start it again with the command that started it"


def find_run_job(args: argparse.Namespace, *, arrays: bool = False, if_ended: str = _START_AGAIN) -> RunJob:
    """The run that is meant, and its job.

    Args:
        args: From `add_arguments`.
        arrays: Whether it may be an array of runs.
        if_ended: What to say of a run of this machine that has ended.

    Raises:
        UsageError: RUN means none, or one that has no job.
    """
    paths = find_paths(args)
    if not arrays:
        check_single(paths)
    status = read_status(paths, clock=SystemClock())
    if status.cluster == "local" and status.state is RunState.ENDED:
        ended = status.outcome.replace("_", " ")
        raise UsageError(f"run {status.run_id} has already ended: {ended}; {if_ended}")
    if status.cluster == "local":
        raise UsageError(f"run {status.run_id} is not a Slurm job: press Ctrl-C where it was started")
    job = newest_job(status)
    if job is None:
        why = f" ({status.problem})" if status.problem else ""
        raise UsageError(f"run {status.run_id} has no job that this account knows of{why}; see squeue --me")
    return RunJob(paths=paths, status=status, job=job)


def slurm_client(*, timeout: float = SLURM_SECONDS) -> SlurmClient:
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
            f"job {job}: no such run (searched this account's runs; Slurm does not answer: {_briefly(error.why)}); "
            "give its directory"
        ) from None
    return _run_of(job, state)


def _briefly(why: str) -> str:
    """The last of several messages of one command: what the others led to."""
    return why.removesuffix(" (after 0 s)").rpartition("; ")[2]


def _run_of(text: str, state: JobState | None) -> Path:
    if state is None:
        raise UsageError(
            f"job {text}: no such run (searched this account's runs; Slurm does not know the job); "
            "give the run directory"
        )
    whose = state.user if state.user not in (None, _own_name(), str(os.getuid())) else None
    root = _run_directory_of(state)
    if root is None:
        owner = f", of {whose}" if whose else ""
        raise UsageError(
            f"job {text} ({state.name}{owner}): no such run (not submitted by hpc-elastic, or its run directory is "
            "elsewhere; see scontrol show job)"
        )
    if whose:
        raise UsageError(f"job {text} belongs to {whose}: only their owner can read a run's files ({root})")
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


def run_cancel(args: argparse.Namespace) -> int:
    """Cancel.

    Raises:
        UsageError: there is nothing to cancel.
        SlurmError: Slurm did not do it.
    """
    sys.stdout.write(
        one_line(cancel(find_run_job(args, arrays=True, if_ended="nothing to cancel"), slurm_client())) + "\n"
    )
    return 0


def _where_the_report_is(asked: RunJob) -> str:
    if asked.paths.job_log.is_file():
        return f"the report will stand in {asked.paths.job_log}"
    return f"then see hpc-elastic report {asked.job}"  # a batch script of the user's own has its own log


def cancel(asked: RunJob, client: SlurmClient) -> str:
    """Cancel, and say what happens. Raises as `run`."""
    status = asked.status
    tasks = array_tasks(asked.paths)
    if tasks:
        client.cancel(asked.job)
        return f"job {asked.job} is cancelled: none of its {len(tasks)} runs begins any more, and those that run end"
    if status.state is RunState.ENDED:
        raise UsageError(f"run {status.run_id} has already ended: {status.outcome.replace('_', ' ')}")
    client.cancel(asked.job)
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        return f"job {asked.job} is cancelled; none of its workers was running"
    return f"job {asked.job} is cancelled: its workers get SIGTERM; {_where_the_report_is(asked)}"


def run_requeue(args: argparse.Namespace) -> int:
    """Requeue.

    Raises:
        UsageError: it is not to be requeued now.
        SlurmError: Slurm did not do it.
    """
    sys.stdout.write(one_line(requeue(find_run_job(args), slurm_client())) + "\n")
    return 0


def requeue(asked: RunJob, client: SlurmClient) -> str:
    """Requeue, and say what happens. Raises as `run`."""
    status, job = asked.status, asked.job
    if status.state is RunState.REQUEUED and _has_ended(job, client):
        # The process that decided it was killed before it asked Slurm.
        return _again(
            asked, client, f"job {job} had ended without the requeue that was decided; it is back in the queue now"
        )
    if status.state is RunState.SUBMITTED and _has_ended(job, client):
        return _again(asked, client, f"job {job} had ended before it began; it is back in the queue now")
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        raise UsageError(f"job {job} is already in the queue; hpc-elastic status {job} shows what it waits for")
    if status.state is RunState.ENDED:
        return _again(asked, client, f"job {job} is back in the queue; it continues from the last checkpoint")
    if _has_ended(job, client):
        said = "had ended without a verdict; it is back in the queue, and continues from the last checkpoint"
        return _again(asked, client, f"job {job} {said}")
    if status.requeues_used >= status.max_requeues:
        raise UsageError(
            f"run {status.run_id} has used its {status.max_requeues} requeues: a notice would end it for good; "
            f"end it with hpc-elastic cancel {job}"
        )
    if status.state in (RunState.SAVING, RunState.ENDING):
        return f"job {job} is already about to end; hpc-elastic status {job} shows how far it is"
    client.notify(job)
    return f"the workers of job {job} are asked to save; then it is requeued (hpc-elastic status {job} --watch)"


def _again(asked: RunJob, client: SlurmClient, done: str) -> str:
    """Requeue a job that has ended; where Slurm does not do that, submit the run's script once more.

    Returns:
        `done`, or what was done instead.

    Raises:
        SlurmError: neither can be done.
    """
    try:
        client.requeue(asked.job)
        return done
    except (RequeueDisabledError, UnknownJobError, SlurmPermissionError) as error:
        from hpc_elastic.launch.slurm_site import own_script  # with the launcher: report, status and list need none

        script, task = own_script(asked.paths), task_index(asked.paths.root.name)
        if script is None or script.stat().st_uid != os.getuid():
            raise
        number = client.submit(str(script), extra=[] if task is None else [f"--array={task}"])
        job = str(number) if task is None else f"{number}_{task}"
        index.record(
            cluster=number.cluster or os.environ.get("SLURM_CLUSTER_NAME", ""),
            job_id=job,
            submitted_ns=SystemClock().time_ns(),
            run_dir=script.parent,
        )
        return f"job {job} goes on from the last checkpoint; job {asked.job} can't run again: {error.facts['why']}"


def _has_ended(job: JobId, client: SlurmClient) -> bool:
    states = client.queue_states([job])
    return bool(states) and all(state.phase is JobPhase.FINISHED for state in states)
