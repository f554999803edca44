"""How an attempt ended, as what follows it needs to know."""

from __future__ import annotations

from msgspec import Struct

from hpc_elastic.base.outcome import Outcome
from hpc_elastic.rendezvous.state import RoundRecord


class AttemptResult(Struct, frozen=True, kw_only=True):
    """How the attempt ended."""

    outcome: Outcome
    reason: str
    retryable: bool
    signal_number: int | None
    fingerprint: str
    """Of the failure that it ended by, where that counts as the script's."""
    step: int
    """The furthest step reported by then, -1 for none."""
    seconds: float
    """How long the attempt lasted."""
    requeued: bool = False
    """Whether Slurm has put the job back into the queue itself."""
    cancelled: bool = False
    """Whether the job was cancelled after the attempt had been given up for another reason."""


def closed_result(
    record: RoundRecord, outcome: Outcome, *, signal_number: int | None = None, seconds: float = 0.0
) -> AttemptResult:
    """How an attempt ended, by the record that closed it.

    Args:
        record: The log's last one.
        outcome: Its outcome.
        signal_number: The signal that ended the attempt, where one did.
        seconds: How long the attempt took.
    """
    return AttemptResult(
        outcome=outcome,
        reason=record.reason,
        retryable=record.retryable,
        signal_number=signal_number,
        # What an earlier round of it failed by is no reason where a notice, or lost nodes, ended it.
        fingerprint=record.memory.fingerprint if outcome is Outcome.FAILED else "",
        step=record.memory.step,
        seconds=seconds,
    )
