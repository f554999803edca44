"""The root cause of a round's or an attempt's end, with its evidence and its confidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.failures.ranking import Category, FailureClass, Suspect
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import NodeLoss, RankStatus
from hpc_elastic.report.suspects import look_at

ONLY_FAILURE = "the only failure"
"""The evidence for a failure beside which nothing else is known."""


class Cause(str, Enum):
    WORKER = "worker"
    NODE = "node"
    FILESYSTEM = "filesystem"
    """The run directory's filesystem refused several nodes, or all, for longer than they wait."""
    UNKNOWN = "unknown"
    """Something failed, and every failure reads like a consequence of another one."""
    NONE = "none"
    """Nothing failed, or all that did was ended by this job itself."""


class Confidence(str, Enum):
    HIGH = "high"
    TIE = "tie"
    """Candidates that the clocks can't order, or that nobody compared."""
    LOW = "low"
    NONE = "none"


class Verdict(Struct, frozen=True, kw_only=True):
    cause: Cause = Cause.NONE
    confidence: Confidence = Confidence.HIGH
    evidence: str
    failure: WorkerFailure | None = None
    """The root cause, or for `Cause.UNKNOWN` the first of the symptoms."""
    lost_node: NodeLoss | None = None
    what: str = ""
    """The filesystem's refusal (`Cause.FILESYSTEM`)."""
    category: Category | None = None
    fingerprint: str = ""
    retryable: bool = True
    same_failure: tuple[int, ...] = ()
    """Global ranks that failed in the same way, the root cause's included."""
    candidates: tuple[WorkerFailure, ...] = ()
    """The other failures that are no consequence, by time; without those of the same kind."""
    apart: tuple[str, ...] = ()
    """Hosts on which all workers failed in this way, where no worker of the others did: what fails is on the node."""
    suspects: tuple[Suspect, ...] = ()
    """The ranks to look at, the likeliest first (`Cause.UNKNOWN`)."""
    headline: str = ""
    """The cause that was no failure of a worker's and no single node's."""
    resolution_ns: int | None = None
    """How close it and the next candidate may be before their order means nothing; None: not known, or no candidate."""

    @property
    def summary(self) -> str:
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
    **more: Any,
) -> Verdict:
    """The verdict with what its worker's failure says; `more`: further fields."""
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
        **more,
    )


def decide_hang(
    root: WorkerFailure,
    causes: list[WorkerFailure],
    symptoms: list[WorkerFailure],
    rank_statuses: Sequence[RankStatus],
    odd: Sequence[Suspect] = (),
    world_size: int = 0,
    has_ended: bool = False,
    is_open: bool = False,
) -> Verdict:
    """Find the rank for which the others wait: the furthest behind, the odd one out by the stacks, or the first silent.

    `root` is what the ranking names; `odd` are the ranks whose stacks differ from the others', or with `has_ended`
    those that had ended with 0, for which those that hung waited. `is_open`: either `odd` or the others may be at
    fault, since it waits, and they do something else.
    """
    step = -1 if root.last_step is None else root.last_step
    others = [status for status in rank_statuses if status.rank != root.global_rank]
    further = [status.step for status in others if status.step is not None and status.step > step]
    hung = {one.global_rank: one for one in causes if one.failure_class is FailureClass.HANG}
    cause, confidence, suspects = Cause.WORKER, Confidence.HIGH, tuple(odd)
    if has_ended:
        cause, confidence = Cause.UNKNOWN, Confidence.NONE
        evidence = f"not known: what hung waited for other ranks. {look_at(odd)}"
    elif further:
        at = f"step {min(further)}" if min(further) == max(further) else f"steps {min(further)} to {max(further)}"
        evidence, suspects = f"furthest behind: {plural(len(further), 'other rank')} had got to {at}", ()
    elif len(odd) == 1 and odd[0].rank in hung:
        root, suspects = hung[odd[0].rank], ()
        confidence = Confidence.LOW if is_open else Confidence.HIGH
        evidence = f"the odd one out: {odd[0].why}"
    elif odd:
        cause, confidence = Cause.UNKNOWN, Confidence.NONE
        alike = "hung together" if root.last_step is None else f"hung at step {step}"
        evidence = f"not known: ranks {alike}. {look_at(odd)}"
    elif level := [rank for rank, one in hung.items() if one is not root and one.last_step == root.last_step]:
        confidence = Confidence.LOW
        alike = "hung too" if root.last_step is None else "hung at the same step"
        evidence = f"silent first; {ranks_text(level)} {alike}: which one the others waited for, the stacks show"
    elif quiet := _as_silent(root, rank_statuses):
        confidence = Confidence.LOW
        evidence = f"{ranks_text(quiet)} gave no heartbeat for as long, in sections without a timeout"
    elif world_size > len(others) + 1:
        # In many scripts one rank reports for all.
        confidence = Confidence.LOW
        evidence = f"only {plural(len(others) + 1, 'rank')} of {world_size} sent heartbeats"
    else:
        evidence = "the only rank without progress"
    if symptoms:
        are = "is its consequence" if len(symptoms) == 1 else "are its consequences"
        evidence += f"; {plural(len(symptoms), 'failure')} elsewhere {are}"
    candidates = (failure for failure in causes if failure is not root)
    return of_worker(root, confidence, evidence, cause=cause, candidates=candidates, suspects=suspects)


def _as_silent(root: WorkerFailure, rank_statuses: Sequence[RankStatus]) -> list[int]:
    """The ranks, beside a hung one, whose last heartbeat is about as old, or older."""
    own = next((status.age for status in rank_statuses if status.rank == root.global_rank), None)
    if own is None:
        return []
    least = own - max(1.0, 0.1 * own)
    return [status.rank for status in rank_statuses if status.rank != root.global_rank and status.age >= least]
