"""Attempts on an axis that all hosts share: each node's parts in its rounds with every end known, and its states."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.failures.ranking import FailureClass, Moment
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import SUPERVISOR, node_offsets
from hpc_elastic.report.history import AttemptHistory, NodeLoss, NodeTimes, RoundHistory, RunHistory
from hpc_elastic.run.progress import COUNTED, STEPS, ProgressSource


class NodeState(str, Enum):
    LAUNCHING = "agent being launched"
    """The attempt goes on, and nothing was heard of its agent yet."""
    RENDEZVOUS = "rendezvous"
    STARTING = "starting"
    """The round is agreed upon: its workers are started, import and load, until the round's first step."""
    RUNNING = "running"
    UP = "processes up"
    """The run's steps are not known: whether the workers trained is not known either."""
    STOPPING = "stopping workers"
    SPARE = "waiting as a spare"
    DONE = "done"
    LOST = "lost"


class Span(Struct, frozen=True, gc=False):
    """A stretch of one state. Without the garbage collector's look: a long run of a thousand nodes has many."""

    state: NodeState
    start_ns: int
    end_ns: int
    round: int


class Stay(Struct, frozen=True, gc=False):
    """A node's part in a round, with every end known: reported, or concluded."""

    round: int
    start_ns: int
    running_ns: int
    """When its workers ran; the stay's end where they never did."""
    stopping_ns: int
    end_ns: int
    lost_ns: int | None = None
    back_ns: int | None = None
    succeeded: bool = False
    first_step_ns: int | None = None
    """When the round's first step was done, or the stay's end where none was; None: the run's steps are not known."""

    def spans(self, end_ns: int) -> list[Span]:
        """Starting, running, stopping; and lost until it was heard of again, or until the attempt's end."""
        ready, running = self.running_ns, NodeState.UP
        if self.first_step_ns is not None:
            ready, running = min(max(ready, self.first_step_ns), self.stopping_ns), NodeState.RUNNING
        back = self.end_ns if self.lost_ns is None else max(self.back_ns or end_ns, self.end_ns)
        spans = [Span(NodeState.STARTING, self.start_ns, ready, self.round)] if ready > self.start_ns else []
        if self.stopping_ns > ready:
            spans.append(Span(running, ready, self.stopping_ns, self.round))
        if self.end_ns > self.stopping_ns:
            spans.append(Span(NodeState.STOPPING, self.stopping_ns, self.end_ns, self.round))
        if back > self.end_ns:
            spans.append(Span(NodeState.LOST, self.end_ns, back, self.round))
        return spans


def _between(
    start: int, end: int, rounds: Mapping[int, tuple[int, int]], *, was_in: int, then_in: int | None
) -> list[Span]:
    """Not in a round: a spare while others run one, else in rendezvous."""
    spans: list[Span] = []
    last = max(rounds, default=-1) + 1 if then_in is None else then_in
    for index in range(was_in + 1, last):
        if index not in rounds:
            continue
        others_start, others_end = max(start, rounds[index][0]), min(end, rounds[index][1])
        if others_end <= others_start:
            continue
        if others_start > start:
            spans.append(Span(NodeState.RENDEZVOUS, start, others_start, -1))
        spans.append(Span(NodeState.SPARE, others_start, others_end, index))
        start = others_end
    if end > start:
        spans.append(Span(NodeState.RENDEZVOUS, start, end, -1))
    return spans


class RoundSteps(NamedTuple):
    """The steps that a round's workers have reported, by the worker that got furthest; times on the common axis."""

    first: int
    first_ns: int
    last: int
    last_ns: int
    checkpointing: float
    redone: float
    """Both in seconds."""
    checkpoints: int = 0
    is_counted: bool = False
    """They are counted from 1 in each round: which of them were done again is not known."""


class RoundTimes(NamedTuple):
    attempt: int
    part: RoundHistory
    start_ns: int
    end_ns: int
    trained_ns: tuple[int, int] | None
    """The time in which all its workers ran; None: they never did all at once."""
    steps: RoundSteps | None = None


_TIMES = ("final_ns", "started_ns", "stopping_ns", "ended_ns")
NOT_SEEN_NS = 1_000_000
"""A row that is shifted by no more looks the same."""


