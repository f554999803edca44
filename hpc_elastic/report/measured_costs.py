"""What a run measured of its own failures, restarts, checkpoints and queue: what advice is made of. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum

from msgspec import Struct

from hpc_elastic.report.goodput import Cost, Goodput, RestartPart
from hpc_elastic.report.history import RunHistory

_TIME_LIMIT = "time limit"
"""`AttemptHistory.meaning`."""
LEAST_FAILURES = 3
"""Below which the time between failures is not known."""


class MeasuredCosts(Struct, frozen=True, kw_only=True):
    """Of one run. None: not known, or too little was seen."""

    nodes: int
    """Of its largest round."""
    failures: int
    began_on: tuple[tuple[str, int], ...] = ()
    """Host → the failures that began there, the most first."""
    time_to_failure: float | None = None
    """Seconds between two failures, without the queue."""
    checkpoints: int = 0
    checkpoint_seconds: float | None = None
    """Of one in section ``checkpoint``; None also where each was reported outside of it."""
    checkpoint_every: float | None = None
    """Seconds of steps from one to the next: those that were kept, which a failure's lost ones do not lengthen."""
    lost_seconds: float = 0.0
    """Of steps that a failure took back, in the mean."""
    restarts: int = 0
    """Within a job."""
    restart_seconds: float | None = None
    """Of one of them, with finding a hang; None also where steps are not known."""
    restart_parts: tuple[RestartPart, ...] = ()
    """The mean of each."""
    queued: int = 0
    """How often the job was queued again."""
    time_limits: int = 0
    """How often it went on in another job because of a time limit."""
    time_limit_seconds: float = 0.0
    """What that cost: with queue, start, and steps that were done again."""
    longest_step: float | None = None
    """Seconds between two heartbeats."""


def measure_costs(history: RunHistory, goodput: Goodput) -> MeasuredCosts:
    """Put a run's numbers together.

    Args:
        history: The run.
        goodput: Its own.
    """
    rounds = {(item.number, part.index): part for item in history.attempts for part in item.rounds}
    failures = [cost for cost in goodput.costs if cost.is_failure]
    within = [cost for cost in failures if cost.recovered and not cost.queued]
    limited = {item.number for item in history.attempts if item.meaning == _TIME_LIMIT}
    limits = [cost for cost in goodput.costs if cost.queued and not cost.is_failure and cost.attempt in limited]
    saved = goodput.checkpoints
    running = goodput.wall - goodput.queued
    return MeasuredCosts(
        nodes=max((len(part.nodes) for part in rounds.values()), default=0),
        failures=len(failures),
        began_on=tuple(Counter(cost.host for cost in failures if cost.host).most_common()),
        time_to_failure=running / len(failures) if len(failures) >= LEAST_FAILURES else None,
        checkpoints=saved,
        checkpoint_seconds=goodput.checkpointing / saved if saved and goodput.checkpointing else None,
        checkpoint_every=goodput.kept / saved if saved and goodput.kept else None,
        lost_seconds=_mean([cost.recomputed for cost in failures]) if failures else 0.0,
        restarts=len(within),
        restart_seconds=_mean([cost.seconds - cost.recomputed for cost in within])
        if within and goodput.steps_known
        else None,
        restart_parts=_parts(within),
        queued=sum(1 for cost in goodput.costs if cost.queued),
        time_limits=len(limits),
        time_limit_seconds=sum(cost.seconds for cost in limits),
        longest_step=max((one.longest_step for part in rounds.values() for one in part.progress.values()), default=0.0)
        or None,
    )


def _parts(costs: list[Cost]) -> tuple[RestartPart, ...]:
    """The means over the restarts within a job."""
    found: dict[str, list[float]] = {}
    for part in (part for cost in costs for part in cost.parts):
        found.setdefault(part.name, []).append(part.seconds)
    return tuple(RestartPart(name=name, seconds=_mean(seconds)) for name, seconds in found.items())


def _mean(values: Sequence[float]) -> float:
    """`statistics` takes longer to import than the rest of this module to be run."""
    return fsum(values) / len(values)
