"""What came of a fault: from a run that is over to what the judge is to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from hpc_elastic.rehearsal.faults import NATURES, Effect
from hpc_elastic.rehearsal.injections import Injection
from hpc_elastic.rehearsal.journal import Course, Position, RunJournal
from hpc_elastic.rehearsal.judge import InjectionSeen, Parts, judge_notice
from hpc_elastic.rehearsal.members import RunMembers
from hpc_elastic.rehearsal.parts import restart_parts
from hpc_elastic.run.spec import RunSpec

_AFTER_SECONDS = 15.0
"""A restart so soon after a fault that need not cause one is its effect."""
_APART = 0.01
"""Seconds: a step may be reported twice, as a heartbeat and with its loss."""
_WELL_BEFORE = 0.5
"""Seconds: a save that a fault has interrupted does not count."""


class Traces(Protocol):
    """What a run has left, read to its end. Times in seconds by this machine's wall clock."""

    @property
    def spec(self) -> RunSpec: ...
    @property
    def journal(self) -> RunJournal: ...
    @property
    def members(self) -> RunMembers: ...
    @property
    def saved_at(self) -> Sequence[float]:
        """When a file was written that may be a checkpoint."""
        ...

    @property
    def loads(self) -> Sequence[tuple[float, Path]]:
        """When such a file was read."""
        ...


def look_back(number: int, run: Traces, injection: Injection, why: str, course: Course) -> InjectionSeen:
    """What came of a fault, now that the run is over.

    Args:
        number: Of the disturbed run.
        run: What it has left.
        injection: The fault.
        why: Why the run did not come to its end; empty: it did.
        course: The undisturbed run.
    """
    steps = run.journal.steps
    restarts = NATURES[injection.fault.kind].effect is Effect.RESTART
    # Within the processes first: a later fault may have had another round begin.
    back = run.journal.went_back(injection.at, injection.before) if restarts else None
    first = back or run.journal.first_after(injection.at, beyond=injection.before)
    over = injection.at + injection.fault.seconds
    if not restarts and (first is None or first.at > over + _AFTER_SECONDS):
        # It trained on in its round; by a step that was done when the fault was over.
        first = run.journal.first_after(injection.at) if run.journal.first_after(over) is not None else None
    ended = first.at if first is not None and back is not None else float("inf")
    before = [
        step.position
        for step in steps
        if step.at <= injection.at or (step.place <= injection.before and step.at < ended)
    ]
    last = max(before, default=None, key=course.index)
    redone, resumed, parts, notice = 0, None, Parts(), None
    if first is not None and (back is not None or first.place != injection.before):
        heads: dict[int, Position] = {}
        for step in steps:
            if step.place == first.place and (back is None or step.at >= first.at):
                heads.setdefault(step.rank, step.position)
        resumed = min(heads.values(), key=course.index)
        if last is not None:
            redone = max(0, course.index(last) - course.index(resumed) + 1)
        parts = restart_parts(run.members.events, run.loads, at=injection.at, after=first.place, trained_at=first.at)
    if NATURES[injection.fault.kind].gives_notice:
        end = first.at if first is not None else float("inf")
        notice = judge_notice(
            saved=any(injection.at <= moment <= end for moment in (*run.saved_at, *run.journal.saves)),
            asked=any(injection.at <= moment <= end for moment in run.journal.notices)
            or bool(run.spec.preemption_signal),
            ended_by_signal=run.members.ended_by_signal(injection.before),
            redone=redone,
            saves_each_step=_saves_each_step(run, injection.at),
        )
    return InjectionSeen(
        run=number,
        fault=injection.fault,
        what=injection.what,
        at=injection.at,
        before=injection.before,
        trained_at=None if first is None else first.at,
        after=None if first is None else first.place,
        last=last,
        resumed=resumed,
        redone=redone,
        saved_before=_saved_between(run, steps[0].at, injection.at - _WELL_BEFORE) if steps else False,
        notice=notice,
        parts=parts,
        why_stuck="" if first is not None else why,
    )


def _saved_between(run: Traces, start: float, end: float) -> bool:
    return any(start < moment < end for moment in (*run.saved_at, *run.journal.saves))


def _saves_each_step(run: Traces, end: float) -> bool:
    """Whether a file was saved after nearly every step that was reported before `end`."""
    steps = [step for step in run.journal.steps if step.at < end]
    ranks = {step.rank for step in steps}
    times = [step.at for step in steps if step.rank == min(ranks)]
    pairs = [(one, after) for one, after in pairwise(times) if after - one > _APART]
    return bool(pairs) and sum(_saved_between(run, one, after) for one, after in pairs) >= 0.8 * len(pairs)