class PlacedAttempt:
    def __init__(self, attempt: AttemptHistory, *, source: ProgressSource = ProgressSource.UNKNOWN) -> None:
        self.attempt = attempt
        self._sources = (source,) if source is ProgressSource.COLLECTIVES else STEPS
        finals = ({one.node: one.final_ns for one in item.times if one.final_ns} for item in attempt.rounds)
        self.offsets = node_offsets(finals, clocks=attempt.clocks)
        self._shifts = {node: o.offset_ns for node, o in self.offsets.items() if abs(o.offset_ns) > NOT_SEEN_NS}
        self.losses: dict[int, dict[int, NodeLoss]] = {}
        for item in attempt.rounds:
            for loss in item.lost_nodes:
                shift = self.loss_at(loss) - loss.gone_ns
                self.losses.setdefault(loss.node, {})[item.index] = replace(loss, seen_ns=loss.seen_ns + shift)
        self.agent_starts = {one.node: [self.at(one.node, when) for when in one.started_ns] for one in attempt.agents}
        self.agent_ends = {one.node: [self.at(one.node, when) for when in one.ended_ns] for one in attempt.agents}
        self._times: defaultdict[int, list[NodeTimes]] = defaultdict(list)
        were_set = self._shifts.keys() | attempt.clocks.set_nodes
        for times in (one for item in attempt.rounds for one in item.times if one.node >= 0):
            if times.node in were_set:
                known = {name: getattr(times, name) for name in _TIMES}
                shifted = {name: self.at(times.node, when) for name, when in known.items() if when is not None}
                times = replace(times, **shifted)
            self._times[times.node].append(times)
        self.start_ns, self.end_ns = self._extent()
        found = {item.index: self._steps(item) for item in attempt.rounds}
        self._known_steps = {index: steps for index, steps in found.items() if steps is not None}
        steps_known = source in (*STEPS, ProgressSource.COLLECTIVES)
        self.stays = {node: self._make_stays(node, steps_known=steps_known) for node in self._times}
        self.by_round: defaultdict[int, dict[int, Stay]] = defaultdict(dict)
        for node, stays in self.stays.items():
            for stay in stays:
                self.by_round[stay.round][node] = stay
        self.extents = {
            index: (min(map(attrgetter("start_ns"), there.values())), max(map(attrgetter("end_ns"), there.values())))
            for index, there in self.by_round.items()
        }
        """Round → when the first node was in it, when the last."""
        self.rounds = [self._round_times(item) for item in attempt.rounds]

    def _make_stays(self, node: int, *, steps_known: bool) -> list[Stay]:
        losses = self.losses.get(node, {})
        # When it joined; a node that reported an end alone had not.
        joined = ((one.started_ns if one.final_ns is None else one.final_ns, one) for one in self._times[node])
        known = sorted([(when, times) for when, times in joined if when is not None], key=itemgetter(0))
        agent_starts = self.agent_starts.get(node, [])
        last_start = max(agent_starts, default=0)
        stays: list[Stay] = []
        before = 0
        for number, (first, item) in enumerate(known):
            start = max(first, before)
            later = [when for when in agent_starts if when > start][:1] if start < last_start else []
            if number + 1 < len(known):
                later.append(known[number + 1][0])
            limit = min([*later, max(start, self.end_ns)])
            began, stopped, ended = item.started_ns, item.stopping_ns, item.ended_ns
            loss = losses.get(item.round)
            lost = back = None
            if loss is not None and not loss.left:
                lost = limit = min(max(start, loss.gone_ns), max(limit, start))
                later += [when for when in (stopped, ended) if when is not None]
                back = min([when for when in later if when > lost], default=self.end_ns)
            end = limit if ended is None or lost is not None else max(start, min(ended, limit))
            stopping = end if stopped is None else min(end, max(start, stopped))
            running = end if began is None else min(max(start, began), stopping)
            done = self._known_steps.get(item.round)
            first_step = None if not steps_known else end if done is None else done.first_ns
            stays.append(Stay(item.round, start, running, stopping, end, lost, back, item.succeeded, first_step))
            before = end
        return stays

    def node_spans(self, node: int) -> list[Span]:
        """All that a node did, ascending and without overlap; where nothing is known, there is no span."""
        stays, agent_starts = self.stays.get(node, []), self.agent_starts.get(node, [])
        if not stays and not agent_starts:
            return []
        spans: list[Span] = []
        cursor = self.start_ns
        if agent_starts and agent_starts[0] > cursor:
            spans.append(Span(NodeState.LAUNCHING, cursor, agent_starts[0], -1))
            cursor = agent_starts[0]
        was_in = -1
        for stay in stays:
            if stay.round == was_in + 1 and stay.start_ns > cursor:
                spans.append(Span(NodeState.RENDEZVOUS, cursor, stay.start_ns, -1))
            else:
                spans += _between(cursor, stay.start_ns, self.extents, was_in=was_in, then_in=stay.round)
            mine = stay.spans(self.end_ns)
            spans += mine
            cursor, was_in = max(stay.end_ns, mine[-1].end_ns if mine else 0), stay.round
        last_end = max((when for when in self.agent_ends.get(node, []) if when >= cursor), default=None)
        until = min(self.end_ns, last_end) if last_end is not None else self.end_ns
        last = stays[-1] if stays else None
        if last is None or last.back_ns is None or last.back_ns < self.end_ns:
            if last is not None and last.succeeded:
                if until > cursor:
                    spans.append(Span(NodeState.DONE, cursor, until, last.round))
            else:
                spans += _between(cursor, until, self.extents, was_in=was_in, then_in=None)
        return spans

    def rank_spans(self, stay: Stay, failed_ns: int | None) -> list[Span]:
        spans, kept = stay.spans(self.end_ns), []
        if failed_ns is None:
            return spans
        for span in spans:
            if span.state is NodeState.LOST or span.end_ns <= failed_ns:
                kept.append(span)
            elif span.start_ns < failed_ns:
                kept.append(replace(span, end_ns=failed_ns))
        return kept

    @cached_property
    def _hosts(self) -> dict[int, str]:
        by_rounds = {node.node: node.host for item in self.attempt.rounds for node in item.nodes}
        return {**{one.node: one.host for one in self.attempt.agents}, **by_rounds}

    def name(self, node: int) -> str:
        names = self.attempt.nodes
        if 0 <= node < len(names) and names[node]:
            return names[node]
        return self._hosts.get(node) or f"node {node}"

    def at(self, node: int, when_ns: int) -> int:
        likely = self.attempt.clocks.likely(node, when_ns)
        return when_ns - self._shifts.get(node, 0) if likely is None else likely

    def failure_at(self, failure: WorkerFailure) -> int:
        moment = self.attempt.clocks.of_failure(failure)
        return moment.at_ns if moment.bound_ns is not None else self.at(failure.node, failure.ended_ns)

    def loss_at(self, loss: NodeLoss) -> int:
        # Its own event is by its own clock; its coordinator's is by a clock that is taken for right.
        guess = self.at(loss.node, loss.seen_ns) if loss.left or loss.broke else loss.gone_ns
        return self._known(self.attempt.clocks.of_loss(loss), guess)

    def _seen_by_supervisor(self, when_ns: int | None) -> int | None:
        likely = when_ns and self.attempt.clocks.likely(SUPERVISOR, when_ns)
        return when_ns and (likely or self._known(self.attempt.clocks.moment(SUPERVISOR, when_ns), when_ns))

    @staticmethod
    def _known(moment: Moment, otherwise_ns: int) -> int:
        return otherwise_ns if moment.bound_ns is None else moment.at_ns

    def _extent(self) -> tuple[int, int]:
        attempt = self.attempt
        times: list[int | None] = [self._seen_by_supervisor(when) for when in (attempt.started_ns, attempt.ended_ns)]
        for whens in (*self.agent_starts.values(), *self.agent_ends.values()):
            times += whens
        for items in self._times.values():
            times += chain.from_iterable(map(attrgetter(*_TIMES), items))
        times += [loss.seen_ns for losses in self.losses.values() for loss in losses.values()]
        for part in attempt.rounds:
            times += [self.failure_at(failure) for failure in part.failures if failure.ended_ns]
            times += [self.at(status.node, status.reported_ns) for status in part.rank_statuses]
        times += [self._seen_by_supervisor(end.seen_ns) for end in attempt.agent_ends]
        known = [when for when in times if when]
        return (min(known), max(known)) if known else (0, 0)

    def _round_times(self, item: RoundHistory) -> RoundTimes:
        """A round trains from when all its workers run till the first stopped, failed or was lost."""
        there = self.by_round.get(item.index, {})
        stays = [there[node] for node, *_ in item.nodes if node in there]
        start, end = self.extents.get(item.index, (self.end_ns, self.end_ns))
        trained = None
        if stays and len(stays) == len(item.nodes):
            ends = [stay.stopping_ns for stay in stays]
            # A hang's time is its last heartbeat; it ended nothing until it was found.
            is_found = any(one.stopping_ns for one in item.times)
            ends += [
                self.failure_at(failure)
                for failure in item.failures
                if failure.ended_ns and not (is_found and failure.failure_class is FailureClass.HANG)
            ]
            begin = max(stay.running_ns for stay in stays)
            if min(ends) > begin:
                trained = (begin, min(ends))
        return RoundTimes(self.attempt.number, item, start, end, trained, self._known_steps.get(item.index))

    def _steps(self, item: RoundHistory) -> RoundSteps | None:
        """The node whose worker got furthest counts; of several the one that got there first."""
        found = [
            (-max(done.step, done.counted_steps), self.at(node, done.step_ns), node, done)
            for node, done in item.progress.items()
            if done.source in self._sources
        ]
        if not found:
            return None
        _, last_ns, node, done = min(found, key=lambda one: one[:3])
        return RoundSteps(
            first=done.first_step or (1 if done.counted_steps else 0),
            first_ns=self.at(node, done.first_ns),
            last=max(done.step, done.counted_steps),
            last_ns=last_ns,
            checkpointing=max(0.0, *(one.checkpoint_seconds for *_, one in found)),
            redone=max(0.0, done.redone_seconds),
            checkpoints=max(0, *(one.checkpoints for *_, one in found)),
            is_counted=done.source in COUNTED,
        )


