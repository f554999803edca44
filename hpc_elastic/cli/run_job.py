"""``hpc-elastic cancel RUN``, ``hpc-elastic requeue RUN``: from a run to its Slurm job, or from a job to its run."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import click
from msgspec import Struct

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.files import sole_owner, write_json
from hpc_elastic.cli.run_argument import RUN_HELP, RUNS_DIR, check_single, complete_runs, find_run_dir
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, job_of_run, newest_job, read_status
from hpc_elastic.options.sbatch import COMMENT_MARK
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run import index
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.paths import AttemptPaths, RunPaths, attempt_number, load_attempt, task_index
from hpc_elastic.slurm import commands
from hpc_elastic.slurm.client import SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import (
    JobId,
    RequeueDisabledError,
    SlurmError,
    SlurmMissingError,
    SlurmPermissionError,
    UnknownJobError,
)
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.workers.tree import Delivery, kill_safely, look_at

SLURM_SECONDS = 30.0
SHORT_SECONDS = 10.0
"""The limit where something is only shown: a person waits."""


class RunJob(Struct, frozen=True, kw_only=True):
    paths: RunPaths
    status: RunStatus
    job: JobId
    owner: int


PARAMETERS = (click.Argument(["run"], metavar="RUN|JOBID|DIR", shell_complete=complete_runs), RUNS_DIR)
NOTE = f"RUN: {RUN_HELP}"


def find_paths(args: SimpleNamespace) -> RunPaths:
    folder = find_run_dir(args.run, args.runs_dir, ask_slurm=not getattr(args, "no_slurm", False))
    return RunPaths(folder.parent if attempt_number(folder.name) is not None else folder)


def find_run_job(
    args: SimpleNamespace, *, arrays: bool = False, if_ended: str = "start it again with the command that started it"
) -> RunJob:
    """The run that is meant, and its job; `if_ended` is what to say of a run of this machine that has ended."""
    paths = find_paths(args)
    if not arrays:
        check_single(paths)
    owner = run_owner(args.run, paths)
    status = read_status(paths, clock=SystemClock())
    if run_owner(args.run, paths) != owner:
        raise UsageError(f"{paths.root} was replaced meanwhile")
    if status.cluster == "local" and status.state is RunState.ENDED:
        ended = status.outcome.replace("_", " ")
        raise UsageError(f"run {status.run_id} has already ended: {ended}; {if_ended}")
    job = newest_job(status)
    if job is None:
        why = f" ({status.problem})" if status.problem else ""
        raise UsageError(f"run {status.run_id} has no job that this account knows of{why}; see squeue --me")
    return RunJob(paths=paths, status=status, job=job, owner=owner)


def _signal_local(args: SimpleNamespace, number: signal.Signals) -> bool:
    paths = find_paths(args)
    status = read_status(paths, clock=SystemClock())
    if status.cluster != "local" or status.state is RunState.ENDED:
        return False
    if run_owner(args.run, paths) != os.geteuid():
        raise UsageError(f"{paths.root} is another user's: only its owner can signal the run")
    if number is signal.SIGUSR2:
        _check_requeues(status, status.run_id)
    begun = paths.begun_attempts()
    info = load_attempt(begun[-1].attempt_json) if begun else None
    known = info.supervisor if info is not None else None
    if info is None or known is None or known.run_dir != os.path.realpath(paths.root):
        raise UsageError(f"the process of run {status.run_id} is not known: press Ctrl-C where it was started")
    if info.batch_host != os.uname().nodename:
        raise UsageError(f"run {status.run_id} runs on {info.batch_host}: give this command there")
    proc = look_at(known.pid)
    if number is signal.SIGUSR2:
        _note_requeue(begun[-1])
    if proc is None or proc.starttime != known.starttime or kill_safely(proc, number) is not Delivery.SENT:
        raise UsageError(f"run {status.run_id} has ended without a verdict: its process {known.pid} is gone")
    return True


def _note_requeue(attempt: AttemptPaths) -> None:
    """A submitted function would take a notice in its last ten minutes for its time limit's, which may end the run."""
    write_json(attempt.requeue_asked, {"v": 1, "asked_ns": SystemClock().time_ns()})


