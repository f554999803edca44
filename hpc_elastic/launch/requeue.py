"""Decisions about the requeue, with reasons; pure."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.agent.restart_policy import HANG_FINGERPRINT, made_progress, may_be_a_bug
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.option_values import RequeueChoice
from hpc_elastic.run.paths import AttemptInfo, ExitCode, Outcome, StoredResult
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.job_state import JobState

BACK_OFF_SECONDS = 60.0
"""Delay after two attempts in a row without progress; it doubles with each further one."""
MOST_BACK_OFF_SECONDS = 1800.0


class RequeueAction(str, Enum):
    REQUEUE = "requeue"
    END = "end"


class RequeueWay(str, Enum):
    REQUEUE = "requeue"
    ALLOW = "allow"
    """``scontrol requeue`` after the owner has set Requeue=1: the site's default is 0."""
    CHAIN = "chain"
    """A follow-on job in the same run directory, which depends on this one's end."""
    NONE = "none"


class Arming(Struct, frozen=True):
    way: RequeueWay
    reason: str = ""


def decide_arming(
    spec: RunSpec,
    state: JobState | None,
    *,
    can_chain: bool,
    site_allows: bool = True,
    problem: str = "",
    missing: str = "",
) -> Arming:
    """`state` is None where Slurm has no record of the job, or could not be asked."""
    own_script = "the batch script is not one that hpc-elastic submit made"
    if not (spec.requeue and spec.max_requeues > 0):
        return Arming(RequeueWay.NONE, "--no-requeue or --max-requeues 0 was given")
    if state is not None and not state.is_batch:
        return Arming(RequeueWay.NONE, "this is an allocation of salloc's, and Slurm requeues batch jobs only")
    if spec.requeue_with is RequeueChoice.CHAIN:
        if can_chain:
            return Arming(RequeueWay.CHAIN, "--requeue-with chain was given")
        return Arming(RequeueWay.NONE, f"--requeue-with chain: {own_script}")
    if missing:
        return Arming(RequeueWay.NONE, missing)
    if problem:
        return Arming(RequeueWay.REQUEUE, f"not verified: {problem}")
    if state is None:
        return Arming(RequeueWay.NONE, "Slurm does not know this job")
    if state.requeue:
        return Arming(RequeueWay.REQUEUE)
    why = "this job was submitted with --no-requeue" if site_allows else "the site has JobRequeue=0"
    if spec.requeue_with is RequeueChoice.AUTO and can_chain:
        return Arming(RequeueWay.CHAIN, f"this job may not be requeued: {why}")
    if not site_allows:
        return Arming(RequeueWay.ALLOW, why)
    return Arming(RequeueWay.NONE, f"{why}, or the site's rules say so")


def back_off(idle: int) -> float:
    if idle < 2:
        return 0.0
    return min(MOST_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2.0 ** min(idle - 2, 30))


class AttemptResult(Struct, frozen=True, kw_only=True):
    outcome: Outcome
    reason: str
    retryable: bool
    signal_number: int | None = None
    fingerprint: str = ""
    """The script's failure that ended it, if any."""
    step: int = -1
    """The furthest step reported by then, -1 for none."""
    seconds: float = 0.0
    requeued: bool = False
    """Slurm has put the job back into the queue itself."""
    cancelled: bool = False
    """The job was cancelled after the attempt had been given up for another reason."""
    notice: str = ""


def closed_result(record: RoundRecord, outcome: Outcome, *, signal_number: int | None = None) -> AttemptResult:
    return AttemptResult(
        outcome=outcome,
        reason=record.reason,
        retryable=record.retryable,
        signal_number=signal_number,
        # What an earlier round of it failed by is no reason where a notice, or lost nodes, ended it.
        fingerprint=record.memory.fingerprint if outcome is Outcome.FAILED else "",
        step=record.memory.step,
    )


A_BUG = "a bug in the script?"
_MADE_ROOM = (Outcome.PREEMPTED, Outcome.TIMED_OUT)


class RequeueDecision(Struct, frozen=True, kw_only=True):
    action: RequeueAction
    reason: str
    exit_code: int
    delay: float = 0.0


def idle_attempts(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> int:
    is_first_step = result.step >= 0 and (before is None or before.step < 0)
    if result.outcome in _MADE_ROOM or is_first_step or _made_progress(before, spec, result)[0]:
        return 0
    return 1 + (before.idle if before is not None else 0)


def _made_progress(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> tuple[bool, float | None]:
    step = before.step if before is not None else -1
    return made_progress(step=result.step, before=step, seconds=result.seconds, window=spec.restart_window)


def decide_requeue(
    before: StoredResult | None, spec: RunSpec, attempt: AttemptInfo, result: AttemptResult, *, idle: int = 0
) -> RequeueDecision:
    """`before` is None for the first attempt, or where its end is unknown."""
    if result.outcome is Outcome.SUCCEEDED:
        return _end("the run succeeded", ExitCode.OK)
    code, why = _exit_code(result), result.reason
    if result.outcome is Outcome.CANCELLED:
        return _end(f"the run was cancelled ({why})", code)
    if result.outcome is Outcome.SUPERSEDED:
        return _end(f"the run goes on in a later attempt ({why})", code)
    if result.cancelled:
        return _end(f"the job was cancelled meanwhile ({why})", code)
    if result.requeued:
        reason = f"Slurm itself has put the job back into the queue: {why}"
        return RequeueDecision(action=RequeueAction.REQUEUE, reason=reason, exit_code=ExitCode.REQUEUED)
    if result.signal_number is not None and result.outcome not in _MADE_ROOM:
        return _end(f"a signal ended the job meanwhile ({why})", code)
    if not result.retryable:
        return _end(f"another attempt would end the same way: {why}", code)
    is_same = before is not None and may_be_a_bug(result.fingerprint) and before.fingerprint == result.fingerprint
    is_progress, limit = _made_progress(before, spec, result)
    if is_same and spec.max_same_failures and not is_progress:
        rule = "" if limit is None else f" (it ended within {limit:g} s: --restart-window)"
        reason = f"the attempt before ended by the same failure, with no progress since{rule}: {A_BUG}"
        return _end(reason, code)
    if attempt.number >= spec.max_requeues:
        return _end(f"{attempt.number} of {spec.max_requeues} requeues used", code)
    if not attempt.requeue_armed:
        return _end(f"requeue is not enabled: {attempt.requeue_reason}", code)
    left = spec.max_requeues - attempt.number - 1
    delay = 0.0 if attempt.cluster == "local" else back_off(idle)
    later = f", in {delay:.0f} s since {idle} attempts in a row made no progress" if delay else ""
    return RequeueDecision(
        action=RequeueAction.REQUEUE,
        reason=f"requeue {attempt.number + 1} of {spec.max_requeues} ({left} left{later}): {why}",
        exit_code=ExitCode.REQUEUED,
        delay=delay,
    )


def _end(reason: str, code: int) -> RequeueDecision:
    return RequeueDecision(action=RequeueAction.END, reason=reason, exit_code=int(code))


def _exit_code(result: AttemptResult) -> int:
    if result.signal_number is not None:
        return 128 + result.signal_number
    if result.outcome in (Outcome.CANCELLED, *_MADE_ROOM):
        return ExitCode.TERMINATED
    if result.fingerprint.startswith(HANG_FINGERPRINT):
        return ExitCode.HANG
    return ExitCode.WORKERS_FAILED if result.retryable else ExitCode.NOT_RETRYABLE
