"""Which failure was the cause: a pure decision over one round's failures, with its evidence and its confidence.

By class first (what is not a symptom), then by each agent's own time of the failure. Two times that are closer than
the clocks can tell apart are a tie, and said to be one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from hpc_elastic.failures.classify import NOT_RETRYABLE_EXIT_CODE, Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.light_dataclass import dataclass
from hpc_elastic.report.fold import rank_ranges
from hpc_elastic.report.history import NodeLoss, RankWord

_OUR_SIGNALS = ("SIGTERM", "SIGKILL")
"""Whoever ended by one of these may have logged an exception, and gone on, before a stop that it did not cause."""
_HOSTS = 3
_CAUSES = (FailureClass.ROOT, FailureClass.HANG, FailureClass.INFRASTRUCTURE)


class Cause(str, Enum):
    """What the verdict points at."""

    WORKER = "worker"
    NODE = "node"
    UNKNOWN = "unknown"
    """Something failed, and every failure reads like a consequence of another one."""
    NONE = "none"
    """Nothing failed, or all that did was ended by this job itself."""


class Confidence(str, Enum):
    """How sure it is."""

    HIGH = "high"
    TIE = "tie"
    """Candidates that the clocks can't order."""
    LOW = "low"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockBounds:
    """How close two times may be before their order means nothing, nanoseconds."""

    same_host_ns: int = 2_000_000
    """One agent reads the ends of its workers one after the other."""
    across_hosts_ns: int = 100_000_000
    """Assumed, since no offsets between the hosts' clocks were measured: NTP keeps a cluster well within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The root cause of a round's end."""

    cause: Cause
    confidence: Confidence
    evidence: str
    """Why this one: a sentence for the report."""
    failure: WorkerFailure | None = None
    """The root cause, or for `Cause.UNKNOWN` the first of the symptoms."""
    lost_node: NodeLoss | None = None
    category: Category | None = None
    fingerprint: str = ""
    retryable: bool = True
    """Whether another start may help."""
    same_failure: tuple[int, ...] = ()
    """Global ranks that failed in the same way, the root cause's included."""
    candidates: tuple[WorkerFailure, ...] = ()
    """The other failures that are no consequence, by time; without those of the same kind."""

    @property
    def summary(self) -> str:
        """One line: what happened, where."""
        if self.lost_node is not None:
            return self.lost_node.summary
        if self.failure is None:
            return "no worker failed by itself"
        return f"rank {self.failure.global_rank} on {self.failure.host}: {self.failure.headline}"


def decide_verdict(
    failures: Sequence[WorkerFailure],
    *,
    lost_nodes: Sequence[NodeLoss] = (),
    words: Sequence[RankWord] = (),
    ranks: Mapping[int, str] | None = None,
    clocks: ClockBounds | None = None,
) -> Verdict:
    """Name the root cause among the failures of one round.

    Args:
        failures: In any order.
        lost_nodes: Nodes that were taken out of the round; each is a candidate at the time of its last sign.
        words: All ranks' last heartbeats.
        ranks: The host of every rank of the round, where it is known.
        clocks: What two hosts' times are worth.
    """
    bounds = clocks or ClockBounds()
    ordered = sorted(failures, key=lambda failure: (failure.ended_ns, failure.global_rank))
    causes = [failure for failure in ordered if failure.failure_class in _CAUSES]
    symptoms = [failure for failure in ordered if failure.failure_class is FailureClass.SYMPTOM]
    # Ended by us, but it had printed an exception of its own before: it was about to end, or hung in its shutdown.
    stopped = [failure for failure in ordered if failure.failure_class is FailureClass.STOPPED_BY_US]
    talking = [failure for failure in stopped if failure.exception_type]
    retryable = all(failure.exitcode != NOT_RETRYABLE_EXIT_CODE for failure in failures)
    lost = sorted(lost_nodes, key=lambda loss: (loss.gone_ns, loss.node))
    if lost and (not causes or lost[0].gone_ns <= causes[0].ended_ns):
        return _node_verdict(lost, causes, symptoms, bounds, retryable=retryable)
    if causes and causes[0].failure_class is FailureClass.HANG:
        return _hang_verdict(causes, symptoms, words, retryable=retryable)
    if causes:
        return _worker_verdict(causes, talking, len(symptoms), lost, bounds, retryable=retryable)
    if talking and (symptoms or talking[0].signal not in _OUR_SIGNALS):
        return _talking_verdict(talking[0], len(symptoms), retryable=retryable)
    if symptoms:
        first = symptoms[0]
        return Verdict(
            cause=Cause.UNKNOWN,
            confidence=Confidence.NONE,
            evidence=_unknown(symptoms, ranks or {}),
            failure=first,
            category=first.category,
            fingerprint=first.fingerprint,
            retryable=retryable,
            same_failure=_same(first, ordered),
        )
    evidence = f"all {len(ordered)} were ended by this job itself" if ordered else "there is no failure"
    return Verdict(cause=Cause.NONE, confidence=Confidence.HIGH, evidence=evidence)