def run_owner(text: str, paths: RunPaths) -> int:
    """`text`, a user's, may be a link to any run. Raises UsageError where others can write the files."""
    folders = [paths.root, *(attempt.root for attempt in paths.attempts()[-1:])]
    if task_index(paths.root.name) is not None:
        folders.append(paths.root.parent)
    if os.path.exists(text) and Path(os.path.realpath(text)).is_relative_to(os.path.realpath(paths.root)):
        folders.append(Path(text))
    try:
        owners = {sole_owner(folder) for folder in folders}
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    if len(owners) > 1:
        raise UsageError(f"{paths.root} holds folders of several users: uids {', '.join(map(str, sorted(owners)))}")
    return owners.pop()


def _checked(asked: RunJob, client: SlurmClient) -> JobState | None:
    """Raises UsageError where root is to act on a job whose number its owner did not write."""
    try:
        state = job_of_run(client, asked.job, asked.paths)
    except SlurmError as error:
        if asked.job.cluster is None or "-M" not in error.facts["argv"]:
            raise
        raise UsageError(
            f"job {asked.job} is on cluster {asked.job.cluster}, which can't be asked here ({error.why}); there: "
            f"{shlex.join(commands.scancel(JobId(asked.job.number)))}"
        ) from None
    if os.geteuid() != 0 or asked.owner == 0:
        return state
    if state is None or state.user not in (_name_of(asked.owner), str(asked.owner)):
        whose = f"belongs to {state.user}" if state is not None else "is not known to Slurm"
        raise UsageError(
            f"{asked.paths.root} was written by {_name_of(asked.owner)}, and the job that it names, {asked.job}, "
            f"{whose}; only its owner's files are believed"
        )
    return state


def slurm_client(*, timeout: float = SLURM_SECONDS) -> SlurmClient:
    return SlurmClient(SubprocessRunner(os.environ), SystemClock(), timeout=timeout)


def run_of_job(job: str, client: SlurmClient) -> Path:
    """Raises SlurmMissingError, or UsageError with the reason."""
    try:
        state = client.job_state(JobId(job))
    except SlurmMissingError:
        raise
    except SlurmError as error:
        last = error.why.removesuffix(" (after 0 s)").rpartition("; ")[2]  # the others led to it
        raise UsageError(
            f"job {job}: no such run (searched this account's runs; Slurm does not answer: {last}); give its directory"
        ) from None
    if state is None:
        raise UsageError(
            f"job {job}: no such run (searched this account's runs; Slurm does not know the job); "
            "give the run directory"
        )
    whose = state.user if state.user not in (None, _name_of(os.getuid()), str(os.getuid())) else None
    folder = Path(state.stdout).parent if state.stdout and state.stdout.endswith("/job.log") else None
    root = folder if folder is not None and RunPaths(folder).run_json.is_file() else None
    if state.comment.startswith(COMMENT_MARK):  # else the user gave another comment: it is where the log is
        root = Path(state.comment.removeprefix(COMMENT_MARK))
    if root is None:
        owner = f", of {whose}" if whose else ""
        raise UsageError(
            f"job {job} ({state.name}{owner}): no such run (not submitted by hpc-elastic, or its run directory is "
            "elsewhere; see scontrol show job)"
        )
    if whose:
        raise UsageError(f"job {job} belongs to {whose}: only their owner can read a run's files ({root})")
    task = job.partition("_")[2]
    paths = RunPaths(root)
    if task.isdecimal() and task_index(root.name) is None:
        paths = paths.task(int(task))
    if not paths.run_json.is_file():
        raise UsageError(
            f"the run directory of job {job} is gone: {paths.root}; if the job runs on, scancel {job} ends it"
        )
    return paths.root


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def run_cancel(args: SimpleNamespace) -> int:
    if _signal_local(args, signal.SIGTERM):
        sys.stdout.write("the run is cancelled: its workers get SIGTERM\n")
        return 0
    asked = find_run_job(args, arrays=True, if_ended="nothing to cancel")
    sys.stdout.write(one_line(cancel(asked, slurm_client())) + "\n")
    return 0


def cancel(asked: RunJob, client: SlurmClient) -> str:
    status = asked.status
    tasks = array_tasks(asked.paths)
    if status.state is RunState.ENDED and not tasks:
        raise UsageError(f"run {status.run_id} has already ended: {status.outcome.replace('_', ' ')}")
    where = f" on cluster {elsewhere}" if (elsewhere := client.elsewhere(asked.job)) else ""
    if _checked(asked, client) is None:
        raise UsageError(f"job {asked.job}{where} is not known to Slurm; nothing is cancelled")
    client.cancel(asked.job)
    if tasks:
        rest = f"none of its {len(tasks)} runs begins any more, and those that run end"
        return f"job {asked.job}{where} is cancelled: {rest}"
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        return f"job {asked.job}{where} is cancelled; none of its workers was running"
    report = f"then see hpc-elastic report {asked.job}"  # a batch script of the user's own has its own log
    if asked.paths.job_log.is_file():
        report = f"the report will stand in {asked.paths.job_log}"
    return f"job {asked.job}{where} is cancelled: its workers get SIGTERM; {report}"


