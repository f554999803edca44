"""Where a run stands, from its files alone: a handful of them, however many nodes and rounds it has.

Ages are by this host's wall clock against those that wrote them: for people, not for decisions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import read_json
from hpc_elastic.base.outcome import ExitCode, Outcome
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.attempt import AttemptInfo, UnreadableAttemptError, is_job_id, load_attempt
from hpc_elastic.run.node_records import load_record
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from hpc_elastic.run.spec import RunSpec, UnreadableRunError, load_run_spec
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.store.file_store import FileStore

_LARGEST_RECORD = 16 << 20
"""Bytes."""
FORGOTTEN_SECONDS = 300.0
"""A run whose job Slurm does not know, and of which no file has changed for so long, has ended: agents write signs of
life every half minute at most. (Slurm forgets an ended job after MinJobAge, 300 s on most sites.)"""
_OUTCOMES: Mapping[str, str] = {
    "COMPLETED": "unknown",
    "CANCELLED": Outcome.CANCELLED.value,
    "PREEMPTED": Outcome.PREEMPTED.value,
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), Outcome.TIMED_OUT.value),
}
"""Of a run without a verdict, by its job's state; any other has failed."""


class RunState(str, Enum):
    """What a run is doing, in one word."""

    SUBMITTED = "submitted"
    """No attempt has begun."""
    MEETING = "meeting"
    """Nodes come together: at the start, or after a failure."""
    TRAINING = "training"
    SAVING = "saving"
    """A notice was given: the job is about to end, and workers save."""
    ENDING = "ending"
    """The attempt is closed, and its agents are about to end."""
    REQUEUED = "requeued"
    """The attempt has ended, and the next one has not begun."""
    ENDED = "ended"


class StepStatus(Struct, frozen=True, kw_only=True):
    """Where the workers are, by their heartbeats."""

    least: int
    most: int
    behind: tuple[int, ...]
    """Ranks at `least`, where that is not where all are."""
    ranks: int
    """How many have told a step."""
    told_seconds: float
    """Since the newest of these words was written."""


class RunStatus(Struct, frozen=True, kw_only=True):
    """One run, now."""

    run_id: str
    run_dir: str
    name: str
    cluster: str
    state: RunState
    attempt: int | None = None
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    """The attempt's, in Slurm's order."""
    round: int | None = None
    members: tuple[str, ...] = ()
    """Nodes of the round, by group rank."""
    workers: int = 0
    lost: tuple[str, ...] = ()
    waiting: int = 0
    opened_because: str = ""
    """Why the round was opened, where that was not the start: the last failure, or what else ended the one before."""
    restarts_used: int = 0
    max_restarts: int = 0
    requeues_used: int = 0
    max_requeues: int = 0
    steps: StepStatus | None = None
    outcome: str = ""
    """Of the newest attempt, where it has ended."""
    reason: str = ""
    exit_code: int | None = None
    created_ns: int = 0
    bad_nodes: tuple[str, ...] = ()
    """What later attempts do without."""
    problem: str = ""
    """What could not be read."""


def read_status(paths: RunPaths, *, clock: Clock) -> RunStatus:
    """Look at a run's files. What is missing or damaged is left out, and said in `problem`."""
    problem = ""
    spec: RunSpec | None = None
    try:
        spec = load_run_spec(paths.run_json)
    except UnreadableRunError as error:
        problem = str(error)
    known: dict[str, Any] = {
        "run_id": spec.run_id if spec else paths.run_id,
        "run_dir": str(paths.root),
        "name": spec.name if spec else "",
        "cluster": spec.cluster if spec else "",
        "max_restarts": spec.max_restarts if spec else 0,
        "max_requeues": spec.max_requeues if spec else 0,
        "created_ns": spec.created_ns if spec else 0,
        "bad_nodes": load_record(paths.nodes_json).excluded,
    }
    number = _newest_attempt(paths)
    if number is None:
        return RunStatus(**known, state=RunState.SUBMITTED, problem=problem)
    attempt = paths.attempt(number)
    known.update(attempt=number, requeues_used=number)
    info: AttemptInfo | None = None
    try:
        info = load_attempt(attempt.attempt_json)
        known.update(job_id=info.job_id, nodes=info.nodes, cluster=info.cluster)
    except UnreadableAttemptError as error:
        problem = problem or str(error)
    record: RoundRecord | None = None
    try:
        record = _newest_record(attempt, known["run_id"], clock)
    except (OSError, HpcElasticError) as error:
        problem = problem or f"the rounds can't be read: {error}"
    if record is not None:
        known.update(_round(record, info.nodes if info else ()))
        known["steps"] = read_steps(attempt, record, now_ns=clock.time_ns())
    result = _result(attempt)
    known.update(result)
    return RunStatus(**known, state=state_of(record, result.get("exit_code")), problem=problem)


