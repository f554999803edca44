"""Whether the job is put back into the queue when an attempt has ended: one pure function, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpc_elastic.outcome import ExitCode, Outcome


class RequeueAction(str, Enum):
    """What happens to the job."""

    REQUEUE = "requeue"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueFacts:
    """What the decision rests on."""

    outcome: Outcome
    reason: str
    """Why the attempt ended."""
    retryable: bool
    """Whether another attempt could end otherwise."""
    attempt: int
    """Number of the attempt that ended, from 0."""
    max_requeues: int
    armed: bool
    """Whether this job can be requeued at all."""
    armed_reason: str
    same_as_before: bool
    """The attempt before ended by the same failure, with no progress since."""
    signal_number: int | None = None
    """The signal that ended the attempt, where one did."""
    hang: bool = False
    """What it ended by was a hang."""
    requeued: bool = False
    """Slurm has put the job back into the queue itself: a preemption, or ``scontrol requeue``."""
    cancelled: bool = False
    """The job was cancelled after the attempt had ended by something else."""


_MADE_ROOM = (Outcome.PREEMPTED, Outcome.TIMED_OUT)
"""Ended by Slurm, though nothing is wrong with the run: it goes on in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueDecision:
    """What to do, why, and the code to exit with."""

    action: RequeueAction
    reason: str
    exit_code: int


def decide_requeue(facts: RequeueFacts) -> RequeueDecision:
    """Decide. Requeues what another attempt can mend: spent restarts, lost nodes, a preemption."""
    if facts.outcome is Outcome.SUCCEEDED:
        return _end("the run succeeded", ExitCode.OK)
    code = _exit_code(facts)
    if facts.outcome is Outcome.CANCELLED:
        return _end(f"the run was cancelled ({facts.reason})", code)
    if facts.cancelled:
        return _end(f"the job was cancelled meanwhile ({facts.reason})", code)
    if facts.requeued:
        reason = f"Slurm itself has put the job back into the queue: {facts.reason}"
        return RequeueDecision(action=RequeueAction.REQUEUE, reason=reason, exit_code=ExitCode.REQUEUED)
    if facts.signal_number is not None and facts.outcome not in _MADE_ROOM:
        return _end(f"a signal ended the job meanwhile ({facts.reason})", code)
    if not facts.retryable:
        return _end(f"another attempt would end the same way: {facts.reason}", code)
    if facts.same_as_before:
        return _end("the attempt before ended by the same failure, with no progress since: a bug in the script?", code)
    if facts.attempt >= facts.max_requeues:
        return _end(f"{facts.attempt} of {facts.max_requeues} requeues used", code)
    if not facts.armed:
        return _end(f"requeue is not armed: {facts.armed_reason}", code)
    left = facts.max_requeues - facts.attempt - 1
    return RequeueDecision(
        action=RequeueAction.REQUEUE,
        reason=f"requeue {facts.attempt + 1} of {facts.max_requeues} ({left} left): {facts.reason}",
        exit_code=ExitCode.REQUEUED,
    )


def _end(reason: str, code: int) -> RequeueDecision:
    return RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(code))


def _exit_code(facts: RequeueFacts) -> int:
    if facts.signal_number is not None:
        return 128 + facts.signal_number
    if facts.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.PREEMPTED):
        return ExitCode.TERMINATED
    if facts.hang:
        return ExitCode.HANG
    return ExitCode.WORKERS_FAILED if facts.retryable else ExitCode.NOT_RETRYABLE
