"""How an attempt can end, and the exit codes that say so. docs/reference/exit-codes.md lists them."""

from __future__ import annotations

from enum import Enum, IntEnum


class Outcome(str, Enum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Its workers failed, and it was given up."""
    TOO_FEW_NODES = "too_few_nodes"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """Notice was given: preemption, or the time limit is near."""
    TIMED_OUT = "timed_out"
    """The time limit ended it."""


STORE_LOST_CODE = 94
"""Of an agent alone: the run's store is gone or was replaced, and another agent in its place could do no better."""

UNHEALTHY_CODE = 95
"""Of an agent alone: its node failed a health check and has left the run; another agent there would find the same."""

REFUSED_CODE = 96
"""Of an agent alone: the run directory has refused it, or not answered, for longer than an agent waits. Whether that is
its node's fault depends on what the others saw."""


class ExitCode(IntEnum):
    """Of every command that ends with a run's end. A run that a signal ended: 128 + the signal's number."""

    OK = 0
    WORKERS_FAILED = 1
    USAGE = 2
    REQUEUED = 75
    NOT_RETRYABLE = 93
    """Also a worker's own way to say: don't try this again."""
    HANG = 124
    INTERRUPTED = 130
    TERMINATED = 143
