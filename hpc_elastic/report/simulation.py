"""What failures would cost a run: a seeded simulation of failures, restarts, checkpoints and the queue. Pure.

Failures come at random, independent of each other (exponential times between them), also while workers start. One takes
back all that was done since the last checkpoint. A node that is lost is replaced by a spare; without one, the job is
requeued, which gives it all its nodes and spares again. Before a time limit the workers save. A run that goes on with
fewer nodes is not modelled. Where the time between failures was measured from a few, each simulated run has another
one, of those that fit what was seen (Gamma-distributed rates, the posterior of a Poisson process).

`expected_seconds` and `best_interval` are the closed forms for a run that never queues: Daly, "A higher order estimate
of the optimum checkpoint interval for restart dumps" (2006), and Young (1974).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

PARTS = ("kept", "recomputed", "checkpointing", "restarting", "starting", "queued")
"""Of a run's time."""
MOST_FAILURES = 50_000
"""In one simulated run; where there are more, it never ends."""


class CostModel(Struct, frozen=True, kw_only=True):
    """A run, by what costs it time; all in seconds."""

    nodes: int = 1
    mtbf_node: float
    """Mean time between failures of one node, whatever failed on it."""
    failures_seen: int = 0
    """Failures from which `mtbf_node` was measured; 0: it is known."""
    checkpoint_every: float
    """Useful time from the end of one checkpoint to the begin of the next."""
    checkpoint_seconds: float
    """For which a checkpoint keeps the steps waiting."""
    restart_seconds: float
    """From a failure to the next step, within the job, with finding it."""
    start_seconds: float = 0.0
    """From a failure to the first step of the next job, without the queue; of the first job, from its start."""
    queue_seconds: float = 0.0
    """For which a requeued job waits."""
    spares: int = 0
    loses_node: float = 1.0
    """The share of failures with which the node is lost."""
    time_limit: float | None = None
    """Of one job."""
    work: float = 7 * 86400.0
    """Useful time until the training is done."""

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the run."""
        return self.mtbf_node / self.nodes


class SimulatedRun(Struct, kw_only=True):
    """Where one run's time went: seconds, which add up to `wall`."""

    kept: float = 0.0
    recomputed: float = 0.0
    """Steps that were lost."""
    checkpointing: float = 0.0
    restarting: float = 0.0
    starting: float = 0.0
    queued: float = 0.0
    failures: int = 0
    requeues: int = 0

    @property
    def wall(self) -> float:
        return self.kept + self.recomputed + self.checkpointing + self.restarting + self.starting + self.queued

    @property
    def goodput(self) -> float:
        """The useful share, from 0 to 1."""
        return self.kept / self.wall if self.wall else 0.0


class Forecast(Struct, frozen=True, kw_only=True):
    """Many simulated runs of one model."""

    model: CostModel
    goodput: float
    """The mean."""
    low: float
    """The goodput that 5 of 100 runs stay below."""
    high: float
    """The goodput that 5 of 100 runs exceed."""
    error: float
    """The standard error of the mean."""
    mean: SimulatedRun
    """The mean of each part."""
    shares: Mapping[str, float]
    """The mean of each part's share of its run; they add up to 1, and that of `kept` is `goodput`."""
    is_endless: bool = False
    """Failures come faster than steps are saved: no run ended."""


def forecast(model: CostModel, *, seed: int, runs: int) -> Forecast:
    """Simulate `runs` runs. The same arguments give the same answer."""
    rng = random.Random(seed)
    found: list[SimulatedRun] = []
    is_endless = False
    while len(found) < runs and not is_endless:
        found.append(_simulate(_drawn(model, rng) if found else model, rng))
        is_endless = found[-1].failures >= MOST_FAILURES and (len(found) == 1 or not model.failures_seen)
    runs = len(found)
    shares = sorted(one.goodput for one in found)
    means = {name: fmean([getattr(one, name) / one.wall if one.wall else 0.0 for one in found]) for name in PARTS}
    mean = means["kept"]
    spread = math.sqrt(fmean([(share - mean) ** 2 for share in shares]))
    return Forecast(
        model=model,
        goodput=mean,
        low=shares[int(0.05 * (runs - 1))],
        high=shares[math.ceil(0.95 * (runs - 1))],
        error=spread / math.sqrt(max(1, runs - 1)),
        mean=_mean(found),
        shares=means,
        is_endless=is_endless,
    )


def _drawn(model: CostModel, rng: random.Random) -> CostModel:
    """With one of the times between failures by which so many failures would be seen."""
    if not model.failures_seen:
        return model
    rate = rng.gammavariate(model.failures_seen, 1 / model.failures_seen)
    return replace(model, mtbf_node=model.mtbf_node / rate)


