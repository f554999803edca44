"""Goodput: the share of a run's wall time in which all workers of its round ran, and where the rest went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from hpc_elastic.report.history import RoundHistory, RunHistory
from hpc_elastic.report.subject import verdict_of
from hpc_elastic.report.timeline_attempt import AttemptSpan, RoundTimes, place_attempts
from hpc_elastic.report.verdict import Cause


class Cost(Struct, frozen=True, kw_only=True):
    """What one interruption cost."""

    attempt: int
    round: int
    what: str
    seconds: float
    """From when the first worker no longer ran until all ran again, or until the run's end."""
    queued: float = 0.0
    """Seconds of it between two attempts."""
    recovered: bool = True
    """Workers ran again after it."""
    is_failure: bool = True
    """False: the membership changed."""


class Goodput(Struct, frozen=True, kw_only=True):
    """Seconds of wall time, which add up to `wall`."""

    wall: float
    training: float
    starting: float
    """Until all workers ran for the first time."""
    interrupted: float
    """After a failure or a change of the membership, without the queue."""
    queued: float
    """Between attempts."""
    ending: float
    """After the last workers had ended well."""
    until_ns: int | None = None
    """The end of that time: where the run goes on, the last that is known of it."""
    costs: tuple[Cost, ...]

    @property
    def share(self) -> float | None:
        """Training's, from 0 to 1; None where no time has passed."""
        return self.training / self.wall if self.wall > 0 else None


def goodput_of(history: RunHistory) -> Goodput:
    """The same of a run whose picture nobody draws."""
    parts = place_attempts(history)
    return measure_goodput(
        history, attempts=[part.span for part in parts], rounds=[times for part in parts for times in part.rounds]
    )


def measure_goodput(history: RunHistory, *, attempts: Sequence[AttemptSpan], rounds: Sequence[RoundTimes]) -> Goodput:
    """Add up a run's time. What was computed since the last checkpoint, and computed anew, is not known here.

    Args:
        history: The run.
        attempts: Its attempts, ascending.
        rounds: Their rounds, ascending.
    """
    if not attempts:
        return Goodput(wall=0, training=0, starting=0, interrupted=0, queued=0, ending=0, costs=())
    start, end = attempts[0].start_ns, max(span.end_ns for span in attempts)
    found = {(a.number, item.index): item for a in history.attempts for item in a.rounds}
    gaps = [(before.end_ns, max(before.end_ns, after.start_ns)) for before, after in pairwise(attempts)]
    training = starting = interrupted = queued = ending = 0.0
    costs: list[Cost] = []
    cursor, last = start, None
    for times in sorted(
        (item for item in rounds if item.trained_ns is not None), key=lambda item: item.trained_ns or (0, 0)
    ):
        begin, stop = times.trained_ns or (0, 0)
        begin, stop = max(begin, cursor), max(stop, cursor)
        waited = _overlap(gaps, cursor, begin)
        idle = (begin - cursor) / 1e9
        if last is None:
            starting += idle - waited
        else:
            interrupted += idle - waited
            costs.append(_cost(history, found, last, idle, waited, recovered=True))
        queued += waited
        training += (stop - begin) / 1e9
        cursor, last = stop, times
    rest, waited = (end - cursor) / 1e9, _overlap(gaps, cursor, end)
    queued += waited
    if last is None:
        starting += rest - waited
    elif found[last.attempt, last.round].broken or (last.attempt, last.round) != (rounds[-1].attempt, rounds[-1].round):
        interrupted += rest - waited
        costs.append(_cost(history, found, last, rest, waited, recovered=False))
    else:
        ending += rest - waited
    return Goodput(
        wall=(end - start) / 1e9,
        training=training,
        starting=starting,
        interrupted=interrupted,
        queued=queued,
        ending=ending,
        until_ns=end,
        costs=tuple(costs),
    )


def _cost(
    history: RunHistory,
    found: dict[tuple[int, int], RoundHistory],
    times: RoundTimes,
    seconds: float,
    queued: float,
    *,
    recovered: bool,
) -> Cost:
    item = found[times.attempt, times.round]
    verdict = verdict_of(item)
    is_failure = verdict.cause is not Cause.NONE
    if is_failure:
        what = verdict.summary
    else:
        after = found.get((times.attempt, times.round + 1))
        attempt = next((a for a in history.attempts if a.number == times.attempt), None)
        reasons = [*item.stopping_reasons, *([after.reason] if after is not None else [])]
        reasons += [attempt.reason] if attempt is not None else []
        what = next((reason for reason in reasons if reason), "its workers ended, and no reason is recorded")
    return Cost(
        attempt=times.attempt,
        round=times.round,
        what=what,
        seconds=seconds,
        queued=queued,
        recovered=recovered,
        is_failure=is_failure,
    )


def _overlap(gaps: list[tuple[int, int]], start: int, end: int) -> float:
    return sum(max(0, min(end, high) - max(start, low)) for low, high in gaps) / 1e9