def _unknown(symptoms: list[WorkerFailure], ranks: Mapping[int, str]) -> str:
    """Every failure is a consequence: whoever said nothing is the one to look at."""
    if len(symptoms) == 1:
        reads = "not known: the only failure reads like the consequence of another"
    else:
        reads = f"not known: {len(symptoms)} failures, and each reads like the consequence of another"
    silent = sorted(ranks.keys() - {failure.global_rank for failure in symptoms})
    if not silent:
        return f"{reads}, which left no trace. Shown is the first one seen"
    hosts = dict.fromkeys(ranks[rank] for rank in silent)
    where = f"on {', '.join(hosts)}" if len(hosts) <= _HOSTS else f"on {len(hosts)} nodes"
    told = "" if len(symptoms) == 1 else ". Shown is the first one seen"
    if len(silent) == 1:
        return f"{reads}. Look at rank {silent[0]} {where}, which did not fail: it hung, was late, or ended early{told}"
    return (
        f"{reads}. Look at ranks {rank_ranges(silent)} {where}, which did not fail: "
        f"one of them hung, was late, or ended early{told}"
    )


def _hang_verdict(
    causes: list[WorkerFailure], symptoms: list[WorkerFailure], words: Sequence[RankWord], *, retryable: bool
) -> Verdict:
    """Where one hangs the others wait for it: it is the furthest behind, or else the first that fell silent."""
    hung = sorted(
        (failure for failure in causes if failure.failure_class is FailureClass.HANG),
        key=lambda f: (-1 if f.last_step is None else f.last_step, f.ended_ns, f.global_rank),
    )
    root = hung[0]
    step = -1 if root.last_step is None else root.last_step
    others = [word for word in words if word.rank != root.global_rank]
    further = [word.step for word in others if word.step is not None and word.step > step]
    level = [failure for failure in hung[1:] if failure.last_step == root.last_step]
    confidence = Confidence.HIGH
    if further:
        at = f"step {min(further)}" if min(further) == max(further) else f"steps {min(further)} to {max(further)}"
        evidence = f"furthest behind: {_count(len(further), 'other rank')} had got to {at}"
    elif level:
        confidence = Confidence.LOW
        ranks = rank_ranges([failure.global_rank for failure in level])
        evidence = (
            f"first to fall silent; rank{'s' if len(level) > 1 else ''} {ranks} hung at the same step: "
            "which one the others waited for, the stacks show"
        )
    else:
        evidence = "the only one that gave no sign of life"
    if symptoms:
        are = "is its consequence" if len(symptoms) == 1 else "are its consequences"
        evidence += f"; {_count(len(symptoms), 'failure')} elsewhere {are}"
    return Verdict(
        cause=Cause.WORKER,
        confidence=confidence,
        evidence=evidence,
        failure=root,
        category=root.category,
        fingerprint=root.fingerprint,
        retryable=retryable and root.retryable,
        same_failure=(root.global_rank,),
        candidates=tuple(failure for failure in causes if failure is not root),
    )


