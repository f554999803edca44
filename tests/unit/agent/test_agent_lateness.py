"""Judging who enters the collectives last, on simulated training."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.slow_ranks import Arrivals, GroupLateness, judge

Extra = Callable[[float, int, int, random.Random], float]
"""Seconds of work, place in the step, step → seconds more."""


def train(
    ranks: int,
    *,
    buckets: int = 1,
    waits: bool = True,
    steps: int = 40,
    slow: dict[int, Extra] | None = None,
    imbalance: float = 0.0,
    jitter: float = 0.0005,
    off: float = 0.0,
    bound: float = 0.0,
) -> tuple[dict[int, Arrivals], float]:
    """Steps of 0.1 s of work: half of it before the first collective. Returns the arrivals, and a step's seconds.

    `waits`: each collective is waited for; else the last one of a step alone, as DDP does. `off`: rank 0's clock.
    """
    rng = random.Random(ranks * 100 + buckets)
    now, at = dict.fromkeys(range(ranks), 0.0), {rank: list[float]() for rank in range(ranks)}
    for step in range(steps):
        ends: list[float] = []
        for place in range(buckets):
            for rank in now:
                work = 0.1 if buckets == 1 else 0.05 if place == 0 else 0.05 / (buckets - 1)
                work = work * (1 + abs(rng.gauss(0, imbalance))) + abs(rng.gauss(0, jitter))
                now[rank] += work + ((slow or {}).get(rank, lambda *_: 0.0))(work, place, step, rng)
                at[rank].append(now[rank])
            ends.append(max(now.values()) + 0.002)
            now = dict.fromkeys(now, ends[-1]) if waits else now
        now = dict.fromkeys(now, max(ends))
    kinds = tuple(f"gloo:all_reduce [[{place}]]" for _ in range(steps) for place in range(buckets))
    group = {}
    for rank, times in at.items():  # the ranks were asked at different moments, in the middle of a step
        cut = rng.randrange(4)
        shifted = tuple(value + off * (rank == 0) for value in times[cut:])
        group[rank] = Arrivals(first=7 + cut, kinds=kinds[cut:], at=shifted, bound=bound)
    return group, max(now.values()) / steps


def compute(work: float, place: int, step: int, rng: random.Random) -> float:
    return 0.3 * work


def loader(work: float, place: int, step: int, rng: random.Random) -> float:
    return 0.03 if place == 0 else 0.0


def quota(work: float, place: int, step: int, rng: random.Random) -> float:
    return 0.05 if rng.random() < work / 0.1 else 0.0


def save(work: float, place: int, step: int, rng: random.Random) -> float:
    return 2.0 if place == 0 and step % 10 == 0 else 0.0


def log(work: float, place: int, step: int, rng: random.Random) -> float:
    return 0.002 if place == 0 else 0.0


SHAPES = pytest.mark.parametrize(
    ("ranks", "buckets", "waits"), [(2, 1, True), (4, 4, False), (8, 10, False), (8, 5, True), (32, 1, True)]
)


@SHAPES
@pytest.mark.parametrize("slow", [compute, loader, quota])
def test_a_slow_rank_is_named_with_what_it_costs(ranks: int, buckets: int, waits: bool, slow: Extra) -> None:
    group, step = train(ranks, buckets=buckets, waits=waits, slow={ranks - 1: slow})
    _, healthy = train(ranks, buckets=buckets, waits=waits)
    found = judge(group)
    assert [late.rank for late in found.late] == [ranks - 1]
    assert found.share == pytest.approx(1 - healthy / step, rel=0.2)
    assert found.step == pytest.approx(step, rel=0.2 if slow is quota else 0.05)


@SHAPES
@pytest.mark.parametrize(
    ("slow", "imbalance"),
    [(None, 0.0), (None, 0.2), (save, 0.0), (log, 0.0), (lambda work, place, step, rng: 60.0 * (step == 20), 0.0)],
    ids=["even", "uneven batches", "saves", "logs", "evaluates once"],
)
def test_no_rank_is_named(ranks: int, buckets: int, waits: bool, slow: Extra | None, imbalance: float) -> None:
    group, _ = train(ranks, buckets=buckets, waits=waits, slow={0: slow} if slow else {}, imbalance=imbalance)
    assert judge(group).late == ()


def test_uneven_batches_hide_no_slow_rank() -> None:
    group, _ = train(8, buckets=4, waits=False, slow={2: lambda work, *_: 0.6 * work}, imbalance=0.1)
    assert [late.rank for late in judge(group).late] == [2]


def test_what_is_done_now_and_then_is_no_part_of_a_step() -> None:
    group, step = train(4, buckets=4, waits=False, slow={1: compute})
    found = {}
    for rank, one in group.items():
        at = 60 - (one.first - 7)  # the same call on all: a broadcast between two steps
        kinds = (*one.kinds[:at], "gloo:broadcast [[1]]", *one.kinds[at:])
        found[rank] = replace(one, kinds=kinds, at=(*one.at[:at], (one.at[at - 1] + one.at[at]) / 2, *one.at[at:]))
    assert judge(found).step == pytest.approx(step, rel=0.05)
    assert [late.rank for late in judge(found).late] == [1]


def test_a_model_of_many_buckets() -> None:
    """Each kind of call is one of thirty."""
    group, _ = train(4, buckets=30, waits=False, steps=5, slow={1: compute})
    assert [late.rank for late in judge(group).late] == [1]
    assert judge(train(4, buckets=60, waits=True, steps=2)[0]).late == ()


def test_a_clock_that_may_be_off_by_as_much_shows_nothing() -> None:
    assert [late.rank for late in judge(train(4, off=0.03)[0]).late] == [0]
    assert judge(train(4, off=0.03, bound=0.04)[0]).late == ()


@pytest.mark.parametrize(("is_ahead", "on_gpu"), [(True, True), (False, False)])
def test_a_gpu_that_is_late_shows_in_how_short_its_collectives_are(is_ahead: bool, on_gpu: bool) -> None:
    """Its process launches ahead of it: what the GPUs wait for each other is in the time that the collective takes."""
    group, step = train(8, slow={3: compute})
    last = {n: max(one.at[n - one.first] for one in group.values()) for n in range(10, 40)}
    measured = {}
    for rank, one in group.items():
        at = {n: one.at[n - one.first] for n in last}
        launched = tuple(n * step if is_ahead else at[n] for n in last)
        took = tuple(last[n] - at[n] + 0.002 for n in last)
        measured[rank] = Arrivals(first=10, kinds=one.kinds[10 - one.first :][: len(last)], at=launched, took=took)
    found = judge(measured)
    assert [(late.rank, late.on_gpu) for late in found.late] == [(3, on_gpu)]
    assert found.late[0].seconds == pytest.approx(0.03, rel=0.1)
    assert found.share == pytest.approx(0.03 / step, rel=0.2)
    if is_ahead:
        assert judge({rank: replace(one, took=()) for rank, one in measured.items()}).late == ()


def test_too_little_in_common_shows_nothing() -> None:
    group, _ = train(4, steps=12, slow={1: compute})
    assert judge(group).late
    assert judge({**group, 0: Arrivals(first=200, kinds=("x",), at=(1.0,))}) == GroupLateness()
    assert judge(train(4, steps=9, slow={1: compute})[0]) == GroupLateness()
