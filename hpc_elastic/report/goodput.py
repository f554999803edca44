"""Goodput: the share of a run's wall time that went into steps that were kept, and where the rest went.

Steps are known where workers report them (`hpc_elastic.heartbeat`) or their optimizer's are counted. Elsewhere the
share is the *uptime*: the time in which all processes of a round were up, which says nothing of when training was back.
Report, page and report.json have one accounting, this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from hpc_elastic.base.text import duration, plural
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.timeline_attempt import PlacedAttempt, RoundTimes, place_attempts
from hpc_elastic.report.verdict import Cause
from hpc_elastic.report.wording import describe_restart
from hpc_elastic.run.progress import COUNTED, ProgressSource

STEPS_UNKNOWN = "no step was reported or counted"
ONE_STEP = "no round reported more than one step"
STEPS_GO_BACK = "the steps that were reported go back without a restart"


class RestartPart(Struct, frozen=True, kw_only=True):
    name: str
    """``stop``, ``meet``, ``start``, and where steps are known ``first step``."""
    seconds: float


class Cost(Struct, frozen=True, kw_only=True):
    attempt: int
    round: int
    what: str
    seconds: float
    """The time from the last step before it to the first one after it, to the next interruption, or to the run's end;
    where steps are not known, until all processes were up again.
    """
    queued: float = 0.0
    """Seconds of it between two attempts."""
    recomputed: float = 0.0
    recovered: bool = True
    """A step was done after it, before the next interruption; where steps are not known, all processes were up."""
    is_failure: bool = True
    """False: the membership changed."""
    host: str = ""
    parts: tuple[RestartPart, ...] = ()


class Goodput(Struct, frozen=True, kw_only=True):
    """Seconds of wall time, from the start of the first attempt, which add up to `wall`."""

    wall: float
    training: float = 0.0
    """All workers ran, and where steps are known, they had begun: `kept`, `recomputed`, `hanging` and
    `checkpointing` together."""
    starting: float = 0.0
    """The time until all workers ran first; where steps are known, until the first step."""
    interrupted: float = 0.0
    """The time after a failure, a restart within the processes or a change of the membership, without the queue: until
    all ran again; where steps are known, until the next step.
    """
    queued: float = 0.0
    ending: float = 0.0
    """The time after the last workers had ended well; where steps are known, after the last step."""
    steps_known: bool = False
    why_unknown: str = STEPS_UNKNOWN
    progress: ProgressSource = ProgressSource.UNKNOWN
    """Its steps may be counted from 1 in each round: then those that a failure took back are not known."""
    kept: float = 0.0
    recomputed: float = 0.0
    """Steps that were lost with a failure, the one that it broke off included; by the mean step's time."""
    hanging: float = 0.0
    """The time from the last step until a hang was found."""
    checkpointing: float = 0.0
    checkpoints: int = 0
    """Complete ones."""
    until_ns: int | None = None
    """The end of that time: where the run goes on, the last that is known of it."""
    costs: tuple[Cost, ...]

    @property
    def share(self) -> float | None:
        """Goodput, or without steps uptime, from 0 to 1; None where no time has passed."""
        useful = self.kept if self.steps_known else self.training
        return useful / self.wall if self.wall > 0 else None


_LEAST_SECONDS = 60.0
"""The goodput of a shorter run shows nothing."""


def is_worth_showing(goodput: Goodput) -> bool:
    return goodput.share is not None and goodput.wall >= _LEAST_SECONDS


def describe_goodput(goodput: Goodput) -> list[tuple[str, str, float]]:
    """Each part of the time: its key, what it went into, its seconds. The useful one first."""
    failures = sum(1 for cost in goodput.costs if cost.is_failure)
    changes = len(goodput.costs) - failures
    after = [*([plural(failures, "failure")] if failures else []), *([plural(changes, "change")] if changes else [])]
    useful = [("training", "all processes were up", goodput.training)]
    what = " the processes"
    if goodput.steps_known:
        what = ""
        useful = [
            ("training", "in steps that were kept", goodput.kept),
            ("recomputed", "in steps that were lost", goodput.recomputed),
            ("hanging", "until hangs were found", goodput.hanging),
            ("checkpointing", "in checkpoints", goodput.checkpointing),
        ]
    return [
        *useful,
        ("starting", f"to start{what}", goodput.starting),
        ("interrupted", f"to restart{what}{' after ' * bool(after)}{' and '.join(after)}", goodput.interrupted),
        ("queued", "queued", goodput.queued),
        ("ending", "to end", goodput.ending),
    ]


def goodput_text(goodput: Goodput, *, so_far: str = "") -> str:
    """``Goodput: 87.1 % of 3 h 20 min (4 min 10 s to start, …)``; without steps it is the uptime."""
    rest = [f"{duration(seconds)} {what}" for _, what, seconds in describe_goodput(goodput)[1:] if seconds >= 0.05]
    name = "Goodput" if goodput.steps_known else "Uptime"
    text = f"{name}: {100 * (goodput.share or 0.0):.1f} % of {duration(goodput.wall)}{so_far}"
    return f"{text} ({', '.join(rest)})" if rest else text


