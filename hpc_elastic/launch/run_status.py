"""The present state of a run: by its files and, where they hold no end, by Slurm.

Events are too much to read for a line of `list`: workers' progress is read from their heartbeats, or from the growth of
their logs. Ages compare this host's wall clock with the writers': for people, not for decisions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import read_bytes
from hpc_elastic.errors import HpcElasticError, UnsafePathError, UsageError
from hpc_elastic.launch.run_directory import read_attempt
from hpc_elastic.options.sbatch import COMMENT_MARK
from hpc_elastic.rendezvous.membership import RoundLog
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.index import JobEntry, array_tasks, jobs_of, known_jobs
from hpc_elastic.run.node_score import load_record
from hpc_elastic.run.paths import (
    WITHOUT_VERDICT,
    AttemptInfo,
    AttemptPaths,
    ExitCode,
    Outcome,
    RunPaths,
    UnreadableAttemptError,
    load_attempt,
    load_result,
    task_index,
)
from hpc_elastic.run.progress import (
    COUNTED,
    NOW,
    NodeHeartbeats,
    ProgressSource,
    RunPace,
    SlowRank,
    SlowRanks,
    Suspicion,
)
from hpc_elastic.run.spec import Preload, RunSpec, UnreadableRunError, load_preload, load_run_spec
from hpc_elastic.slurm.client import SlurmClient, query_job_states
from hpc_elastic.slurm.commands import JobId, SlurmError, UnknownJobError
from hpc_elastic.slurm.job_environment import local_time
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.store.file_store import FileStore, FoldedStore

_MOST_RANKS_LOOKED_AT = 64


class StepStatus(Struct, frozen=True, kw_only=True):
    """Ages in seconds."""

    least: int
    most: int
    behind: tuple[int, ...]
    """Ranks at `least`, unless all are there."""
    ranks: int
    told_seconds: float
    heartbeat_seconds: float | None = None
    steps_per_second: float | None = None
    """The slowest node's, over the last minute; None: not known yet."""
    total: int | None = None
    seconds_to_end: float | None = None
    loss: float | None = None
    """The lowest reporting rank's last one."""
    checkpoint_seconds: float | None = None
    checkpoint_step: int | None = None
    source: ProgressSource


class OutputStatus(Struct, frozen=True, kw_only=True):
    bytes: int
    silent_seconds: float | None
    """None: none has printed yet."""
    newest_rank: int | None
    silent_ranks: int
    ranks: int
    """Number of ranks looked at: of a large run 64, evenly chosen."""


def read_steps(attempt: AttemptPaths, record: RoundRecord, *, now_ns: int) -> tuple[StepStatus | None, float | None]:
    read = (codec.load(attempt.heartbeats(member.node), NodeHeartbeats) for member in record.members)
    told = [found for found in read if isinstance(found, NodeHeartbeats) and found.round == record.round]
    ages = [max(0.0, (now_ns - found.written_ns) / 1e9) for found in told]
    beats = [(age, beat) for age, found in zip(ages, told, strict=True) for beat in found.ranks]
    known: dict[ProgressSource, dict[int, int]] = {}
    for _, beat in beats:
        source = ProgressSource.HEARTBEAT if beat.step is not None else beat.source
        step = beat.counted_steps if beat.step is None else beat.step
        if step is not None and source is not ProgressSource.UNKNOWN:  # an earlier version named no source
            known.setdefault(source, {})[beat.rank] = step
    resting = [
        found.progress.resting and found.progress.resting + age
        for age, found in zip(ages, told, strict=True)
        if found.progress is not None and found.progress.resting is not None
    ]
    at_rest = min(resting) if resting and len(resting) == len(record.members) else None
    if not known:
        return None, at_rest
    source = min(known, key=[ProgressSource.HEARTBEAT, *COUNTED].index)
    steps = known[source]
    least, most = min(steps.values()), max(steps.values())
    pace = min((found.steps_per_second for found in told if found.steps_per_second is not None), default=None)
    total = max((found.total for found in told if found.total is not None), default=None)
    heard = min((age + beat.age for age, beat in beats if beat.count or beat.counted_steps), default=None)
    saved = [(age + beat.saved_age, beat.saved_step) for age, beat in beats if beat.saved_age is not None]
    status = StepStatus(
        least=least,
        most=most,
        behind=tuple(sorted(rank for rank, step in steps.items() if step == least)) if least < most else (),
        ranks=len(steps),
        source=source,
        told_seconds=round(min(ages), 1),
        heartbeat_seconds=None if heard is None else round(heard, 1),
        steps_per_second=pace,
        total=total,
        seconds_to_end=round(max(0, total - least) / pace, 1) if pace and total is not None else None,
        loss=next((found.loss for found in told if found.loss is not None), None),
        checkpoint_seconds=round(min(age for age, _ in saved), 1) if saved else None,
        checkpoint_step=max((step for _, step in saved if step is not None), default=None),
    )
    return status, at_rest


