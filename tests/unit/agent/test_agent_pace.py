"""A run against its own best hour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from hpc_elastic.agent.slow_ranks import Pace, next_pace

HOUR = 3600.0
Seconds = Callable[[float], float]


def train(pace: Pace, seconds_of_step: Seconds, *, hours: float, begin: float = 0.0) -> Iterator[Pace]:
    """A look each 30 s; steps take what they take at their time."""
    now = due = done_at = begin
    steps = 0
    while now < begin + hours * HOUR:
        now += seconds_of_step(now)
        steps, done_at = steps + 1, now
        if now >= due:
            due = now + 30
            pace = next_pace(pace, steps=steps, at=done_at)
            yield pace


def saves_and_evaluates(now: float) -> float:
    return 1500.0 if now % 3600 < 1 else 40.0 if now % 600 < 1 else 1.0


@pytest.mark.parametrize(
    "usual",
    [
        lambda now: 1.0,
        lambda now: 75.0,
        saves_and_evaluates,
        lambda now: 5.0 if now < 900 else 1.0,  # it compiles, and fills its caches
        lambda now: 1.0 + 0.9 * (int(now) * 7919 % 101 / 101),  # sequences of any length
        lambda now: 1.0 if now < 4000 else 1.08,
    ],
)
def test_a_healthy_run_is_not_slow(usual: Seconds) -> None:
    assert not any(pace.is_slow for pace in train(Pace(), usual, hours=6))


def test_a_run_that_slowed_down_is_slow_until_it_is_as_fast_again() -> None:
    looks = list(train(Pace(), lambda now: 1.0 if not 2 * HOUR < now < 4 * HOUR else 1.25, hours=6))
    slow = [pace for pace in looks if pace.is_slow]
    assert 2 * HOUR + 120 < slow[0].at < 2 * HOUR + 600
    assert 4 * HOUR + 120 < slow[-1].at < 4 * HOUR + 600
    changes = sum(one.is_slow is not other.is_slow for one, other in pairwise(looks))
    assert changes == 2
    assert (slow[5].now, slow[5].best) == (pytest.approx(1.25, rel=0.01), pytest.approx(1.0, rel=0.01))


def test_steps_that_drop_slowly_are_found_too() -> None:
    assert list(train(Pace(), lambda now: 1 + now / HOUR * 0.05, hours=5))[-1].is_slow


def test_another_round_is_compared_with_the_best_hour_of_all() -> None:
    before = list(train(Pace(), lambda now: 1.0, hours=2))[-1]
    begun = Pace(best=before.best, spread=before.spread)
    assert list(train(begun, lambda now: 1.5, hours=0.5, begin=9000))[-1].is_slow
    assert not list(train(Pace(), lambda now: 1.5, hours=2, begin=9000))[-1].is_slow, "of another world size"


def test_a_step_that_goes_back_begins_again() -> None:
    before = list(train(Pace(), lambda now: 1.0, hours=2))[-1]
    assert not next_pace(before, steps=10, at=before.at + 600).is_slow
