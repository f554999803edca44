"""The root cause of a round's or an attempt's end, and the ranks to look at where every failure is a symptom: pure.

A rank that ended with 0 while the others still needed it is the likeliest one: its sockets closed, and every peer that
was in a collective with it lost a connection. Next come the ranks that differ from the others by what they were doing,
and then the ranks that neither failed nor ended: one of them hung, was late, or was just not as fast as the others to
notice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import plural, ranges, ranks_text, seconds_text
from hpc_elastic.failures.collectives import WAITS_FOR_RANKS, RankComparison, is_with_the_others
from hpc_elastic.failures.ranking import Category, FailureClass, Moment, Order, Suspect, gap_ns, order_of
from hpc_elastic.failures.worker_failure import LOGGED_BEFORE, WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.history import NodeLoss, RankStatus, WorkerEnd
from hpc_elastic.run.progress import Activity, Doing

MOST_SUSPECTS = 16
_TEARDOWN_NS = 5_000_000_000
"""The end of an interpreter with torch in it takes at most this on a busy node."""
_HOSTS = 3
_PLURAL = {"it was": "they were", "it is": "they are", "it has": "they have", "its ": "their "}
_SINGULAR = re.compile(r"\bit (?:was|is|has|ended|had|did|never|entered|left)\b|\bits (?=last there|device)")
_SILENT = "it hung, was late, or ended early"
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
    lost_node: NodeLoss | None = None
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
    headline: str = ""
    """The cause that was no failure of a worker's and no single node's."""
    resolution_ns: int | None = None
    """How close it and the next candidate may be before their order means nothing; None: not known, or no candidate."""

    @property
    def summary(self) -> str:
        if self.lost_node is not None:
            return self.lost_node.summary
        if self.failure is None:
            return self.headline or "no failures"
        line = f"rank {self.failure.global_rank} on {self.failure.host}: {self.failure.headline}"
        if self.cause is not Cause.UNKNOWN:
            return line
        return f"cause not known. {look_at(self.suspects) if self.suspects else f'First seen: {line}'}"


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
    early: Sequence[Suspect],
    compared: RankComparison,
    world_size: int,
) -> Verdict:
    """`early`: ranks that had ended with 0; `compared`: those whose stacks differ from the others'."""
    odd = early or compared.suspects
    step = -1 if root.last_step is None else root.last_step
    others = [status for status in rank_statuses if status.rank != root.global_rank]
    further = [status.step for status in others if status.step is not None and status.step > step]
    hung = {one.global_rank: one for one in causes if one.failure_class is FailureClass.HANG}
    cause, confidence, suspects = Cause.WORKER, Confidence.HIGH, tuple(odd)
    if early:
        cause, confidence = Cause.UNKNOWN, Confidence.NONE
        evidence = f"not known: what hung waited for other ranks. {look_at(odd)}"
    elif further:
        at = f"step {min(further)}" if min(further) == max(further) else f"steps {min(further)} to {max(further)}"
        evidence, suspects = f"furthest behind: {plural(len(further), 'other rank')} had got to {at}", ()
    elif len(odd) == 1 and odd[0].rank in hung:
        root, suspects = hung[odd[0].rank], ()
        confidence = Confidence.LOW if compared.is_open else Confidence.HIGH
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
    own = next((status.age for status in rank_statuses if status.rank == root.global_rank), None)
    if own is None:
        return []
    least = own - max(1.0, 0.1 * own)
    return [status.rank for status in rank_statuses if status.rank != root.global_rank and status.age >= least]


