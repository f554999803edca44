"""Whether, how and when the job is put back into the queue when an attempt has ended: pure, with the reasons.

`decide_arming` says at an attempt's start which way there is, `decide_requeue` at its end whether it is taken.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.base.outcome import ExitCode, Outcome
from hpc_elastic.options.job_options import RequeueChoice

BACK_OFF_SECONDS = 60.0
"""Before the second attempt in a row that follows one without progress; twice as long before each one after that."""
MOST_BACK_OFF_SECONDS = 1800.0


class RequeueAction(str, Enum):
    """What happens to the job."""

    REQUEUE = "requeue"
    END = "end"


class RequeueWay(str, Enum):
    """How a run gets its next attempt."""

    REQUEUE = "requeue"
    """``scontrol requeue``: the same job again."""
    ALLOW = "allow"
    """The same, after its owner has set Requeue=1: the site's default is that jobs are not requeued."""
    CHAIN = "chain"
    """A follow-on job in the same run directory, which depends on this one's end."""
    NONE = "none"


class ArmingFacts(Struct, frozen=True, kw_only=True):
    """What is known about the job when an attempt begins."""

    wanted: bool
    """Whether requeues were asked for at all."""
    choice: RequeueChoice
    has_batch_script: bool
    """False: ``salloc``; nobody would run it again."""
    can_chain: bool
    """Whether the script that was submitted is this program's own, so that it can be submitted once more."""
    known: bool = True
    """Slurm could be asked, and knows the job."""
    problem: str = ""
    """Why it could not be asked."""
    job_allows: bool = True
    """``Requeue=1``."""
    site_allows: bool = True
    """``JobRequeue=1``: what holds for jobs that don't say."""


class Arming(Struct, frozen=True, kw_only=True):
    """Which way there is."""

    way: RequeueWay
    reason: str = ""
    """Why there is none, or not the usual one; empty for that."""

    @property
    def is_armed(self) -> bool:
        return self.way is not RequeueWay.NONE


def decide_arming(facts: ArmingFacts) -> Arming:
    """Decide which way an attempt's successor comes, if any."""
    own_script = "the batch script is not one that hpc-elastic submit made"
    if not facts.wanted:
        return Arming(way=RequeueWay.NONE, reason="--no-requeue or --max-requeues 0 was given")
    if not facts.has_batch_script:
        return Arming(
            way=RequeueWay.NONE, reason="this is an allocation of salloc's, and Slurm requeues batch jobs only"
        )
    if facts.choice is RequeueChoice.CHAIN:
        if facts.can_chain:
            return Arming(way=RequeueWay.CHAIN, reason="--requeue-with chain was given")
        return Arming(way=RequeueWay.NONE, reason=f"--requeue-with chain: {own_script}")
    if facts.problem:
        return Arming(way=RequeueWay.REQUEUE, reason=f"not verified: {facts.problem}")
    if not facts.known:
        return Arming(way=RequeueWay.NONE, reason="Slurm does not know this job")
    if facts.job_allows:
        return Arming(way=RequeueWay.REQUEUE)
    why = "this job was submitted with --no-requeue" if facts.site_allows else "the site has JobRequeue=0"
    if facts.choice is RequeueChoice.AUTO and facts.can_chain:
        return Arming(way=RequeueWay.CHAIN, reason=f"this job may not be requeued: {why}")
    if not facts.site_allows:
        return Arming(way=RequeueWay.ALLOW, reason=why)
    return Arming(way=RequeueWay.NONE, reason=f"{why}, or the site's rules say so")


def back_off(idle: int) -> float:
    """Seconds until an attempt may begin.

    Args:
        idle: How many attempts in a row have ended without progress.
    """
    if idle < 2:
        return 0.0
    return min(MOST_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2.0 ** min(idle - 2, 30))


class RequeueFacts(Struct, frozen=True, kw_only=True):
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
    idle: int = 0
    """How many attempts in a row, this one included, ended by a failure without progress."""
    requeued: bool = False
    """Slurm has put the job back into the queue itself: a preemption, or ``scontrol requeue``."""
    cancelled: bool = False
    """The job was cancelled after the attempt had ended by something else."""


_MADE_ROOM = (Outcome.PREEMPTED, Outcome.TIMED_OUT)
"""Ended by Slurm, though nothing is wrong with the run: it goes on in the queue."""


class RequeueDecision(Struct, frozen=True, kw_only=True):
    """What to do, why, and the code to exit with."""

    action: RequeueAction
    reason: str
    exit_code: int
    delay: float = 0.0
    """Seconds before which the next attempt is not to begin."""


def decide_requeue(facts: RequeueFacts) -> RequeueDecision:
    """Decide. Requeues what another attempt can mend: spent restarts, lost nodes, a preemption."""
    if facts.outcome is Outcome.SUCCEEDED:
        return _end("the run succeeded", ExitCode.OK)
    code = _exit_code(facts)
    if facts.outcome is Outcome.CANCELLED:
        return _end(f"the run was cancelled ({facts.reason})", code)
    if facts.outcome is Outcome.SUPERSEDED:
        return _end(f"the run goes on in a later attempt ({facts.reason})", code)
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
    delay = back_off(facts.idle)
    later = f", in {delay:.0f} s since {facts.idle} attempts in a row made no progress" if delay else ""
    return RequeueDecision(
        action=RequeueAction.REQUEUE,
        reason=f"requeue {facts.attempt + 1} of {facts.max_requeues} ({left} left{later}): {facts.reason}",
        exit_code=ExitCode.REQUEUED,
        delay=delay,
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
