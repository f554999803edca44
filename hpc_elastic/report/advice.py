"""The changes that would make a run's failures cost less, each with the numbers that it comes from: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct

from hpc_elastic.base.text import duration, plural
from hpc_elastic.report.goodput import Goodput, RestartPart
from hpc_elastic.report.history import RunHistory

LEAST_FAILURES = 3
"""Fewer show no time between failures."""
_WORTH = 0.005
"""Share of the time below which a cost is not worth a line."""
_FAR = 1.5
"""The least ratio of an interval to the best one: costs hardly differ in between."""
_LEAST_WALL = 1800.0
"""Seconds: what a run that took less had to wait for shows nothing."""
_NOT_RESUMED = 3.0
"""Intervals between checkpoints: a failure that takes more was not gone on from the newest one."""
_FORKSERVER = "--start-method forkserver"
_STOP = "a shorter --shutdown-timeout (--grace is for the job's end), if the script saves nothing then"
_MEET = "--spares, which stand ready, or a shorter last_call_timeout in --rdzv-conf"
_PARTS = {
    "stop": ("stopping the workers", _STOP, _STOP),
    "meet": ("meeting again", _MEET, _MEET),
    "start": ("starting the workers", _FORKSERVER, "less in the script before its first step"),
    "first step": (
        "from the workers' start to their first step",
        f"{_FORKSERVER}, whose workers have imported the script's modules before",
        "a checkpoint that is read sooner, and a compiler's cache that is kept between starts",
    ),
}
"""A restart's parts: the name, what shortens it, and what does where workers are forks already, or can't be."""


class MeasuredCosts(Struct, frozen=True, kw_only=True):
    nodes: int
    failures: int
    began_on: tuple[tuple[str, int], ...] = ()
    """Host → the failures that began there, the most first."""
    time_to_failure: float | None = None
    """Seconds between two failures, without the queue."""
    checkpoints: int = 0
    checkpoint_seconds: float | None = None
    """One's in section ``checkpoint``; None also where each was reported outside of it."""
    checkpoint_every: float | None = None
    """Seconds of steps from one to the next: those that were kept, which a failure's lost ones do not lengthen."""
    lost_seconds: float = 0.0
    restarts: int = 0
    restart_seconds: float | None = None
    """One's, with finding a hang; None also where steps are not known."""
    restart_parts: tuple[RestartPart, ...] = ()
    queued: int = 0
    time_limits: int = 0
    time_limit_seconds: float = 0.0
    """Queue, start and steps that were done again included."""
    longest_step: float | None = None
    step_timeout: float | None = None
    could_fork: bool = True


def measure_costs(history: RunHistory, goodput: Goodput) -> MeasuredCosts:
    rounds = [part for item in history.attempts for part in item.rounds]
    failures = [cost for cost in goodput.costs if cost.is_failure]
    within = [cost for cost in failures if cost.recovered and not cost.queued]
    limited = {item.number for item in history.attempts if item.meaning == "time limit"}
    limits = [cost for cost in goodput.costs if cost.queued and not cost.is_failure and cost.attempt in limited]
    parts: dict[str, list[float]] = {}
    for part in (part for cost in within for part in cost.parts):
        parts.setdefault(part.name, []).append(part.seconds)
    saved = goodput.checkpoints
    running = goodput.wall - goodput.queued
    known = (one for item in rounds for one in item.progress.values())
    return MeasuredCosts(
        nodes=max((len(part.nodes) for part in rounds), default=0),
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
        restart_parts=tuple(RestartPart(name=name, seconds=_mean(seconds)) for name, seconds in parts.items()),
        queued=sum(1 for cost in goodput.costs if cost.queued),
        time_limits=len(limits),
        time_limit_seconds=sum(cost.seconds for cost in limits),
        longest_step=max((one.longest_step for one in known), default=0.0) or None,
        step_timeout=history.step_timeout,
        could_fork=history.could_fork,
    )


def _mean(values: Sequence[float]) -> float:
    """`statistics` takes longer to import than the rest of this module to be run."""
    return math.fsum(values) / len(values)


class Advice(Struct, frozen=True, kw_only=True):
    about: str
    """``checkpoint_interval``, ``restart``, ``hang_timeout``, ``nodes``, ``queue`` or ``time_limit``."""
    text: str


def advise(costs: MeasuredCosts, goodput: Goodput) -> tuple[Advice, ...]:
    if goodput.wall < _LEAST_WALL:
        return ()
    found = (
        ("checkpoint_interval", _interval(costs)),
        ("restart", _restart(costs, goodput)),
        ("hang_timeout", _timeout(costs, goodput)),
        ("nodes", _nodes(costs)),
        ("queue", _queue(costs, goodput)),
        ("time_limit", _time_limit(costs, goodput)),
    )
    return tuple(Advice(about=about, text=text) for about, texts in found for text in texts)


