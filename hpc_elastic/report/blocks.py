"""Blocks of the document: parts of the report that are lists, as values that a layout may shorten. Pure.

The advice is one: the changes that would make a run's failures cost less, each with the numbers that it comes from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from hpc_elastic.base.text import clean_line, duration, plural, time_text
from hpc_elastic.failures.classify import kind_of, wording_of
from hpc_elastic.failures.failure_text import normalise_message
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report import wording
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks
from hpc_elastic.report.goodput import Goodput, RestartPart
from hpc_elastic.report.history import AttemptHistory, RankStatus, RoundHistory, RunHistory, StackGroup
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Cause, Verdict

_CONSEQUENCES = (FailureClass.SYMPTOM, FailureClass.STOPPED_BY_US)
_SILENCE = " ({:.1f} s without a heartbeat)"
_Key = tuple[str, str, int]


class SimilarFailures(Struct, frozen=True, kw_only=True):
    members: tuple[WorkerFailure, ...]

    @property
    def first(self) -> WorkerFailure:
        return self.members[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(failure.global_rank for failure in self.members))


class Fold(SimilarFailures, frozen=True, kw_only=True):
    wordings: tuple[SimilarFailures, ...]
    """The most frequent first, then by their words; of what is no symptom there is one."""

    @property
    def headline(self) -> str:
        return self.wordings[0].first.headline

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.host for f in sorted(self.members, key=lambda f: (f.node, f.host))))


def fold_failures(failures: Iterable[WorkerFailure], clocks: Clocks = NO_CLOCKS) -> tuple[Fold, ...]:
    """Groups and their members are ordered by time, then rank; which was first does not change a group."""
    groups: dict[_Key, dict[_Key, list[WorkerFailure]]] = {}
    members: dict[_Key, list[WorkerFailure]] = {}
    for failure in sorted(failures, key=lambda f: (clocks.of_failure(f).at_ns, f.global_rank)):
        kind = kind_of(failure)
        groups.setdefault(kind, {}).setdefault(wording_of(failure), []).append(failure)
        members.setdefault(kind, []).append(failure)
    return tuple(
        Fold(members=tuple(members[kind]), wordings=_by_frequency(wordings)) for kind, wordings in groups.items()
    )


def _by_frequency(wordings: dict[_Key, list[WorkerFailure]]) -> tuple[SimilarFailures, ...]:
    found = [(key, SimilarFailures(members=tuple(members))) for key, members in wordings.items()]
    found.sort(key=lambda item: (-len(item[1].members), normalise_message(item[1].first.headline), item[0]))
    return tuple(same for _, same in found)


class RanksLine(NamedTuple):
    """``ranks 0-3: at step 12``; without ranks the text alone."""

    ranks: tuple[int, ...]
    text: str
    details: tuple[RanksLine, ...] = ()
    stack: tuple[str, ...] = ()
    """All of it where `text` has its end, innermost call last."""


class Block(Struct, frozen=True, kw_only=True):
    title: str = ""
    lines: tuple[RanksLine, ...] = ()
    more: str = ""
    """The lines that a layout leaves out: ``{ranks} more ranks``."""
    most_ranks: int = 40
    """Characters, where not everything is shown."""
    short: str = ""
    """One line in place of it all, where not everything is shown."""
    foot: str = ""
    evidence: WorkerFailure | None = None

    def left_out(self, shown: int) -> str:
        """The lines after so many, in a line; empty: there are none."""
        hidden = self.lines[shown:]
        ranks = sum(len(line.ranks) for line in hidden)
        return f"... {self.more.format(ranks=ranks, lines=len(hidden))}" if hidden else ""


def other_failures(part: RoundHistory, verdict: Verdict, *, is_counted: bool = False) -> Block | None:
    """The failures beside the root cause. `is_counted`: its consequences, and the same on other ranks, as a number."""
    is_known = verdict.cause is not Cause.UNKNOWN
    root = verdict.failure if is_known else None
    rest = [failure for failure in part.failures if failure is not root]
    lost = [loss for loss in part.lost_nodes if loss is not verdict.lost_node]
    if not rest and not lost:
        return None
    counted = ""
    if is_counted and is_known:
        same = set(verdict.same_failure)
        follow = [one for one in rest if one.failure_class in _CONSEQUENCES or one.global_rank in same]
        counted = f"  {wording.count_failures(follow)}" if follow else ""
        rest = [one for one in rest if not any(one is other for other in follow)]
        if not rest and not lost:
            return Block(foot=counted)
    order = list(wording.FAILURE_WORDS)
    folds = sorted(fold_failures(rest, part.clocks), key=lambda fold: order.index(fold.first.failure_class))
    title, evidence = f"Other failures in that round: {len(rest) + len(lost)}", None
    if not is_known:
        title = title.replace("Other failures", "Failures")
        evidence = verdict.failure
    if evidence is not None:
        counted = f"What rank {evidence.global_rank} on {evidence.host} printed, the first of them:"
    return Block(
        title=title,
        lines=(
            *(
                RanksLine((), f"{clean_line(loss.summary)}{_SILENCE.format(loss.age) if loss.age else ''}")
                for loss in lost
            ),
            *(_fold_line(fold, root, verdict, part.clocks) for fold in folds),
        ),
        more="{ranks} failures of {lines} more kinds",
        most_ranks=30,
        foot=counted,
        evidence=evidence,
    )


def _fold_line(fold: Fold, root: WorkerFailure | None, verdict: Verdict, clocks: Clocks) -> RanksLine:
    first = fold.first
    hosts = clean_line(fold.hosts[0]) if len(fold.hosts) == 1 else f"{len(fold.hosts)} hosts"
    what = wording.FAILURE_WORDS[first.failure_class] if first.failure_class is not FailureClass.ROOT else ""
    if root is not None and set(fold.ranks) <= set(verdict.same_failure):
        what = "the same failure"
    several = len(fold.wordings) > 1
    label = ", ".join(filter(None, (what, f"in {len(fold.wordings)} wordings" if several else "")))
    at = time_text(clocks.of_failure(first).at_ns, date=False, fine=True)
    text = f" on {hosts}, from {at}{f' [{label}]' if label else ''}: {wording.brief(fold.headline)}"
    wordings = (RanksLine(same.ranks, f": {wording.brief(same.first.headline)}") for same in fold.wordings)
    return RanksLine(fold.ranks, text, tuple(wordings) if several else ())


def hung_ranks(part: RoundHistory) -> list[Block]:
    """The places of a hung round's ranks: main threads, other threads, last heartbeats; none without a stack."""
    # Of these ranks a place is known: a stack, or where in the kernel they sat.
    stacks = [group for group in part.stacks if group.stack or (group.state and not group.state.startswith("R "))]
    if not stacks:
        return []
    names = [f" [{clean_line(group.name)}]" if group.name else "" for group in part.threads]
    found = [
        Block(
            title="Where each rank's main thread was (innermost call first):",
            lines=tuple(RanksLine(group.ranks, f": {_where_stood(group)}", stack=group.stack) for group in stacks),
            more="{ranks} more ranks",
        ),
        Block(
            title="Where the other threads were:",
            lines=tuple(
                RanksLine(group.ranks, f"{name}: {_where_stood(group)}", stack=group.stack)
                for name, group in zip(names, part.threads, strict=True)
            ),
            more="{lines} more places",
            short=f"  other threads: {plural(len(names), 'more place')} (--all shows them; stacks.txt has all)",
        ),
        Block(title="Last heartbeats:", lines=tuple(_heartbeats(part)), more="{lines} more steps and sections"),
    ]
    return [block for block in found if block.lines]


