"""Which ranks enter the collectives of a process group after the others, by how much, and what it costs. Pure.

In synchronous training all ranks have the same step time, since each waits in its collectives for the last one. The
slow rank is the one that waits for no other: it enters last. Only what its lateness has delayed counts as a loss: DDP
enters the buckets of one backward pass without waiting, so a rank that is 30 ms late at each of ten costs 30 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct, structs

MIN_CALLS = 8
"""Fewer collectives show no habit."""
MIN_SHARE = 0.05
"""The least share of the time that a rank must cost to be named."""
BLOCKS = 8
"""A slow rank is late in most of so many parts of the time: one that saves or evaluates is late in one of them."""
MOST_BLOCKS = 0.75
LATE_STEPS = 1 / 3
"""The least share of single steps in which it is late: a rank that saves each tenth step is not slow."""
RARE = 20
"""A kind of call that is so many times rarer than the most frequent one is no part of each step: a log, a save."""
SPREAD = 2.0
"""How many times as late as the usual rank: batches of uneven size make each rank late at times."""
LEAST_SECONDS = 0.001
"""What is below is the noise of a busy machine."""


class Arrivals(Struct, frozen=True, kw_only=True):
    """When one rank entered the collectives of one process group."""

    first: int
    """The number of the first of them in its group; the others follow without a gap."""
    kinds: tuple[str, ...]
    """Name and size of each."""
    at: tuple[float, ...]
    """Seconds, of the clock that all ranks of the group are compared on."""
    took: tuple[float, ...] = ()
    """Seconds that each ran on the GPU, to the end that all have in common; empty: not known."""
    bound: float = 0.0
    """By how much that clock may be off against the other ranks', seconds."""


class Late(Struct, frozen=True, kw_only=True):
    rank: int
    seconds: float
    """By how much it enters after the others, median over `calls`."""
    calls: int
    kind: str
    on_gpu: bool = False
    """Its GPU enters late; its process launches them in time."""


class GroupLateness(Struct, frozen=True, kw_only=True):
    late: tuple[Late, ...] = ()
    share: float = 0.0
    """Share of the time which the group would have saved without them, 0 to 1."""
    calls: int = 0
    step: float = 0.0
    """Seconds from one step to the next, median; 0: the calls do not repeat."""


