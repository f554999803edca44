"""The simulation of what failures cost, against the closed forms where there are some."""

from __future__ import annotations

import math
import random

import pytest
from msgspec.structs import replace

from hpc_elastic.report.simulation import CostModel, best_interval, expected_seconds, forecast

HOUR, DAY = 3600.0, 86400.0
MODEL = CostModel(
    nodes=64, mtbf_node=64 * 6 * HOUR, checkpoint_every=0.5 * HOUR, checkpoint_seconds=60.0, restart_seconds=120.0,
    spares=10**9, work=4 * DAY,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"checkpoint_every": 300.0},
        {"checkpoint_every": 4 * HOUR, "checkpoint_seconds": 600.0},
        {"restart_seconds": 2 * HOUR},
        {"nodes": 512, "checkpoint_every": 600.0},
        {"work": 3.9 * DAY, "checkpoint_every": 5000.0},
        {"spares": 0, "loses_node": 0.0},
    ],
)
def test_without_a_queue_it_is_what_dalys_formula_says(change: dict[str, float]) -> None:
    model = replace(MODEL, **change)
    found = forecast(model, seed=1, runs=300)
    theory = expected_seconds(model)
    # Of the mean wall time; goodput's mean differs from its inverse by the spread.
    spread = 4 * found.error / found.goodput
    assert found.mean.wall == pytest.approx(theory, rel=spread + 0.002)
    assert spread < 0.03


def test_the_parts_add_up_and_all_work_is_done() -> None:
    model = replace(MODEL, spares=1, queue_seconds=900.0, start_seconds=200.0, time_limit=10 * HOUR)
    found = forecast(model, seed=3, runs=50)
    mean = found.mean
    assert mean.kept == pytest.approx(model.work)
    assert min(mean.recomputed, mean.checkpointing, mean.restarting, mean.starting, mean.queued) > 0
    assert mean.queued == pytest.approx(900.0 * mean.requeues, rel=0.1)
    assert found.low < found.goodput < found.high


def test_without_failures_only_checkpoints_and_the_start_cost() -> None:
    model = replace(MODEL, mtbf_node=math.inf, start_seconds=60.0)
    found = forecast(model, seed=0, runs=3)
    assert found.mean.wall == pytest.approx(60.0 + 4 * DAY + 192 * 60.0)
    assert (found.low, found.high, found.error) == pytest.approx((found.goodput, found.goodput, 0.0))
    limited = replace(model, time_limit=12 * HOUR, queue_seconds=HOUR)
    mean = forecast(limited, seed=0, runs=1).mean
    assert (mean.requeues, mean.recomputed) == (8, 0.0)
    assert mean.queued == 8 * HOUR


def test_the_same_seed_gives_the_same_answer() -> None:
    assert forecast(MODEL, seed=5, runs=20) == forecast(MODEL, seed=5, runs=20)
    assert forecast(MODEL, seed=5, runs=20) != forecast(MODEL, seed=6, runs=20)


def test_at_the_best_interval_goodput_is_highest() -> None:
    best = best_interval(MODEL)
    assert best == pytest.approx(math.sqrt(2 * 6 * HOUR * 60))
    walls = [expected_seconds(replace(MODEL, checkpoint_every=best * factor)) for factor in (0.4, 1.0, 2.5)]
    assert walls[1] < min(walls[0], walls[2])
    shares = [forecast(replace(MODEL, checkpoint_every=best * f), seed=2, runs=200).goodput for f in (0.4, 1.0, 2.5)]
    assert shares[1] > max(shares[0], shares[2])


def test_spares_save_the_queue() -> None:
    queues = replace(MODEL, queue_seconds=2 * HOUR, start_seconds=300.0)
    shares = [forecast(replace(queues, spares=spares), seed=4, runs=100).goodput for spares in (0, 2, 8)]
    assert shares[0] < shares[1] < shares[2]


def test_where_failures_come_faster_than_checkpoints_no_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_elastic.report.simulation.MOST_FAILURES", 200)
    model = replace(MODEL, mtbf_node=64 * 60.0, checkpoint_every=HOUR)
    found = forecast(model, seed=0, runs=3)
    assert found.is_endless
    assert found.goodput == 0.0


def test_a_time_between_failures_that_few_have_shown_is_uncertain() -> None:
    """The forecast's spread has what the failures that were seen leave open, and its middle stays."""
    known = forecast(MODEL, seed=1, runs=400)
    widths = {}
    for seen in (3, 12, 1000):
        found = forecast(replace(MODEL, failures_seen=seen), seed=1, runs=400)
        widths[seen] = found.high - found.low
        assert found.goodput == pytest.approx(known.goodput, abs=4 * found.error + 0.01)
    assert widths[3] > 1.5 * widths[12] > 2 * widths[1000]
    assert widths[1000] == pytest.approx(known.high - known.low, rel=0.2)


@pytest.mark.parametrize("seen", [3, 10])
def test_what_few_failures_forecast_holds_nine_times_out_of_ten(seen: int) -> None:
    """Runs of a known model, each forecast from its own failures: the next one of that model is within 5 to 95 %."""
    rng = random.Random(seen)
    model = replace(MODEL, work=0.25 * DAY * seen)
    truth = [forecast(model, seed=rng.randrange(10**6), runs=1).goodput for _ in range(120)]
    hits = 0
    for share in truth:
        # The time in which so many failures came, of a Poisson process.
        seconds = sum(rng.expovariate(1 / model.mtbf) for _ in range(seen))
        measured = replace(model, mtbf_node=model.nodes * seconds / seen, failures_seen=seen)
        found = forecast(measured, seed=1, runs=60)
        hits += found.low <= share <= found.high
    assert 0.8 <= hits / len(truth) <= 0.99
