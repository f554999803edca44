"""What follows an attempt, by what is known of it and of the one before. Pure."""

from __future__ import annotations

from hpc_elastic.agent.hang import HANG_FINGERPRINT, may_be_a_bug
from hpc_elastic.agent.restart_policy import made_progress
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.launch.attempt_result import AttemptResult
from hpc_elastic.launch.requeue import RequeueDecision, RequeueFacts, decide_requeue
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.result import StoredResult
from hpc_elastic.run.spec import RunSpec


def _made_progress(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> bool:
    return made_progress(
        step=result.step,
        before=before.step if before is not None else -1,
        seconds=result.seconds,
        window=spec.restart_window,
    )


def idle_attempts(before: StoredResult | None, spec: RunSpec, result: AttemptResult) -> int:
    """How many attempts in a row, this one included, ended by a failure without progress."""
    is_first_step = result.step >= 0 and (before is None or before.step < 0)
    made_room = result.outcome in (Outcome.PREEMPTED, Outcome.TIMED_OUT)
    if made_room or is_first_step or _made_progress(before, spec, result):
        return 0
    return 1 + (before.idle if before is not None else 0)


def decide_next(
    before: StoredResult | None, spec: RunSpec, attempt: AttemptInfo, result: AttemptResult, *, idle: int = 0
) -> RequeueDecision:
    """Whether the job is requeued after an attempt, when, and with which exit code this one ends.

    Args:
        before: How the attempt before it ended; None for the first one, and where that is not known.
        spec: What was asked for.
        attempt: The attempt.
        result: How it ended.
        idle: From `idle_attempts`.
    """
    same = before is not None and may_be_a_bug(result.fingerprint) and before.fingerprint == result.fingerprint
    progress = _made_progress(before, spec, result)
    return decide_requeue(
        RequeueFacts(
            outcome=result.outcome,
            reason=result.reason,
            retryable=result.retryable,
            attempt=attempt.number,
            max_requeues=spec.max_requeues,
            armed=attempt.requeue_armed,
            armed_reason=attempt.requeue_reason,
            same_as_before=same and not progress,
            signal_number=result.signal_number,
            requeued=result.requeued,
            cancelled=result.cancelled,
            hang=result.fingerprint.startswith(HANG_FINGERPRINT),
            idle=0 if attempt.cluster == "local" else idle,
        )
    )