def read_output(attempt: AttemptPaths, record: RoundRecord, *, now_ns: int) -> OutputStatus:
    world = sum(member.local_world_size for member in record.members)
    step = max(1, -(-world // _MOST_RANKS_LOOKED_AT))
    written, newest, silent, looked = 0, (0, -1), 0, 0
    for rank in range(0, world, step):
        paths = attempt.rank(record.round, rank)
        sizes = [found for path in (paths.stdout, paths.stderr) if (found := _size(path)) is not None]
        looked += 1
        size = sum(found[0] for found in sizes)
        written += size
        silent += not size
        if size:
            newest = max(newest, (max(when for size, when in sizes if size), rank))
    has_printed = newest[1] >= 0
    return OutputStatus(
        bytes=written,
        silent_seconds=round(max(0.0, (now_ns - newest[0]) / 1e9), 1) if has_printed else None,
        newest_rank=newest[1] if has_printed else None,
        silent_ranks=silent,
        ranks=looked,
    )


def _size(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


_LARGEST_RECORD = 16 << 20
_LAST_LINES = 20
_CLOCKS_DIFFER_SECONDS = 600.0
FORGOTTEN_SECONDS = 300.0
"""Files of a run unchanged this long, whose job Slurm has forgotten (MinJobAge, 300 s mostly): it has ended."""
_OUTCOMES: Mapping[str, str] = {
    "COMPLETED": "unknown",
    "CANCELLED": Outcome.CANCELLED.value,
    "PREEMPTED": Outcome.PREEMPTED.value,
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), Outcome.TIMED_OUT.value),
}


class RunState(str, Enum):
    SUBMITTED = "submitted"
    MEETING = "meeting"
    UP = "up"
    TRAINING = "training"
    SAVING = "saving"
    ENDING = "ending"
    REQUEUED = "requeued"
    ENDED = "ended"


class RunStatus(Struct, frozen=True, kw_only=True):
    run_id: str
    run_dir: str
    name: str
    cluster: str
    state: RunState
    attempt: int | None = None
    job_id: str | None = None
    slurm_cluster: str = ""
    nodes: tuple[str, ...] = ()
    round: int | None = None
    members: tuple[str, ...] = ()
    workers: int = 0
    lost: tuple[str, ...] = ()
    waiting: int = 0
    opened_because: str = ""
    """The reason of a later round: the last failure, or whatever ended the round before."""
    restarts_used: int = 0
    max_restarts: int = 0
    requeues_used: int = 0
    max_requeues: int = 0
    progress: ProgressSource = ProgressSource.UNKNOWN
    steps: StepStatus | None = None
    resting: float | None = None
    """Seconds without any work of any worker, by the kernel's counts; 0: there is work; None: unknown."""
    suspicion: str = ""
    slow_ranks: tuple[SlowRank, ...] = ()
    slow_pace: RunPace | None = None
    output: OutputStatus | None = None
    """Read on request, where a round's workers report no steps."""
    preload: Preload | None = None
    outcome: str = ""
    reason: str = ""
    exit_code: int | None = None
    created_ns: int = 0
    started_ns: int = 0
    """The newest attempt's begin, by its batch host's clock; 0: none has begun."""
    job_log: str = ""
    """Empty: it went to a terminal."""
    rank_logs: str = ""
    """A shell pattern; empty before the first round."""
    ended_ns: int = 0
    bad_nodes: tuple[str, ...] = ()
    problem: str = ""


def read_status(paths: RunPaths, *, clock: Clock, looks_at_output: bool = False) -> RunStatus:
    """Read a run's files. Missing or damaged ones are left out, and named in `problem`.

    Args:
        looks_at_output: Look at preload.json, and at the logs' sizes where workers report no steps.
    """
    problem = ""
    spec: RunSpec | None = None
    try:
        spec = load_run_spec(paths.run_json)
    except UnreadableRunError as error:
        problem = str(error)
    known: dict[str, Any] = {"run_id": paths.run_id, "run_dir": str(paths.root), "name": "", "cluster": ""}
    known["bad_nodes"] = load_record(paths.nodes_json).excluded
    of_spec = ("run_id", "name", "cluster", "max_restarts", "max_requeues", "created_ns") if spec else ()
    known.update({name: getattr(spec, name) for name in of_spec})
    begun = paths.attempts()
    if not begun:
        return RunStatus(**known, state=RunState.SUBMITTED, problem=problem)
    attempt, number = begun[-1], begun[-1].number
    known.update(attempt=number, requeues_used=number)
    info: AttemptInfo | None = None
    try:
        info = load_attempt(attempt.attempt_json)
        known.update(job_id=info.job_id, nodes=info.nodes, cluster=info.cluster, started_ns=info.started_ns)
        known["slurm_cluster"] = info.slurm_cluster
    except UnreadableAttemptError as error:
        problem = problem or str(error)
    record: RoundRecord | None = None
    try:
        kind = FoldedStore if attempt.records.exists() or not attempt.store.is_dir() else FileStore  # which makes it
        record = RoundLog(kind(attempt.store, clock=clock, largest=_LARGEST_RECORD), known["run_id"]).latest()
    except (OSError, HpcElasticError) as error:
        problem = problem or f"the rounds can't be read: {error}"
    if record is not None:
        known.update(_round(record, info.nodes if info else ()))
        steps, resting = read_steps(attempt, record, now_ns=clock.time_ns())
        by_kernel = ProgressSource.UNKNOWN if resting is None else ProgressSource.KERNEL
        known.update(steps=steps, resting=resting, progress=by_kernel if steps is None else steps.source)
    result = _result(attempt)
    known.update(result)
    state = state_of(record, result.get("exit_code"))
    if record is not None and state is RunState.TRAINING:
        suspicion = codec.load(attempt.suspicions / "now.json", Suspicion)
        if isinstance(suspicion, Suspicion) and suspicion.round == record.round:
            known["suspicion"] = suspicion.reason
        slow = codec.load(attempt.slow_ranks / NOW, SlowRanks)
        if isinstance(slow, SlowRanks) and slow.round == record.round:
            known.update(slow_ranks=slow.ranks, slow_pace=slow.pace)
    if looks_at_output:
        known["preload"] = load_preload(paths.preload)
    known["job_log"] = _job_log(paths, spec, known.get("job_id"))
    if looks_at_output and record is None and state is RunState.MEETING:
        with suppress(OSError, UnsafePathError):
            log = read_bytes(Path(known["job_log"]), limit=_LARGEST_RECORD).decode("utf-8", "replace").splitlines()
            said = next((line for line in reversed(log[-_LAST_LINES:]) if line.startswith("srun: ")), "")
            # srun's line about the agents' step, while it waits for Slurm to make it.
            known["opened_because"] = said if "step creation" in said else ""
    if record is not None and record.round >= 0:
        logs = attempt.round_dir(record.round) / "rank-*" / "{stdout,stderr}.log"
        known["rank_logs"] = str(attempt.output if attempt.records.exists() else logs)
        if known["steps"] is None and state is RunState.TRAINING:
            state = RunState.UP
        if looks_at_output and known["steps"] is None and state in (RunState.UP, RunState.SAVING):
            known["output"] = read_output(attempt, record, now_ns=clock.time_ns())
    return RunStatus(**known, state=state, problem=problem)


def _job_log(paths: RunPaths, spec: RunSpec | None, job_id: str | None) -> str:
    options = dict(word.partition("=")[::2] for word in (spec.sbatch_args if spec else ()))
    if spec and (given := options.get("--output")):
        base, _, task = (job_id or "%j").partition("_")
        values = {"%j": job_id or "%j", "%A": base, "%a": task or "%a", "%x": options.get("--job-name", "%x")}
        return os.path.join(spec.cwd, re.sub("%[jAax]", lambda match: values[match[0]], given))
    return str(paths.job_log) if paths.job_log.is_file() else ""


def with_slurms_log(status: RunStatus, client: SlurmClient, job: JobState | None) -> RunStatus:
    """`status` with the job log's path by Slurm, unless it is in the run directory. Asks Slurm once."""
    own = RunPaths(Path(status.run_dir)).job_log
    # Where a path has a backslash, the StdOut that Slurm shows is wrong (22.05).
    if job is None or status.job_log == str(own) or "\\" in status.job_log:
        return status
    try:
        state = client.job_state(JobId(job.job_id, job.cluster))
    except (SlurmError, UsageError):
        return status
    return replace(status, job_log=state.stdout) if state is not None and state.stdout else status


def with_slurms_end(
    status: RunStatus, job: JobState | None, *, is_known: bool = True, silent_seconds: float | None = None
) -> RunStatus:
    """`status` with the end that its files do not hold, where Slurm says that its job has ended.

    `is_known` is false where neither controller nor accounting knows the job (any more); else no `job` means not asked.
    """
    if status.state is RunState.ENDED or status.cluster != "slurm":
        return status
    begun = status.state not in (RunState.SUBMITTED, RunState.REQUEUED)
    if job is None or job.phase is not JobPhase.FINISHED:
        if job is not None or is_known or (silent_seconds or 0.0) < FORGOTTEN_SECONDS:
            return status
        reason = WITHOUT_VERDICT if begun else "ended before it began: "
        reason += f"Slurm no longer knows job {status.job_id}" if status.job_id else "Slurm no longer knows its job"
        return replace(status, state=RunState.ENDED, outcome="unknown", reason=reason, exit_code=1)
    outcome = _OUTCOMES.get(job.state, Outcome.FAILED.value)
    if job.state == "CANCELLED" and not begun:
        again = f" (attempt {status.attempt} had been requeued)" if status.attempt is not None else ""
        reason = f"cancelled while it waited in the queue{again}"
    elif status.state is RunState.REQUEUED:
        return status  # the requeue that was decided never came about: that can be made up for
    elif not begun:
        reason = f"ended before it began ({job.said})"
        if job.reason.startswith("JobLaunchFailure"):
            reason += f": the node could not start its batch script; often it can't write the log {status.job_log}"
    else:
        reason = f"{WITHOUT_VERDICT}{job.how_it_ended}"
    return replace(status, state=RunState.ENDED, outcome=outcome, reason=reason, exit_code=job.code)


def silent_for(paths: RunPaths, number: int | None, *, now_ns: int) -> float | None:
    """Seconds since a file that an attempt's (None: the run's) agents keep writing changed; None: no file."""
    attempt = None if number is None else paths.attempt(number)
    newest = 0
    for folder in (paths.root,) if attempt is None else (attempt.events, attempt.store / "node", attempt.root):
        try:
            with os.scandir(folder) as entries:
                newest = max([newest, *(entry.stat(follow_symlinks=False).st_mtime_ns for entry in entries)])
        except OSError:
            continue
    return max(0.0, (now_ns - newest) / 1e9) if newest else None


def state_of(record: RoundRecord | None, exit_code: int | None) -> RunState:
    if exit_code is not None:
        return RunState.REQUEUED if exit_code == ExitCode.REQUEUED else RunState.ENDED
    if record is None or record.status in (Status.JOINABLE, Status.FROZEN):
        return RunState.MEETING
    if record.status is Status.CLOSED:
        return RunState.ENDING
    return RunState.TRAINING if record.notice is None else RunState.SAVING


def _round(record: RoundRecord, nodes: Sequence[str]) -> Mapping[str, Any]:
    def name(node: int) -> str:
        return nodes[node] if 0 <= node < len(nodes) else f"node {node}"

    runs = record.status in (Status.FINAL, Status.FROZEN)
    return {
        "round": record.round,
        "members": tuple(name(member.node) for member in record.members) if runs else (),
        "workers": sum(member.local_world_size for member in record.members) if runs else 0,
        "lost": tuple(name(node) for node in record.lost),
        "waiting": record.waiting,
        "restarts_used": record.restarts_used,
        "opened_because": record.reason if record.round > 0 and record.status is not Status.CLOSED else "",
        "reason": record.reason if record.status is Status.CLOSED else "",
    }


def _result(attempt: AttemptPaths) -> dict[str, Any]:
    result = load_result(attempt.result_json)
    if result is None:
        return {}
    found: dict[str, Any] = {"outcome": result.outcome, "reason": result.reason, "exit_code": result.exit_code}
    with suppress(OSError):  # it is being removed
        found["ended_ns"] = attempt.result_json.stat().st_mtime_ns
    if result.exit_code == ExitCode.REQUEUED and result.next_job:
        found["job_id"] = result.next_job  # the run goes on in another job
    return found


def newest_job(status: RunStatus, known: Sequence[JobEntry] | None = None) -> JobId | None:
    """The run's newest job; None: this account knows of none. `known`: as for `jobs_of`."""
    if status.job_id is not None:
        return JobId(status.job_id, status.slurm_cluster or None)
    known = jobs_of(status.run_dir, known=known)
    if array_tasks(RunPaths(Path(status.run_dir))):
        known = [entry for entry in known if "_" not in entry.job_id]  # not a task's follow-on job
    return JobId(known[0].job_id, known[0].cluster or None) if known else None


def job_of_run(client: SlurmClient, job: JobId, paths: RunPaths) -> JobState | None:
    """Ask for a run's job before an action on its number, which Slurm may have given to another job since.

    Raises:
        UnknownJobError: it is another job.
        SlurmError: it can't be asked.
    """
    state = client.job_state(job)
    if state is None or _is_of(state, paths):
        return state
    whose = f" ({state.comment})" if state.comment.startswith(COMMENT_MARK) else ""
    raise UnknownJobError(
        what=f"job {job} of run {paths.run_id}", why=f"that number is now of another job, {state.name}{whose}"
    )


def _is_of(state: JobState, paths: RunPaths) -> bool:
    """Compare the comment that `submit` gives a job, where the user gave none; else script and log."""
    array = task_index(paths.root.name) is not None
    run_id = paths.root.parent.name if array else paths.root.name  # the directory may have been moved
    if state.comment.startswith(COMMENT_MARK):
        return Path(state.comment).name == run_id
    if any(run_id in Path(path).parts for path in (state.command, state.stdout or "")):
        return True
    begun = paths.begun_attempts()
    if not begun or (RunPaths(paths.root.parent) if array else paths).script.is_file():
        return False
    # A batch script of the user's own bears no mark; but a job that first ran after the newest attempt is another.
    if state.restarts:
        return True
    info, started = read_attempt(begun[-1]), local_time(state.start_time)
    if info is None or started is None:
        return state.phase is not JobPhase.PENDING
    return started < info.started_ns / 1e9 + _CLOCKS_DIFFER_SECONDS


def ends_by_slurm(
    client: SlurmClient | None, statuses: Sequence[RunStatus], *, clock: Clock, warn: Callable[[str], None]
) -> list[tuple[RunStatus, JobState | None]]:
    """Each run with Slurm's record of its job, asked about all at once, and with the end that only Slurm knows.

    Without a client Slurm is not asked; `warn` gets a sentence where it can't be.
    """
    asked: dict[int, JobId] = {}
    if client is not None:
        open_runs = [status for status in statuses if status.cluster == "slurm" and status.state is not RunState.ENDED]
        known = known_jobs() if any(status.job_id is None for status in open_runs) else ()
        asked = {id(status): job for status in open_runs if (job := newest_job(status, known)) is not None}
    says = query_job_states(client, list(asked.values()), warn=warn) if client is not None and asked else {}
    found = []
    for status in statuses:
        job = asked.get(id(status))
        state = None if job is None else says.get(job)
        if status.job_id is None and job is not None:
            status = replace(status, job_id=str(job) if state is None else state.job_id)
        is_known = job is None or job not in says or state is not None
        silent = None
        if not is_known:
            silent = silent_for(RunPaths(Path(status.run_dir)), status.attempt, now_ns=clock.time_ns())
        found.append((with_slurms_end(status, state, is_known=is_known, silent_seconds=silent), state))
    return found