def run_requeue(args: SimpleNamespace) -> int:
    if _signal_local(args, signal.SIGUSR2):
        sys.stdout.write("the workers are asked to save; then the run begins its next attempt\n")
        return 0
    sys.stdout.write(one_line(requeue(find_run_job(args), slurm_client())) + "\n")
    return 0


def requeue(asked: RunJob, client: SlurmClient) -> str:
    if asked.status.state is not RunState.ENDED:
        _checked(asked, client)
    status, job = asked.status, asked.job
    if status.state is RunState.REQUEUED and _has_ended(job, client):
        # The process that decided it was killed before it asked Slurm.
        said = "had ended without the requeue that was decided; it is back in the queue now"
        return _again(asked, client, f"job {job} {said}")
    if status.state is RunState.SUBMITTED and _has_ended(job, client):
        return _again(asked, client, f"job {job} had ended before it began; it is back in the queue now")
    if status.state in (RunState.SUBMITTED, RunState.REQUEUED):
        raise UsageError(f"job {job} is already in the queue; hpc-elastic status {job} shows what it waits for")
    if status.state is RunState.ENDED:
        return _again(asked, client, f"job {job} is back in the queue; it continues from the last checkpoint")
    if _has_ended(job, client):
        said = "had ended without a verdict; it is back in the queue, and continues from the last checkpoint"
        return _again(asked, client, f"job {job} {said}")
    _check_requeues(status, str(job))
    if status.state in (RunState.SAVING, RunState.ENDING):
        return f"job {job} is already about to end; hpc-elastic status {job} shows how far it is"
    # root writes nothing into other users' folders
    notes = asked.paths.begun_attempts()[-1:] if asked.owner == os.geteuid() else []
    for attempt in notes:
        _note_requeue(attempt)
    try:
        client.notify(job)
    except SlurmError:
        for attempt in notes:
            attempt.requeue_asked.unlink(missing_ok=True)
        raise
    return f"the workers of job {job} are asked to save; then it is requeued (hpc-elastic status {job} --watch)"


def _check_requeues(status: RunStatus, name: str) -> None:
    if status.requeues_used >= status.max_requeues:
        raise UsageError(
            f"run {status.run_id} has used its {status.max_requeues} requeues: a notice would end it for good; "
            f"end it with hpc-elastic cancel {name}"
        )


def _again(asked: RunJob, client: SlurmClient, done: str) -> str:
    """Requeue a job that has ended; where Slurm refuses, submit the run's script once more. Returns what was done."""
    try:
        if _checked(asked, client) is None:
            raise UnknownJobError(what=f"requeueing job {asked.job}", why="Slurm no longer knows it")
        client.requeue(asked.job)
        return done
    except (RequeueDisabledError, UnknownJobError, SlurmPermissionError) as error:
        # The launcher comes with it: report, status and list need none.
        from hpc_elastic.launch.slurm_site import own_script, placement

        script, task = own_script(asked.paths), task_index(asked.paths.root.name)
        if script is None or {asked.owner, script.stat().st_uid} != {os.geteuid()}:
            raise
        cluster = client.elsewhere(asked.job)
        where = [f"--clusters={cluster}"] if cluster else placement(script, asked.job.cluster, os.environ)
        number = client.submit(str(script), extra=[*where, *([] if task is None else [f"--array={task}"])])
        job = str(number) if task is None else f"{number}_{task}"
        cluster, now_ns = number.cluster or asked.job.cluster or "", SystemClock().time_ns()
        index.record(cluster=cluster, job_id=job, submitted_ns=now_ns, run_dir=script.parent)
        return f"job {job} goes on from the last checkpoint; job {asked.job} can't run again: {error.facts['why']}"


def _has_ended(job: JobId, client: SlurmClient) -> bool:
    states = client.queue_states([job])
    return bool(states) and all(state.phase is JobPhase.FINISHED for state in states)