def _where_stood(group: StackGroup) -> str:
    if not group.stack:
        return f"no Python stack; {clean_line(group.state)}" if group.state else "no Python stack"
    # ``/a/b/train.py:44 step`` -> ``step (train.py:44)``
    frames = [clean_line(frame).partition(" ") for frame in reversed(group.stack[-3:])]
    return " < ".join(f"{function} ({place.rsplit('/', 1)[-1]})" for place, _, function in frames)


def _heartbeats(part: RoundHistory) -> Iterable[RanksLine]:
    groups: dict[tuple[int, str], list[RankStatus]] = {}
    for status in part.rank_statuses:
        step = status.counted_steps if status.step is None else status.step
        groups.setdefault((-1 if step is None else step, status.section), []).append(status)
    for (_, section), statuses in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])):
        at = f"at {statuses[0].at}" if statuses[0].step is not None else statuses[0].at
        ages = [status.age for status in statuses]
        silent = "-".join(dict.fromkeys((f"{min(ages):.1f}", f"{max(ages):.1f}")))
        text = f": {at}, section {clean_line(section)!r}, silent for {silent} s"
        yield RanksLine(tuple(status.rank for status in statuses), text)


class RoundEntry(Struct, frozen=True, kw_only=True):
    part: RoundHistory
    size: str
    how: str
    since_ns: int | None
    """It goes on since then."""
    failure: str
    alike: str
    """Equal for rounds that ended in the same way; empty: this one is like no other."""


class AttemptEntry(Struct, frozen=True, kw_only=True):
    attempt: AttemptHistory
    end: str
    rounds: tuple[RoundEntry, ...]


def round_entry(history: RunHistory, attempt: AttemptHistory, part: RoundHistory) -> RoundEntry:
    verdict = verdict_of(part)
    size = wording.describe_size(part)
    alike = failure = ""
    since_ns = None
    if verdict.cause is not Cause.NONE:
        failure = verdict.summary
        others = len(part.failures) - (1 if verdict.failure is not None else 0)
        how = f"{verdict.summary}{f' (+{others} more)' if others else ''}"
        where = verdict.failure.global_rank if verdict.failure is not None else None
        where = verdict.lost_node.node if where is None and verdict.lost_node is not None else where
        unknown = verdict.failure if verdict.cause is Cause.UNKNOWN else None
        same = kind_of(unknown)[0] if unknown is not None else verdict.fingerprint
        alike = "" if part.in_process or part.fresh_starts else f"{size}|{same}|{where}|{others}"
    elif part.succeeded:
        how = "all workers ended with 0"
    elif part.stopping_reasons:
        how = f"stopped: {part.stopping_reasons[0]}"
    elif part.failures:
        how = "ended by this job"
    elif attempt.outcome or attempt is not history.attempts[-1]:
        how = "no end is recorded"
    else:
        how, since_ns = "no end yet", part.started_ns
    return RoundEntry(part=part, size=size, how=how, since_ns=since_ns, alike=alike, failure=failure)


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
