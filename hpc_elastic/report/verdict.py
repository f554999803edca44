"""What a round, or an attempt, ended from: the root cause, with its evidence and its confidence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from hpc_elastic.failures.ranking import Category, Suspect
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import NodeLoss
from hpc_elastic.report.suspects import look_at

ONLY_FAILURE = "the only failure"
"""The evidence for a failure beside which nothing else is known."""


class Cause(str, Enum):
    """What the verdict points at."""

    WORKER = "worker"
    NODE = "node"
    FILESYSTEM = "filesystem"
    """The run directory's filesystem refused several nodes, or all, for longer than they wait."""
    UNKNOWN = "unknown"
    """Something failed, and every failure reads like a consequence of another one."""
    NONE = "none"
    """Nothing failed, or all that did was ended by this job itself."""


class Confidence(str, Enum):
    """How sure it is."""

    HIGH = "high"
    TIE = "tie"
    """Candidates that the clocks can't order, or that nobody compared."""
    LOW = "low"
    NONE = "none"


class Verdict(Struct, frozen=True, kw_only=True):
    """The root cause of a round's end."""

    cause: Cause
    confidence: Confidence
    evidence: str
    """Why this one: a sentence for the report."""
    failure: WorkerFailure | None = None
    """The root cause, or for `Cause.UNKNOWN` the first of the symptoms."""
    lost_node: NodeLoss | None = None
    what: str = ""
    """For `Cause.FILESYSTEM`: what it refused whom."""
    category: Category | None = None
    fingerprint: str = ""
    retryable: bool = True
    """Whether another start may help."""
    same_failure: tuple[int, ...] = ()
    """Global ranks that failed in the same way, the root cause's included."""
    candidates: tuple[WorkerFailure, ...] = ()
    """The other failures that are no consequence, by time; without those of the same kind."""
    apart: tuple[str, ...] = ()
    """Hosts on which all workers failed in this way, where no worker of the others did: what fails is on the node."""
    suspects: tuple[Suspect, ...] = ()
    """For `Cause.UNKNOWN`: the ranks to look at, the likeliest first."""
    headline: str = ""
    """What happened, where it was no failure of a worker's and no single node's."""
    resolution_ns: int | None = None
    """How close it and the next candidate may be before their order means nothing; None: not known, or no candidate."""

    @property
    def summary(self) -> str:
        """One line: what happened, where."""
        if self.what:
            return self.what
        if self.lost_node is not None:
            return self.lost_node.summary
        if self.failure is None:
            return self.headline or "no failures"
        if self.cause is Cause.UNKNOWN:
            if self.suspects:
                return f"cause not known. {look_at(self.suspects)}"
            return f"cause not known. First seen: {self._failure_line}"
        return self._failure_line

    @property
    def _failure_line(self) -> str:
        assert self.failure is not None
        return f"rank {self.failure.global_rank} on {self.failure.host}: {self.failure.headline}"


def of_worker(
    root: WorkerFailure,
    confidence: Confidence,
    evidence: str,
    *,
    cause: Cause = Cause.WORKER,
    same: tuple[int, ...] = (),
    candidates: Iterable[WorkerFailure] = (),
    suspects: tuple[Suspect, ...] = (),
    resolution_ns: int | None = None,
) -> Verdict:
    """The verdict that names a worker's failure."""
    return Verdict(
        cause=cause,
        confidence=confidence,
        evidence=evidence,
        failure=root,
        category=root.category,
        fingerprint=root.fingerprint,
        # Of one that reads like a consequence the cause is not known.
        retryable=root.retryable or cause is Cause.UNKNOWN,
        same_failure=same or (root.global_rank,),
        candidates=tuple(candidates),
        suspects=suspects,
        resolution_ns=resolution_ns,
    )