def best_interval(model: CostModel) -> float:
    """The interval between checkpoints at which they and the steps that are lost cost least: √(2·T_fail·T_save)."""
    return math.sqrt(2 * model.mtbf * model.checkpoint_seconds)


def expected_seconds(model: CostModel) -> float:
    """The mean wall time of `work` without a queue, a time limit, and a start; inf: it does not end."""
    segment, whole = model.checkpoint_every + model.checkpoint_seconds, math.floor(model.work / model.checkpoint_every)
    rest = model.work - whole * model.checkpoint_every
    try:
        one = math.exp(model.restart_seconds / model.mtbf) * math.expm1(segment / model.mtbf)
        last = math.exp(model.restart_seconds / model.mtbf) * math.expm1(
            (rest + model.checkpoint_seconds if rest else 0.0) / model.mtbf
        )
    except OverflowError:
        return math.inf
    return model.mtbf * (whole * one + last)


def _mean(runs: Sequence[SimulatedRun]) -> SimulatedRun:
    return SimulatedRun(
        **{name: fmean([getattr(run, name) for run in runs]) for name in PARTS},
        failures=round(fmean([run.failures for run in runs])),
        requeues=round(fmean([run.requeues for run in runs])),
    )


class _Clock:
    """The wall clock of one simulated run, and what comes next: a failure, or the job's end."""

    def __init__(self, model: CostModel, rng: random.Random) -> None:
        self._model = model
        self._rng = rng
        self.now = 0.0
        self.ends_at = math.inf
        self.fails_at = self._next_failure()

    def _next_failure(self) -> float:
        return self.now + self._rng.expovariate(1 / self._model.mtbf) if self._model.mtbf < math.inf else math.inf

    def begin_job(self) -> None:
        """A job starts; while it was queued nothing of it could fail."""
        if self._model.time_limit is not None:
            self.ends_at = self.now + self._model.time_limit - self._model.checkpoint_seconds
        self.fails_at = self._next_failure()

    def pass_time(self, seconds: float) -> float:
        """Let time pass, until a failure at most. Returns how much did."""
        passed = min(seconds, self.fails_at - self.now)
        self.now += passed
        return passed

    @property
    def has_failed(self) -> bool:
        return self.now >= self.fails_at

    def forget_failure(self) -> None:
        self.fails_at = self._next_failure()


def _simulate(model: CostModel, rng: random.Random) -> SimulatedRun:
    run, clock = SimulatedRun(), _Clock(model, rng)
    clock.begin_job()
    spares, is_start = model.spares, True
    while run.kept < model.work and run.failures < MOST_FAILURES:
        if is_start:
            run.starting += clock.pass_time(model.start_seconds)
        else:
            run.restarting += clock.pass_time(model.restart_seconds)
        is_start = False
        if not clock.has_failed:
            _train(model, run, clock)
        if run.kept >= model.work:
            break
        if clock.has_failed:
            run.failures += 1
            is_lost = model.loses_node > 0 and rng.random() < model.loses_node
            if not is_lost or spares > 0:
                spares -= int(is_lost)
                clock.forget_failure()
                continue
        run.requeues += 1
        run.queued += model.queue_seconds
        clock.now += model.queue_seconds
        clock.begin_job()
        spares, is_start = model.spares, True
    return run


def _train(model: CostModel, run: SimulatedRun, clock: _Clock) -> None:
    """Steps and checkpoints until a failure, the job's end, or the end of the training."""
    segment = model.checkpoint_every + model.checkpoint_seconds
    while run.kept < model.work:
        left = model.work - run.kept
        # All whole segments before anything comes, at once.
        until = min(clock.fails_at, clock.ends_at) - clock.now
        whole = int(min(until // segment if until < math.inf else math.inf, left // model.checkpoint_every))
        clock.pass_time(whole * segment)
        run.kept += whole * model.checkpoint_every
        run.checkpointing += whole * model.checkpoint_seconds
        left = model.work - run.kept
        if left <= model.work * 1e-12:
            run.kept = model.work
            return
        useful = min(model.checkpoint_every, left)
        is_last = clock.now + useful + model.checkpoint_seconds > clock.ends_at
        if is_last:  # the notice comes: what there is is saved
            useful = max(0.0, min(useful, clock.ends_at - clock.now))
        done = clock.pass_time(useful)
        saving = clock.pass_time(model.checkpoint_seconds) if not clock.has_failed else 0.0
        run.checkpointing += saving
        if clock.has_failed:
            run.recomputed += done
            return
        run.kept += done
        if is_last:
            return