def place_attempts(history: RunHistory) -> tuple[PlacedAttempt, ...]:
    placed = []
    axes: dict[str, tuple[int, int]] = {}
    for attempt in history.attempts:
        clocks = attempt.clocks.on_axis_of(axes.get(attempt.clocks.host))
        part = PlacedAttempt(replace(attempt, clocks=clocks), source=history.progress)
        axes |= {part.name(node): axis for node, axis in clocks.axes().items()}
        placed.append(part)
    return tuple(part for part in placed if part.end_ns)


_GAP_SHARE = 0.035
_LEAST_SHARE = 0.05
"""The shortest attempt's share of the axis: one of two seconds beside one of ten hours can still be looked at."""
_STEPS: Sequence[int] = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
)  # fmt: skip


class Piece(Struct, frozen=True, kw_only=True):
    start_ns: int
    end_ns: int
    left: float
    right: float
    attempt: int | None
    """None: the wait between two attempts."""


class Axis(Struct, frozen=True):
    pieces: tuple[Piece, ...]
    _starts: tuple[int, ...] = ()

    def place(self, when_ns: int) -> float:
        if not self.pieces:
            return 0.0
        piece = self.pieces[max(0, bisect_right(self._starts, when_ns) - 1)]
        if piece.end_ns <= piece.start_ns:
            return piece.left
        share = (when_ns - piece.start_ns) / (piece.end_ns - piece.start_ns)
        return piece.left + min(1.0, max(0.0, share)) * (piece.right - piece.left)

    def cells(self, times: Sequence[int], grid: int) -> list[int]:
        """The same for ascending times, as whole numbers up to `grid`."""
        piece = self.pieces[max(0, bisect_right(self._starts, times[0]) - 1)] if times else None
        if piece is None or not piece.start_ns <= times[0] <= times[-1] < piece.end_ns:
            return [round(self.place(when) * grid) for when in times]
        start, left = piece.start_ns, piece.left
        lasted, width = piece.end_ns - start, piece.right - left
        return [round((left + (when - start) / lasted * width) * grid) for when in times]

    def ticks(self, *, spacing: float = 0.09) -> list[int]:
        """Round times, at least `spacing` of the axis apart, by UTC."""
        found: list[int] = []
        for piece in self.pieces:
            lasted, width = (piece.end_ns - piece.start_ns) / 1e9, piece.right - piece.left
            if piece.attempt is None or lasted <= 0 or width < spacing:
                continue
            least = lasted * spacing / width
            longest = int(least / _STEPS[-1] + 1) * _STEPS[-1]
            step = next((seconds for seconds in _STEPS if seconds >= least), longest)
            unit = step * 1_000_000_000
            first = -(-piece.start_ns // unit) * unit
            found += [when for when in range(first, piece.end_ns + 1, unit) if self.place(when) < 1 - spacing / 2]
        return found


def make_axis(attempts: Sequence[tuple[int, int, int]]) -> Axis:
    """Ascending: number, start and end of each. One that starts before the end of the one before starts at that end."""
    if not attempts:
        return Axis(())
    spans: list[tuple[int | None, int, int]] = []
    for index, start, end in attempts:
        if spans:
            start = max(start, spans[-1][2])
            if start > spans[-1][2]:
                spans.append((None, spans[-1][2], start))
        spans.append((index, start, max(start + 1, end)))
    gaps = sum(1 for number, _, _ in spans if number is None)
    total = sum(end - start for number, start, end in spans if number is not None)
    gap_share = min(_GAP_SHARE, 0.3 / gaps) if gaps else 0.0
    least = min(_LEAST_SHARE, 0.5 / len(attempts)) * total
    weights = [max(float(end - start), least) for number, start, end in spans if number is not None]
    scale = (1 - gaps * gap_share) / sum(weights)
    pieces: list[Piece] = []
    left, each = 0.0, iter(weights)
    for number, start, end in spans:
        right = left + (gap_share if number is None else next(each) * scale)
        pieces.append(Piece(start_ns=start, end_ns=end, left=left, right=min(1.0, right), attempt=number))
        left = right
    return Axis(tuple(pieces), tuple(piece.start_ns for piece in pieces))
