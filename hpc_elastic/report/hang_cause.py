"""Which rank of a hung round is the root cause: a pure decision over heartbeats, stacks and collectives."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.failures.ranking import FailureClass, Suspect
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import RankStatus
from hpc_elastic.report.suspects import look_at
from hpc_elastic.report.verdict import Cause, Confidence, Verdict, of_worker


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
    """Where one hangs the others wait for it: it is the furthest behind, the odd one out by the stacks, or else the
    first that fell silent.

    Args:
        root: The failure that the ranking names.
        causes: All that are no symptoms.
        symptoms: The others.
        rank_statuses: All ranks' last heartbeats.
        odd: The ranks whose stacks differ from the others'.
        world_size: 0: not known.
        has_ended: Whether `odd` are ranks that had ended with 0, and those that hung waited for them.
        is_open: Whether either `odd` or the others may be at fault: it waits, and they do something else.
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