def describe_progress(goodput: Goodput) -> str:
    """The source of progress in one word; and what is not known because of it, with what would show it."""
    text = f"Progress: {goodput.progress.value}"
    if goodput.steps_known:
        counted = ". Which steps were done again is not known; hpc_elastic.heartbeat(step) shows it"
        return f"{text}{counted if goodput.progress in COUNTED else ''}."
    how = "takes the global step" if goodput.why_unknown == STEPS_GO_BACK else "shows it"
    return (
        f"{text}, since {goodput.why_unknown}: when training was back is not known; hpc_elastic.heartbeat(step) {how}."
    )


def cost_text(costs: Sequence[Cost], *, steps_known: bool) -> str:
    """``, cost 8.1 s``; without steps ``, processes up after 0.1 s``."""
    if not costs:
        return ""
    seconds, queued = duration(sum(cost.seconds for cost in costs)), sum(cost.queued for cost in costs)
    more = " in all" if len(costs) > 1 else ""
    more += f" ({duration(queued)} queued)" if queued >= 0.05 else ""
    if costs[-1].recovered:
        return f", cost {seconds}{more}" if steps_known else f", processes up after {seconds}{more}"
    return f", cost {seconds}{more}, no step after it" if steps_known else f", processes down for {seconds}{more}"


def goodput_of(history: RunHistory, placed: Sequence[PlacedAttempt] | None = None) -> Goodput:
    """Add up a run's time; `placed`: its attempts, where they have been placed before."""
    attempts = place_attempts(history) if placed is None else placed
    rounds = [times for part in attempts for times in part.rounds]
    if not attempts:
        return Goodput(wall=0, costs=())
    account = _Account(history, attempts, rounds)
    for trained, times in sorted(
        ((one.trained_ns, one) for one in rounds if one.trained_ns is not None), key=lambda pair: pair[0]
    ):
        account.add(times, *trained)
    return account.close(rounds[-1] if rounds else None)


