"""The outcomes of an attempt, and their exit codes. docs/reference/exit-codes.md lists them."""

from __future__ import annotations

from enum import Enum, IntEnum


class Outcome(str, Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Its workers failed, and it gave up."""
    TOO_FEW_NODES = "too_few_nodes"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """Notice was given: preemption, or the time limit is near."""
    TIMED_OUT = "timed_out"
    SUPERSEDED = "superseded"
    """A later attempt took the run over while this one could not be reached (`launch.supersede`)."""


_NOTICES = {"(time limit)": "near time limit", "(requeue)": "asked to requeue"}


def outcome_text(outcome: str, reason: str = "") -> str:
    """The outcome for people: only a preemption preempts a run, whatever else made it save and end."""
    other = next((text for meaning, text in _NOTICES.items() if meaning in reason), "")
    return other if other and outcome == Outcome.PREEMPTED.value else outcome.replace("_", " ")


# Exit codes between agents, supervisor and guardian.
STORE_LOST_CODE = 94
"""An agent's: the run's store is gone or was replaced, and another agent in its place could do no better."""
UNHEALTHY_CODE = 95
"""An agent's: its node failed a health check and has left the run; another agent there would find the same."""
REFUSED_CODE = 96
"""An agent's: the run directory has refused it, or not answered, for longer than an agent waits. The other agents'
ends show whether that is its node's fault."""
UNCONFIRMED_CODE = 97
"""A finisher's (an agent's process that would end the attempt): Slurm did not confirm that the job has this node."""


class GivenUp(str, Enum):
    """Why the supervisor starts no further agent on a node: `cause` of its event ``node_given_up``."""

    NOT_STARTED = "not_started"
    COULD_NOT_RUN = "could_not_run"
    """The process there ended before it was an agent: no interpreter, no run directory, a failing TaskProlog."""
    DIED = "died"
    """Its agents took part and ended, too often; or in a way that another one would repeat."""
    UNHEALTHY = "unhealthy"
    STORE_LOST = "store_lost"
    REFUSED = "refused"
    """The run directory's filesystem refused its agent, or did not answer, for longer than an agent waits."""


class ExitCode(IntEnum):
    """The exit codes of every command that ends with a run's end. A run that a signal ended: 128 + the signal's
    number."""

    OK = 0
    WORKERS_FAILED = 1
    USAGE = 2
    REQUEUED = 75
    NOT_RETRYABLE = 93
    """Also returned by a worker to forbid a retry."""
    HANG = 124
    INTERRUPTED = 130
    TERMINATED = 143
