"""The Slurm job of a run, for the subcommands that do something about it.

The run of a Slurm job that this account's index does not have: by what Slurm says of the job, at last.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.cli.run_argument import RUN_HELP, check_single, find_run_dir
from hpc_elastic.cli.screen import print_note
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, RunStatus, read_status, silent_for, with_slurms_end
from hpc_elastic.options.sbatch import COMMENT_MARK, parse_array
from hpc_elastic.run.index import JobEntry, array_tasks, jobs_of, known_jobs
from hpc_elastic.run.paths import RunPaths, attempt_number, task_index
from hpc_elastic.slurm.client import CommandSlurmClient, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError, SlurmMissingError
from hpc_elastic.slurm.job_state import JobState

SLURM_SECONDS = 30.0
SHORT_SECONDS = 10.0
"""For what only shows something: a person waits."""
_JOBS_AT_ONCE = 500


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


def job_of(status: RunStatus, known: Sequence[JobEntry] | None = None) -> JobId | None:
    """The run's newest job; None where this account knows of none. `known`: as for `jobs_of`."""
    if status.job_id is not None:
        return JobId(status.job_id)
    known = jobs_of(status.run_dir, known=known)
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


def whole_job(states: Sequence[JobState]) -> JobState | None:
    """One state of what Slurm says of a job: of a het job, the first component's with the nodes of all."""
    if not states:
        return None
    first = min(states, key=lambda state: state.het_offset)
    nodes = tuple(node for state in sorted(states, key=lambda state: state.het_offset) for node in state.nodes)
    return replace(first, nodes=nodes) if first.het_leader_id is not None else states[0]


def query_job_states(
    client: SlurmClient, jobs: Sequence[JobId], *, is_quiet: bool = False
) -> dict[str, JobState | None]:
    """What Slurm says of jobs, by their ids: the controller, and of those that it has forgotten the accounting.

    Returns:
        None for a job that neither knows. A job that could not be asked about is not in it: that is said once, unless
        `is_quiet`.
    """
    found: dict[str, JobState | None] = {}
    groups: dict[str, list[JobId]] = {}
    for job in jobs:
        groups.setdefault(job.number.partition("_")[0], []).append(job)
    # An array is asked about as one.
    all_asked = [(group[0] if len(group) == 1 else JobId(base), group) for base, group in groups.items()]
    try:
        for begin in range(0, len(all_asked), _JOBS_AT_ONCE):
            asked = all_asked[begin : begin + _JOBS_AT_ONCE]
            some = [job for _, group in asked for job in group]
            here = _by_job(client.queue_states([job for job, _ in asked]), some)
            forgotten = [job for job, group in asked if any(str(one) not in here for one in group)]
            if forgotten:
                here = _by_job(client.accounted(forgotten), some) | here
            found |= {str(job): here.get(str(job)) for job in some}
    except SlurmMissingError:
        pass
    except SlurmError as error:
        if not is_quiet:
            print_note(f"Slurm can't be asked: {error}")
    return found


def _by_job(states: Sequence[JobState], jobs: Sequence[JobId]) -> dict[str, JobState]:
    """States by the ids that were asked for: an array's tasks that wait share a state, a het job has several."""
    of_base: dict[str, list[JobState]] = {}
    for state in states:
        base = state.array_job_id or state.het_leader_id or state.job_id
        of_base.setdefault(base, []).append(state)
    found: dict[str, JobState] = {}
    for job in jobs:
        base, _, task = job.number.partition("_")
        own = of_base.get(base, [])
        # Of a long list of tasks that wait an older squeue shows the beginning alone.
        rest = next((one for one in own if (one.array_task_id or "").rstrip("]").endswith("...")), None)
        match = states_by_task(own).get(int(task), rest) if task.isdecimal() else whole_job(own)
        if match is None and len(jobs) == 1 and own:
            match = own[0]
        if match is not None:
            found[str(job)] = match
    return found


def states_by_task(states: Sequence[JobState]) -> dict[int, JobState]:
    """What Slurm says of an array's job, by task; tasks that wait have one line for all, as in ``70_[3-5,7%2]``."""
    found: dict[int, JobState] = {}
    for state in states:
        try:
            tasks = parse_array((state.array_task_id or "").strip("[]"))
        except UsageError:
            continue  # a long list is cut: "[0-7,…]"
        found.update(dict.fromkeys(tasks, state))
    return found


def ends_by_slurm(
    client: SlurmClient | None, statuses: Sequence[RunStatus], *, clock: Clock, is_quiet: bool = False
) -> list[tuple[RunStatus, JobState | None]]:
    """Each run with what Slurm says of its job, asked about all at once, and with the end that only Slurm knows."""
    asked: dict[int, JobId] = {}
    if client is not None:
        open_runs = [status for status in statuses if status.cluster == "slurm" and status.state is not RunState.ENDED]
        known = known_jobs() if any(status.job_id is None for status in open_runs) else ()
        asked = {id(status): job for status in open_runs if (job := job_of(status, known)) is not None}
    says = query_job_states(client, list(asked.values()), is_quiet=is_quiet) if client is not None and asked else {}
    found = []
    for status in statuses:
        job = asked.get(id(status))
        state = None if job is None else says.get(str(job))
        is_known = job is None or str(job) not in says or state is not None
        silent = None
        if not is_known and status.attempt is not None:
            silent = silent_for(RunPaths(Path(status.run_dir)), status.attempt, now_ns=clock.time_ns())
        found.append((with_slurms_end(status, state, is_known=is_known, silent_seconds=silent), state))
    return found


def status_now(paths: RunPaths, client: SlurmClient | None, *, clock: Clock, is_quiet: bool = False) -> RunStatus:
    """Where a run stands by its files and, where these hold no end, by Slurm."""
    ((status, _),) = ends_by_slurm(client, [read_status(paths, clock=clock)], clock=clock, is_quiet=is_quiet)
    return status


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