def interval_cost(every: float, checkpoint_seconds: float, time_to_failure: float) -> float:
    """The share of the time that checkpoints and the steps lost since the last one take, at most 1.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), without restarts.
    """
    try:
        return 1 - every / (time_to_failure * math.expm1((every + checkpoint_seconds) / time_to_failure))
    except OverflowError:
        return 1.0


def _interval(costs: MeasuredCosts) -> Iterator[str]:
    every, saves, fails = costs.checkpoint_every, costs.checkpoint_seconds, costs.time_to_failure
    if not (every and saves and fails) or costs.checkpoints < 3:
        return
    if costs.lost_seconds > _NOT_RESUMED * every:
        yield (
            f"a failure took back {duration(costs.lost_seconds)} of steps (mean of {costs.failures}), while a "
            f"checkpoint was complete every {duration(every)}: does the script load the newest one?"
        )
        return
    # J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974)
    best = math.sqrt(2 * fails * saves)
    now, then = (interval_cost(value, saves, fails) for value in (every, best))
    if max(best / every, every / best) < _FAR or now - then < _WORTH:
        return
    yield (
        f"save every {duration(best)} of steps, not every {duration(every)}: by √(2·T_fail·T_save) with a failure "
        f"every {duration(fails)} ({costs.failures} seen) and {duration(saves, fine=True)} for a checkpoint "
        f"({costs.checkpoints} seen); checkpoints and lost steps would cost {100 * then:.1f} % of the time, "
        f"now {100 * now:.1f} %"
    )


def _restart(costs: MeasuredCosts, goodput: Goodput) -> Iterator[str]:
    if costs.restarts < 2 or costs.restart_seconds is None or not costs.restart_parts:
        return
    longest = max(costs.restart_parts, key=lambda part: part.seconds)
    name, cold, warm = _PARTS[longest.name]
    if longest.seconds * costs.restarts < _WORTH * goodput.wall:
        return
    yield (
        f"{name} took {duration(longest.seconds, fine=True)} of the "
        f"{duration(costs.restart_seconds, fine=True)} of a restart (mean of {costs.restarts}); "
        f"shorter by {cold if costs.could_fork else warm}"
    )


def _timeout(costs: MeasuredCosts, goodput: Goodput) -> Iterator[str]:
    timeout, longest = costs.step_timeout, costs.longest_step
    if timeout is None or longest is None:
        return
    if timeout < 1.5 * longest:
        yield (
            f"a step has taken {duration(longest, fine=True)}, and --section-timeouts ends workers after "
            f"{duration(timeout)} without a heartbeat: a longer one, or step:auto, ends none that works"
        )
        return
    enough = max(60, math.ceil(5 * longest))
    if timeout > max(20 * longest, enough) and goodput.hanging >= _WORTH * goodput.wall:
        yield (
            f"hangs were found after {duration(timeout)} each and cost {duration(goodput.hanging)}, while no step has "
            f"taken more than {duration(longest, fine=True)}: step:{enough} in "
            "--section-timeouts, or step:auto"
        )


def _nodes(costs: MeasuredCosts) -> Iterator[str]:
    if costs.failures < LEAST_FAILURES or costs.nodes < 2 or not costs.began_on:
        return
    (host, count), others = costs.began_on[0], costs.began_on[1:]
    if count >= LEAST_FAILURES and 2 * count > costs.failures and all(count > 2 * other for _, other in others):
        yield (f"{count} of {costs.failures} failures began on {host}, one of {costs.nodes} nodes: --exclude {host}")


def _queue(costs: MeasuredCosts, goodput: Goodput) -> Iterator[str]:
    failures = _failures(goodput)
    if costs.queued <= costs.time_limits or goodput.queued <= failures or goodput.queued < _least_queue(goodput):
        return
    yield (
        f"the queue took {duration(goodput.queued)} in {plural(costs.queued, 'requeue')}, more than failures with "
        f"their restarts and lost steps ({duration(failures)}): a longer --time, or --spares where nodes were lost"
    )


def _time_limit(costs: MeasuredCosts, goodput: Goodput) -> Iterator[str]:
    spent = costs.time_limit_seconds
    failures = max(0.0, _failures(goodput) + goodput.queued - spent)
    if not costs.time_limits or spent <= failures or spent < _least_queue(goodput):
        return
    yield (
        f"the time limit ended {plural(costs.time_limits, 'job')}, which cost {duration(spent)} with queue, start and "
        f"lost steps, more than all failures ({duration(failures)}): a longer --time"
    )


def _failures(goodput: Goodput) -> float:
    return goodput.interrupted + goodput.recomputed + goodput.hanging


def _least_queue(goodput: Goodput) -> float:
    return max(600.0, 0.05 * goodput.wall)