class _Account:
    def __init__(self, history: RunHistory, attempts: Sequence[PlacedAttempt], rounds: Sequence[RoundTimes]) -> None:
        self._history = history
        self._gaps = [(before.end_ns, max(before.end_ns, after.start_ns)) for before, after in pairwise(attempts)]
        self._start = self._cursor = attempts[0].start_ns
        self._end = max(part.end_ns for part in attempts)
        self._last: RoundTimes | None = None
        self._costs: list[Cost] = []
        self._checkpoints = 0
        self._booked = dict.fromkeys(("starting", "interrupted", "queued", "ending"), 0.0)
        self._booked |= dict.fromkeys(("training", "kept", "recomputed", "hanging", "checkpointing"), 0.0)
        self._why_unknown = self._find_why_unknown(rounds)
        self._resumed = _resumed_at(rounds)
        self._lost = self._hung = 0.0
        """The last round's seconds of steps that were lost, and until its hang was found."""

    def _find_why_unknown(self, rounds: Sequence[RoundTimes]) -> str:
        known = [(one.part, one.steps) for one in rounds if one.steps is not None]
        if not known:
            return STEPS_UNKNOWN
        if any(steps.redone > 0 and not item.in_process for item, steps in known):
            return STEPS_GO_BACK
        return "" if any(steps.last > steps.first for _, steps in known) else ONE_STEP

    def add(self, times: RoundTimes, begin: int, stop: int) -> None:
        begin, stop = max(begin, self._cursor), max(stop, self._cursor)
        waited = _overlap(self._gaps, self._cursor, begin)
        idle = (begin - self._cursor) / 1e9 - waited
        ran = (stop - begin) / 1e9
        restarts = {one.iteration: one for one in times.part.in_process if not one.gave_up}.values()
        within = min(ran, sum(one.seconds for one in restarts))
        for one in restarts:
            what = describe_restart(one)
            self._costs.append(Cost(attempt=times.attempt, round=times.part.index, what=what, seconds=one.seconds))
        lost = hung = 0.0
        if self._why_unknown:
            self._booked["training"] += ran - within
        else:
            warm, lost, hung = self._book_steps(times, begin, stop, within)
            idle += warm
        self._booked["interrupted"] += within
        self._booked["queued"] += waited
        if self._last is None:
            self._booked["starting"] += idle
        else:
            self._booked["interrupted"] += idle
            recovered = bool(self._why_unknown) or times.steps is not None
            self._add_cost(self._last, idle + waited, waited, recovered=recovered, after=times)
        self._cursor, self._last, self._lost, self._hung = stop, times, lost, hung

    def _book_steps(self, times: RoundTimes, begin: int, stop: int, within: float) -> tuple[float, float, float]:
        """Book the time in which a round's workers ran.

        Returns the seconds until its first step, of steps that were lost, and until its hang was found.
        """
        steps, item = times.steps, times.part
        if steps is None:
            return max(0.0, (stop - begin) / 1e9 - within), 0.0, 0.0
        self._checkpoints += steps.checkpoints
        first = min(max(steps.first_ns, begin), stop)
        last = min(max(steps.last_ns, first), stop)
        core, tail, warm = _take_off(within, (last - first) / 1e9, (stop - last) / 1e9, (first - begin) / 1e9)
        saving = min(core, steps.checkpointing)
        redone = min(core - saving, max(0.0, steps.redone - within))
        done = core - saving - redone
        count = steps.last - steps.first
        lost = 0.0
        resumed = self._resumed.get((times.attempt, times.part.index))
        if resumed is not None and resumed <= steps.last:
            lost = done if count <= 0 else min(done, done * (steps.last - resumed + 1) / count)
        booked = self._booked
        booked["checkpointing"] += saving
        booked["recomputed"] += redone + lost
        booked["kept"] += done - lost
        booked["training"] += core
        verdict = verdict_of(item)
        if item.succeeded:
            booked["ending"] += tail
            return warm, 0.0, 0.0
        if resumed is not None and count > 0:  # a later round went on further on than was reported
            unseen = min(tail, max(0, resumed - steps.last - 1) * done / count)
            booked["kept"] += unseen
            booked["training"] += unseen
            tail -= unseen
        is_open = not item.broken and not item.stopping_reasons
        hangs = verdict.failure is not None and verdict.failure.failure_class is FailureClass.HANG
        hung = 0.0
        if hangs or item.suspected_ns > steps.last_ns:
            booked["hanging"] += tail
            hung = tail
        elif is_open:
            booked["kept"] += tail
        else:
            booked["recomputed"] += tail
            lost += tail
        booked["training"] += tail
        return warm, lost, hung

    def close(self, final: RoundTimes | None) -> Goodput:
        waited = _overlap(self._gaps, self._cursor, self._end)
        rest = (self._end - self._cursor) / 1e9 - waited
        self._booked["queued"] += waited
        last = self._last
        if last is None:
            self._booked["starting"] += rest
        elif final is not None and (last.part.broken or last.part is not final.part):
            self._booked["interrupted"] += rest
            ended_well = final.part.succeeded  # too soon to be seen to be up
            self._add_cost(last, rest + waited, waited, recovered=bool(self._why_unknown) and ended_well)
        else:
            self._booked["ending"] += rest
        return Goodput(
            wall=(self._end - self._start) / 1e9,
            steps_known=not self._why_unknown,
            why_unknown=self._why_unknown,
            progress=self._history.progress,
            until_ns=self._end,
            checkpoints=self._checkpoints,
            costs=tuple(self._costs),
            **self._booked,
        )

    def _add_cost(
        self, times: RoundTimes, seconds: float, queued: float, *, recovered: bool, after: RoundTimes | None = None
    ) -> None:
        item = times.part
        verdict = verdict_of(item)
        is_failure = verdict.cause is not Cause.NONE
        what = verdict.summary
        if not is_failure:
            attempt = next(one for one in self._history.attempts if one.number == times.attempt)
            following = [one.reason for one in attempt.rounds if one.index == item.index + 1]
            reasons = [*item.stopping_reasons, *following, attempt.reason]
            what = next(filter(None, reasons), "its workers ended, and no reason is recorded")
        host = item.lost_nodes[0].host if item.lost_nodes else ""
        if verdict.failure is not None:
            host = verdict.failure.host
        self._costs.append(
            Cost(
                attempt=times.attempt,
                round=item.index,
                what=what,
                seconds=seconds + self._lost + self._hung,
                queued=queued,
                recomputed=self._lost,
                recovered=recovered,
                is_failure=is_failure,
                host=host if is_failure else "",
                parts=_restart_parts(times, after) if after is not None and after.attempt == times.attempt else (),
            )
        )


def _restart_parts(before: RoundTimes, after: RoundTimes) -> tuple[RestartPart, ...]:
    broke = before.trained_ns[1] if before.trained_ns is not None else before.end_ns
    runs = max(broke, after.trained_ns[0] if after.trained_ns is not None else after.end_ns)
    stopped = min(max(broke, before.end_ns), runs)
    met = min(max(stopped, after.start_ns), runs)
    moments = [("stop", broke, stopped), ("meet", stopped, met), ("start", met, runs)]
    if after.steps is not None:
        moments.append(("first step", runs, max(runs, after.steps.first_ns)))
    return tuple(RestartPart(name=name, seconds=(end - begin) / 1e9) for name, begin, end in moments)


def _resumed_at(rounds: Sequence[RoundTimes]) -> dict[tuple[int, int], int]:
    """Round → the least step at which a later one went on: its steps from there on were done again."""
    found: dict[tuple[int, int], int] = {}
    least: int | None = None
    for times in reversed(rounds):
        if least is not None:
            found[times.attempt, times.part.index] = least
        if times.steps is not None and not times.steps.is_counted:
            least = times.steps.first if least is None else min(least, times.steps.first)
    return found


def _take_off(seconds: float, *parts: float) -> list[float]:
    """The parts without these seconds, which the first of them has as far as it is long enough."""
    left = []
    for part in parts:
        left.append(max(0.0, part - seconds))
        seconds = max(0.0, seconds - part)
    return left


def _overlap(gaps: list[tuple[int, int]], start: int, end: int) -> float:
    return sum(max(0, min(end, high) - max(start, low)) for low, high in gaps) / 1e9