def with_slurms_end(
    status: RunStatus, job: JobState | None, *, is_known: bool = True, silent_seconds: float | None = None
) -> RunStatus:
    """`status` with the end that its files do not hold, where Slurm says that its job has ended.

    Args:
        status: From the files: without a verdict where the supervisor was killed, and nobody was left to write one.
        job: What Slurm says of the run's job; None: it was not asked, or see `is_known`.
        is_known: False: Slurm was asked, and neither its controller nor its accounting knows the job (any more).
        silent_seconds: For how long no file of the newest attempt has changed; None: not known, or there is none.
    """
    if status.state is RunState.ENDED or status.cluster != "slurm":
        return status
    begun = status.state not in (RunState.SUBMITTED, RunState.REQUEUED)
    if job is None or job.phase is not JobPhase.FINISHED:
        if job is not None or is_known or (begun and (silent_seconds or 0.0) < FORGOTTEN_SECONDS):
            return status
        reason = "ended without a verdict: " if begun else "ended before it began: "
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
    else:
        reason = f"ended without a verdict: {job.how_it_ended}"
    return replace(status, state=RunState.ENDED, outcome=outcome, reason=reason, exit_code=job.code)


def silent_for(paths: RunPaths, number: int, *, now_ns: int) -> float | None:
    """Seconds for which no file of an attempt that its agents keep writing has changed; None where there is none."""
    attempt = paths.attempt(number)
    newest = 0
    for folder in (attempt.events, attempt.store / "node", attempt.root):
        try:
            with os.scandir(folder) as entries:
                newest = max([newest, *(entry.stat(follow_symlinks=False).st_mtime_ns for entry in entries)])
        except OSError:
            continue
    return max(0.0, (now_ns - newest) / 1e9) if newest else None


def state_of(record: RoundRecord | None, exit_code: int | None) -> RunState:
    """By the log's newest record and the newest attempt's exit code, None where it has not ended."""
    if exit_code is not None:
        return RunState.REQUEUED if exit_code == ExitCode.REQUEUED else RunState.ENDED
    if record is None or record.status in (Status.JOINABLE, Status.FROZEN):
        return RunState.MEETING
    if record.status is Status.CLOSED:
        return RunState.ENDING
    return RunState.TRAINING if record.notice is None else RunState.SAVING


def read_steps(attempt: AttemptPaths, record: RoundRecord, *, now_ns: int) -> StepStatus | None:
    """Where the workers of a round are; None where none has told. One small file for each member.

    Args:
        attempt: Where nodes tell it.
        record: The round.
        now_ns: This host's wall clock.
    """
    steps: dict[int, int] = {}
    newest = 0
    for member in record.members:
        value = read_json(attempt.heartbeats(member.node))
        if isinstance(value, str) or value.get("round") != record.round:
            continue
        try:
            steps |= {int(rank["rank"]): int(rank["step"]) for rank in value["ranks"] if rank["step"] is not None}
            newest = max(newest, int(value["written_ns"]))
        except (KeyError, TypeError, ValueError):
            continue
    if not steps:
        return None
    least, most = min(steps.values()), max(steps.values())
    behind = tuple(sorted(rank for rank, step in steps.items() if step == least)) if least < most else ()
    seconds = max(0.0, (now_ns - newest) / 1e9)
    return StepStatus(least=least, most=most, behind=behind, ranks=len(steps), told_seconds=round(seconds, 1))


def _newest_attempt(paths: RunPaths) -> int | None:
    begun = paths.attempts()
    return begun[-1].number if begun else None


def _newest_record(attempt: AttemptPaths, run_id: str, clock: Clock) -> RoundRecord | None:
    if not attempt.store.is_dir():
        return None  # nor is it made here
    return RoundLog(FileStore(attempt.store, clock=clock, largest=_LARGEST_RECORD), run_id).latest()


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
    value = read_json(attempt.result_json)
    if isinstance(value, str) or type(value.get("exit_code")) is not int:
        return {}
    found = {
        "outcome": str(value.get("outcome", "")),
        "reason": str(value.get("reason", "")),
        "exit_code": value["exit_code"],
    }
    next_job = value.get("next_job")
    if value["exit_code"] == ExitCode.REQUEUED and is_job_id(next_job):
        found["job_id"] = next_job  # the run goes on in another job
    return found