def _worker_verdict(
    causes: list[WorkerFailure],
    talking: list[WorkerFailure],
    symptoms: int,
    lost: list[NodeLoss],
    bounds: ClockBounds,
    *,
    retryable: bool,
) -> Verdict:
    root = causes[0]
    others = [failure for failure in causes if failure.fingerprint != root.fingerprint]
    same = _same(root, [*causes, *talking])
    confidence = Confidence.HIGH
    consequences = f"; {_count(symptoms, 'other')} {'is a consequence' if symptoms == 1 else 'are consequences'}"
    if others:
        near = [failure for failure in others if _is_tie(root, failure, bounds)]
        if near:
            confidence = Confidence.TIE
            names = ", ".join(f"rank {failure.global_rank} on {failure.host}" for failure in near[:3])
            more = f" and {len(near) - 3} more" if len(near) > 3 else ""
            within = _resolution(root, near, bounds)
            evidence = f"not certain: {names}{more} failed otherwise within the clocks' resolution ({within})"
        else:
            gap = (others[0].ended_ns - root.ended_ns) / 1e9
            evidence = (
                f"first of {len(others) + 1} different failures, {_seconds(gap)} before the next "
                f"(rank {others[0].global_rank} on {others[0].host})"
            )
    elif len(same) > 1:
        evidence = f"the same failure on {len(same)} ranks ({rank_ranges(same)}); this one was seen first"
    elif symptoms:
        evidence = "the only failure that is not a consequence of another one"
    else:
        evidence = "the only failure"
    if symptoms:
        evidence += consequences
    if lost:
        evidence += f"; {_after(lost[0])}"
    return Verdict(
        cause=Cause.WORKER,
        confidence=confidence,
        evidence=evidence,
        failure=root,
        category=root.category,
        fingerprint=root.fingerprint,
        retryable=retryable and root.retryable,
        same_failure=same,
        candidates=tuple(others),
    )


def _after(loss: NodeLoss) -> str:
    if loss.broke:
        return f"after it, {loss.broke}"
    return f"{loss.host} left after it" if loss.left else f"node {loss.host} was lost after it"


def _node_verdict(
    lost: list[NodeLoss],
    causes: list[WorkerFailure],
    symptoms: list[WorkerFailure],
    bounds: ClockBounds,
    *,
    retryable: bool,
) -> Verdict:
    first = lost[0]
    silent = [f"no sign of it for {_seconds(first.age)}"] if first.age else []
    parts = [", ".join([*silent, *([first.detail] if first.detail else [])]) or "its agent left the run"]
    if first.broke:
        parts = ["the script did not cause this: a process of hpc-elastic's own did"]
    elif first.left:
        parts = ["it found itself unfit for another round, and took itself out"]
    confidence = Confidence.HIGH
    if len(lost) > 1:
        parts.append(f"lost too: {', '.join(loss.host for loss in lost[1:4])}" + (" ..." if len(lost) > 4 else ""))
    if causes and causes[0].ended_ns - first.gone_ns <= bounds.across_hosts_ns:
        confidence = Confidence.TIE
        parts.append(f"not certain: rank {causes[0].global_rank} on {causes[0].host} failed at about the same time")
    if symptoms:
        parts.append(
            f"{_count(len(symptoms), 'failure')} elsewhere {'is' if len(symptoms) == 1 else 'are'} its consequence"
        )
    return Verdict(
        cause=Cause.NODE,
        confidence=confidence,
        evidence="; ".join(parts),
        lost_node=first,
        category=Category.PLATFORM if first.agent_only or first.broke else Category.INFRASTRUCTURE,
        fingerprint=_node_fingerprint(first),
        retryable=retryable,
        candidates=tuple(causes),
    )


def _node_fingerprint(loss: NodeLoss) -> str:
    if loss.broke:
        return "platform_failure"
    return "agent_died" if loss.agent_only else "node_left" if loss.left else "node_lost"


def _talking_verdict(failure: WorkerFailure, symptoms: int, *, retryable: bool) -> Verdict:
    evidence = "likely: it had printed this, and had not ended when this job ended it"
    if symptoms:
        evidence += (
            f"; {_count(symptoms, 'other failure')} {'is a consequence' if symptoms == 1 else 'are consequences'}"
        )
    return Verdict(
        cause=Cause.WORKER,
        confidence=Confidence.LOW,
        evidence=evidence,
        failure=failure,
        category=failure.category,
        fingerprint=failure.fingerprint,
        retryable=retryable,
        same_failure=(failure.global_rank,),
    )


def _same(root: WorkerFailure, failures: Sequence[WorkerFailure]) -> tuple[int, ...]:
    return tuple(sorted(f.global_rank for f in failures if f.fingerprint == root.fingerprint))


def _is_tie(root: WorkerFailure, other: WorkerFailure, bounds: ClockBounds) -> bool:
    bound = bounds.same_host_ns if root.host == other.host else bounds.across_hosts_ns
    return other.ended_ns - root.ended_ns <= bound


def _resolution(root: WorkerFailure, near: Sequence[WorkerFailure], bounds: ClockBounds) -> str:
    if all(failure.host == root.host for failure in near):
        return f"{bounds.same_host_ns // 1_000_000} ms on one host"
    return f"{bounds.across_hosts_ns // 1_000_000} ms between hosts"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
