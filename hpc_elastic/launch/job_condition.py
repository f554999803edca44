"""What Slurm's record of a job says to a signal that was heard. Pure.

A job that is being ended is COMPLETING, whatever will stand there later (20.11 to 26.05): that it was its time limit is
told by the reason alone, a preemption by its time, a requeue by the number of restarts. All of it tried on 22.05.
"""

from __future__ import annotations

from hpc_elastic.launch.signal_table import JobCondition, SlurmAnswer
from hpc_elastic.launch.site import Allocation
from hpc_elastic.slurm.job_state import JobPhase, JobState, seconds_until_end

_LIMITS = ("TIMEOUT", "DEADLINE")
_LIMIT_REASONS = ("TimeLimit", "DeadLine")


def slurm_answer(state: JobState | None, *, restarts: int, near: float, now_ns: int) -> SlurmAnswer:
    """What Slurm says of the job.

    Args:
        state: Its record; None where Slurm does not know the job (any more).
        restarts: How often it had been requeued when this attempt began.
        near: The limit is near when it is so many seconds away.
        now_ns: This host's wall clock.
    """
    if state is None:
        return SlurmAnswer(JobCondition.ENDED)
    if state.restarts > restarts or state.phase is JobPhase.PENDING:
        return SlurmAnswer(JobCondition.REQUEUED)
    left = seconds_until_end(state, now_ns=now_ns)
    if state.phase in (JobPhase.COMPLETING, JobPhase.FINISHED):
        if state.state in _LIMITS or state.reason in _LIMIT_REASONS:
            return SlurmAnswer(JobCondition.TIME_LIMIT)
        preempted = state.state == "PREEMPTED" or state.preempt_time is not None
        return SlurmAnswer(JobCondition.PREEMPTED if preempted else JobCondition.ENDED)
    if state.preempt_time is not None:
        return SlurmAnswer(JobCondition.PREEMPTING, left)
    is_near = left is not None and left <= near
    limit = None if state.time_limit is None else float(state.time_limit)
    return SlurmAnswer(JobCondition.NEAR_LIMIT if is_near else JobCondition.RUNNING, left, limit)


def allocation_of(state: JobState | None, *, restarts: int, node: str) -> Allocation:
    """Whether a node still belongs to a job.

    Args:
        state: The job's record; None where Slurm does not know the job (any more).
        restarts: How often it had been requeued when this attempt began.
        node: Slurm's name of the node; empty where this is none of the job's (a login node's salloc).
    """
    if state is None or state.phase is JobPhase.FINISHED:
        return Allocation.HELD  # nothing else can have the job
    if state.restarts > restarts or state.phase is JobPhase.PENDING:
        return Allocation.LOST
    return Allocation.LOST if node and state.nodes and node not in state.nodes else Allocation.HELD