def judge(group: Mapping[int, Arrivals]) -> GroupLateness:
    """Compare the ranks of one process group, over the numbers that all have arrivals of.

    No slow rank where the calls are few, where the numbers have no part in common, or where more than half of the ranks
    would be slow: then it is the others that are fast, for a reason of the script's.
    """
    first = max(one.first for one in group.values())
    end = min(one.first + len(one.at) for one in group.values())
    count = end - first
    if len(group) < 2 or count < MIN_CALLS:
        return GroupLateness()
    some = next(iter(group.values()))
    kinds = some.kinds[first - some.first : end - some.first]
    most = max(map(kinds.count, set(kinds)))
    usual = [k for k in range(count) if kinds.count(kinds[k]) * RARE > most]
    kinds = tuple(kinds[k] for k in usual)
    launched = at = {rank: [one.at[first - one.first + k] for k in usual] for rank, one in group.items()}
    if all(one.took for one in group.values()):
        took = {rank: [one.took[first - one.first + k] for k in usual] for rank, one in group.items()}
        ends = [min(one[k] for one in at.values()) + max(one[k] for one in took.values()) for k in range(len(usual))]
        at = {rank: [end - one for end, one in zip(ends, took[rank], strict=True)] for rank in took}
    early = [sorted(times)[(len(at) - 1) // 4] for times in zip(*at.values(), strict=True)]
    last = list(map(max, *at.values()))
    period = _period(kinds)
    if at is launched:
        awaited = _awaited(period, early, last)
    else:  # For which of a step's collectives the GPUs waited is not known: the latest one is what it costs at least.
        places = [list(range(place, len(early), period)) for place in range(period)]
        awaited = max(places, key=lambda calls: sum(last[k] - early[k] for k in calls) / len(calls))
    late = {rank: [max(0.0, times[k] - early[k]) for k in awaited] for rank, times in at.items()}
    slow = _slow({rank: _by_step(values, awaited, period) for rank, values in late.items()}, group)
    spent = early[-1] - early[0]
    if not slow or len(slow) * 2 > len(group) or spent <= 0:
        return GroupLateness(calls=count)
    others = [max(values) for values in zip(*(late[rank] for rank in at if rank not in slow), strict=True)]
    lost = [max(values) for values in zip(*(late[rank] for rank in slow), strict=True)]
    share = sum(max(0.0, mine - usual) for mine, usual in zip(lost, others, strict=True)) / spent
    if share < MIN_SHARE:
        return GroupLateness(calls=count)
    found = (_describe(rank, late[rank], [kinds[k] for k in awaited]) for rank in slow)
    if at is not launched:
        first_launch = [min(times) for times in zip(*launched.values(), strict=True)]
        behind = {rank: median(launched[rank][k] - first_launch[k] for k in awaited) for rank in slow}
        found = (structs.replace(one, on_gpu=behind[one.rank] < one.seconds / 2) for one in found)
    repeats = len(set(kinds)) <= period
    step = median(later - one for one, later in zip(early, early[period:], strict=False)) if repeats else 0.0
    late_ranks = tuple(sorted(found, key=lambda one: -one.seconds))
    return GroupLateness(late=late_ranks, share=min(share, 1.0), calls=count, step=step)


def _describe(rank: int, late: Sequence[float], kinds: Sequence[str]) -> Late:
    by_kind: dict[str, float] = {}
    for kind, seconds in zip(kinds, late, strict=True):
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    worst = max(by_kind, key=lambda kind: by_kind[kind])
    values = [seconds for kind, seconds in zip(kinds, late, strict=True) if kind == worst]
    return Late(rank=rank, seconds=median(values), calls=len(values), kind=worst)


def _by_step(late: Sequence[float], awaited: Sequence[int], period: int) -> list[float]:
    """The lateness of each whole step: a slow DataLoader is felt in one of its collectives."""
    steps = [0.0] * (awaited[-1] // period + 1)
    for k, seconds in zip(awaited, late, strict=True):
        steps[k // period] += seconds
    return steps


def _slow(late: Mapping[int, Sequence[float]], group: Mapping[int, Arrivals]) -> set[int]:
    """The ranks that are late by habit, beyond what is usual in this group; `late` by step."""
    blocks = {rank: _means(values) for rank, values in late.items()}
    usual = median(sorted(means)[len(means) * 3 // 4] for means in blocks.values())
    each = median(sorted(values)[len(values) * 3 // 4] for values in late.values())
    found = set()
    for rank, means in blocks.items():
        least = max(LEAST_SECONDS, group[rank].bound)
        in_blocks = sum(mean > max(least, SPREAD * usual) for mean in means) / len(means)
        most = max(least, each, sum(late[rank]) / len(late[rank]) / 2)
        in_steps = sum(value > most for value in late[rank]) / len(late[rank])
        if in_blocks >= MOST_BLOCKS and in_steps >= LATE_STEPS:
            found.add(rank)
    return found


def _means(values: Sequence[float]) -> list[float]:
    count = min(BLOCKS, len(values))
    edges = [len(values) * k // count for k in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _awaited(period: int, early: Sequence[float], last: Sequence[float]) -> list[int]:
    """The collectives for which the early ranks waited before they entered the next one.

    Where they waited, the next entry follows the last rank's entry at a steady distance; where they did not, it follows
    their own. Which of the two is steadier is asked for each place in the step.
    """
    count = len(early)
    found: list[int] = []
    for place in range(period):
        here = range(place, count - 1, period)
        if any(early[k + 1] < last[k] for k in here if last[k] - early[k] > LEAST_SECONDS / 2):
            entered = sum(early[k + 1] < last[k] for k in here)
            if entered * 4 > len(here):
                continue  # the early ranks were in the next one before the last rank was in this
        own, others = ([early[k + 1] - times[k] for k in here] for times in (early, last))
        if _deviation(others) <= _deviation(own):
            found += here
    return sorted(found) or list(range(period - 1, count, period))


def median(values: Iterable[float]) -> float:
    """The lower one of two; `statistics` would import decimals and fractions into each agent."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _period(kinds: Sequence[str]) -> int:
    """After how many calls the kinds repeat; 1 where they do not within a third of them."""
    for period in range(1, len(kinds) // 3 + 1):
        if all(a == b for a, b in zip(kinds, kinds[period:], strict=False)):
            return period
    return 1