class RanksKnown(NamedTuple):
    failed: Sequence[int]
    ends: Sequence[WorkerEnd]
    activities: Sequence[Activity]
    hosts: Mapping[int, str]
    clocks: Clocks

    def suspects(self, found: Iterable[tuple[int, str]]) -> tuple[Suspect, ...]:
        some = itertools.islice(found, MOST_SUSPECTS)
        return tuple(Suspect(rank=rank, host=self.hosts.get(rank, ""), why=why) for rank, why in some)

    def done(self) -> list[WorkerEnd]:
        return [end for end in self.ends if end.exitcode == 0 and not end.stopped and end.rank not in self.failed]

    def early_ends(self, first: Moment) -> tuple[Suspect, ...]:
        found = []
        for gap, is_later, end in self._ends_with_0(first):
            when = "at about the same time" if gap < 1_000_000 else f"{seconds_text(gap / 1e9)} before"
            if not is_later:
                found.append((end.rank, f"it ended with 0 {when}{_logged(end)}"))
        return self.suspects(found)

    def late_ends(self, first: Moment) -> tuple[Suspect, ...]:
        """A process that ends closes its sockets, by which its peers fail, long before it has ended."""
        return self.suspects(
            (end.rank, f"it ended with 0 at about the same time (seen {seconds_text(-gap / 1e9)} later){_logged(end)}")
            for gap, is_later, end in self._ends_with_0(first)
            if is_later and -gap <= _TEARDOWN_NS
        )

    def _ends_with_0(self, first: Moment) -> list[tuple[int, bool, WorkerEnd]]:
        """(nanoseconds before the first symptom, whether it surely came after it, end); the earliest first."""
        found = []
        for end in self.done():
            moment = self.clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)
            gap = gap_ns(moment, first)
            found.append((gap, gap < 0 and order_of(first, moment) is Order.KNOWN, end))
        return sorted(found, key=lambda one: (-one[0], one[2].rank))

    def ends_before_hang(self, hung: WorkerFailure) -> tuple[Suspect, ...]:
        """None where most had ended. `hung`: the failure that the ranking names."""
        done = self._replace(failed=(hung.global_rank,)).done()
        here = [one for one in self.activities if one.rank not in {end.rank for end in done}]
        if not here or 2 * len(done) > len(self.hosts) or any(one.doing not in WAITS_FOR_RANKS for one in here):
            return ()
        last = self.clocks.of_failure(hung)
        found = []
        for end in done:
            gap = gap_ns(last, self.clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)) / 1e9
            when = f"{seconds_text(abs(gap))} {'after' if gap > 0 else 'before'}"
            why = f"it had ended with 0, {when} the last heartbeat of rank {hung.global_rank}{_logged(end)}"
            found.append((end.rank, why))
        return self.suspects(sorted(found))

    def left_behind(self) -> tuple[Suspect, ...]:
        """The ranks that waited where most ranks had ended with 0: they call a collective that most do not."""
        done, size = {end.rank for end in self.done()}, len(self.hosts)
        waiting = [one for one in self.activities if one.doing in WAITS_FOR_RANKS and one.rank not in done]
        if not size or not waiting or 2 * len(done) <= size:
            return ()
        others = f"the {len(done)} others had" if len(done) + len(waiting) == size else f"{len(done)} ranks had"
        return self.suspects(
            (one.rank, f"it was {one.where} when {others} ended with 0: they do not call that") for one in waiting
        )

    def silent(self) -> tuple[Suspect, ...]:
        ended = {end.rank for end in self.ends if not end.stopped}
        doing = {activity.rank: activity for activity in self.activities if activity.doing is not Doing.UNKNOWN}
        alike = {rank for rank, activity in doing.items() if is_with_the_others(activity, self.activities)}
        silent = sorted(self.hosts.keys() - set(self.failed) - ended - alike)
        return self.suspects(
            (rank, f"it did not fail; it was {doing[rank].where}" if rank in doing else _SILENT) for rank in silent
        )


def in_order(*groups: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """The suspects of several groups, the likeliest group first; each rank once, with all that is known of it."""
    found: dict[int, Suspect] = {}
    for suspect in itertools.chain(*groups):
        known = found.get(suspect.rank)
        found[suspect.rank] = suspect if known is None else replace(known, why=f"{known.why}; {suspect.why}")
    return tuple(found.values())[:MOST_SUSPECTS]


def _logged(end: WorkerEnd) -> str:
    return f"; {LOGGED_BEFORE}{end.logged}" if end.logged else ""


def of_several(why: str) -> str:
    """A suspect's clause as it reads for several ranks: ``they ended with 0``."""
    return _SINGULAR.sub(lambda found: _PLURAL.get(found[0], f"they{found[0][2:]}"), why)


def look_at(suspects: Sequence[Suspect]) -> str:
    """A sentence without its end."""
    first = suspects[0]
    if len(suspects) == 1:
        where = f" on {first.host}" if first.host else ""
        did = f", which did not fail: {first.why}" if first.why == _SILENT else f": {first.why}"
        return f"Look at rank {first.rank}{where}{did}"
    hosts = dict.fromkeys(suspect.host for suspect in suspects if suspect.host)
    where = f" on {', '.join(hosts)}" if len(hosts) <= _HOSTS else f" on {len(hosts)} nodes"
    numbers = ranges([suspect.rank for suspect in suspects]) + (" ..." if len(suspects) == MOST_SUSPECTS else "")
    if first.why == _SILENT:
        return f"Look at ranks {numbers}{where}, which did not fail: one of them hung, was late, or ended early"
    return f"Look at ranks {numbers}{where}, rank {first.rank} first: {first.why}"
