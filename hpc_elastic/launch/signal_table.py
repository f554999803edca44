"""What a signal means for the attempt: one table of who heard what, and what Slurm says of the job then. Pure.

Slurm signals the tasks alone when a preemption's grace time begins, and the batch script too when it is over (seen on
22.05, as at a cancel, a requeue and the time limit): so a signal by itself says little. docs/reference/signals.md is
generated from the table.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from hpc_elastic.outcome import Outcome


class Call(str, Enum):
    """What was heard."""

    NOTICE = "notice (SIGUSR2)"
    END = "SIGTERM"
    INTERRUPT = "SIGINT, SIGHUP"
    LOOK = "no signal: a look at the job"
    """When the supervisor starts, since Slurm may have called before it could hear, and when the limit is near."""


class HeardBy(str, Enum):
    """Who heard it."""

    BATCH = "supervisor"
    AGENTS = "agents alone"


class JobCondition(str, Enum):
    """What Slurm says of the job."""

    RUNNING = "runs"
    NEAR_LIMIT = "runs, its time limit is near"
    PREEMPTING = "is preempted, its grace time runs"
    PREEMPTED = "is ended by a preemption"
    TIME_LIMIT = "is ended by its time limit"
    REQUEUED = "is requeued"
    ENDED = "is ended"
    """By ``scancel``, most often."""
    SILENT = "no answer in time"
    NO_SLURM = "no Slurm here"


class Meaning(str, Enum):
    """What it comes to."""

    PREEMPT = "preemption"
    LIMIT = "time limit"
    CANCEL = "cancel"
    REQUEUE = "requeue"


class Deadline(str, Enum):
    """Until when."""

    END_TIME = "the job's end as Slurm names it"
    GRACE = "--grace"
    KILL_WAIT = "KillWait"


@dataclass(frozen=True, slots=True)
class Row:
    """What a signal means. Until END_TIME and GRACE workers may save first; with KILL_WAIT everything ends at once."""

    meaning: Meaning
    deadline: Deadline

    @property
    def saves(self) -> bool:
        return self.deadline is not Deadline.KILL_WAIT


_ENDS: Mapping[JobCondition, Row] = {
    JobCondition.PREEMPTED: Row(Meaning.PREEMPT, Deadline.KILL_WAIT),
    JobCondition.TIME_LIMIT: Row(Meaning.LIMIT, Deadline.KILL_WAIT),
    JobCondition.REQUEUED: Row(Meaning.REQUEUE, Deadline.KILL_WAIT),
    JobCondition.ENDED: Row(Meaning.CANCEL, Deadline.KILL_WAIT),
}
"""Slurm has begun to end the job, whatever was heard: its SIGKILL is KillWait away."""
_PREEMPTING: Mapping[JobCondition, Row] = {JobCondition.PREEMPTING: Row(Meaning.PREEMPT, Deadline.END_TIME)}
_NEAR_LIMIT: Mapping[JobCondition, Row] = {JobCondition.NEAR_LIMIT: Row(Meaning.LIMIT, Deadline.END_TIME)}
_CANCEL = Row(Meaning.CANCEL, Deadline.KILL_WAIT)
_NOTICE: Mapping[JobCondition, Row] = {
    **_ENDS,
    **_PREEMPTING,
    **_NEAR_LIMIT,
    JobCondition.RUNNING: Row(Meaning.REQUEUE, Deadline.GRACE),  # by hand: hpc-elastic requeue
    JobCondition.SILENT: Row(Meaning.LIMIT, Deadline.GRACE),
    JobCondition.NO_SLURM: Row(Meaning.REQUEUE, Deadline.GRACE),
}

TABLE: Mapping[Call, Mapping[HeardBy, Mapping[JobCondition, Row]]] = MappingProxyType(
    {
        Call.NOTICE: {HeardBy.BATCH: _NOTICE, HeardBy.AGENTS: _NOTICE},
        Call.END: {
            HeardBy.BATCH: {
                **_ENDS,
                **_PREEMPTING,
                JobCondition.RUNNING: _CANCEL,
                JobCondition.NEAR_LIMIT: _CANCEL,
                JobCondition.SILENT: _CANCEL,
                JobCondition.NO_SLURM: _CANCEL,
            },
            HeardBy.AGENTS: {
                **_ENDS,
                **_PREEMPTING,
                **_NEAR_LIMIT,  # a user's own --signal=TERM@60
                JobCondition.RUNNING: _CANCEL,
                # Of all that Slurm does, only a preemption's grace begins with the tasks alone.
                JobCondition.SILENT: Row(Meaning.PREEMPT, Deadline.GRACE),
                JobCondition.NO_SLURM: _CANCEL,
            },
        },
        Call.INTERRUPT: {
            HeardBy.BATCH: dict.fromkeys(JobCondition, _CANCEL),
            HeardBy.AGENTS: dict.fromkeys(JobCondition, _CANCEL),
        },
        # What is being ended sends its signal as well, to whoever can hear it by then.
        Call.LOOK: {HeardBy.BATCH: {**_PREEMPTING, **_NEAR_LIMIT}},
    }
)


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """What Slurm said, and when the job ends by that."""

    condition: JobCondition
    seconds_left: float | None = None
    """Until the end that Slurm names: the limit, or the grace time's end. None: unlimited, or not known."""
    limit: float | None = None
    """The job's time limit, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalDecision:
    """What to do."""

    meaning: Meaning
    saves: bool
    """Whether workers may save first; else everything ends at once."""
    seconds: float
    """Until the job is ended from outside."""
    outcome: Outcome
    """The attempt's, unless something else ends it first."""
    requeued: bool
    """Whether Slurm has put the job back into the queue."""


def call_of(number: signal.Signals) -> Call:
    """What a signal is, to the table."""
    if number is signal.SIGUSR2:
        return Call.NOTICE
    return Call.END if number is signal.SIGTERM else Call.INTERRUPT


def decide_signal(
    call: Call, heard_by: HeardBy, answer: SlurmAnswer, *, grace: float, kill_wait: float | None
) -> SignalDecision | None:
    """Decide what a call means.

    Args:
        call: What was heard.
        heard_by: Who heard it.
        answer: What Slurm says of the job.
        grace: ``--grace``, in seconds.
        kill_wait: Seconds from Slurm's SIGTERM to its SIGKILL; None where unknown.

    Returns:
        What to do; None: nothing.
    """
    row = TABLE[call].get(heard_by, {}).get(answer.condition)
    if row is None:
        return None
    seconds = {
        Deadline.END_TIME: grace if answer.seconds_left is None else max(1.0, answer.seconds_left),
        Deadline.GRACE: grace,
        Deadline.KILL_WAIT: kill_wait or 0.0,
    }[row.deadline]
    return SignalDecision(
        meaning=row.meaning,
        saves=row.saves,
        seconds=seconds,
        outcome=_outcome(row),
        requeued=answer.condition is JobCondition.REQUEUED,
    )


def _outcome(row: Row) -> Outcome:
    if row.meaning is Meaning.CANCEL:
        return Outcome.CANCELLED
    return Outcome.TIMED_OUT if row.meaning is Meaning.LIMIT and not row.saves else Outcome.PREEMPTED
