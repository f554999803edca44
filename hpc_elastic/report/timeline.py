"""The picture of a run, as values: rows of spans with marks on one axis of time. `render_html_chart` draws it.

The axis has attempts to scale, and the waits between them cut short. It is one for all hosts: times are wall-clock
times, those of a clock that is known to be wrong shifted. They are good for a picture; the failure that was first is
found elsewhere (`verdict`), with the clocks' bounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from hpc_elastic.base.text import ranks_text
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import HostOffset
from hpc_elastic.report.document import Fold, fold_failures
from hpc_elastic.report.history import AttemptHistory, NodeLoss
from hpc_elastic.report.subject import verdict_of
from hpc_elastic.report.timeline_attempt import NodeState, PlacedAttempt, RoundTimes, Span
from hpc_elastic.report.wording import FAILURE_WORDS

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
    """Pieces without holes, from 0 to 1."""

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
    """Lay out attempts, ascending: number, start and end of each.

    One that starts before the end of the one before, by another host's clock, starts at that end.
    """
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


class MarkKind(str, Enum):
    """The most important first."""

    CAUSE = "root cause"
    LOST = "node lost or left"
    FAILURE = FAILURE_WORDS[FailureClass.ROOT]
    HANG = FAILURE_WORDS[FailureClass.HANG]
    INFRASTRUCTURE = FAILURE_WORDS[FailureClass.INFRASTRUCTURE]
    SYMPTOM = FAILURE_WORDS[FailureClass.SYMPTOM]
    STOPPED = FAILURE_WORDS[FailureClass.STOPPED_BY_US]


IMPORTANCE = {kind: number for number, kind in enumerate(MarkKind)}


class Entry(Struct, frozen=True, kw_only=True):
    """Something that went wrong: failures of one kind in one round, or a lost node."""

    number: int
    kind: MarkKind
    attempt: int
    round: int
    fold: Fold | None = None
    loss: NodeLoss | None = None

    @property
    def members(self) -> tuple[WorkerFailure, ...]:
        return self.fold.members if self.fold is not None else ()

    @property
    def headline(self) -> str:
        if self.loss is not None:
            return self.loss.summary
        return self.fold.headline if self.fold is not None else ""

    @property
    def first_ns(self) -> int | None:
        """When it was seen first, by the clock of its host."""
        if self.loss is not None:
            return self.loss.gone_ns
        return self.fold.first.ended_ns if self.fold is not None else None


class Mark(Struct, frozen=True, kw_only=True):
    entry: int
    kind: MarkKind
    at_ns: int
    ranks: tuple[int, ...] = ()


class Row(Struct, frozen=True, kw_only=True):
    name: str
    detail: str
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    key: tuple[tuple[NodeState, int, int], ...] = ()
    """Its states without times: rows with the same key are alike."""


class Timeline(Struct, frozen=True, kw_only=True):
    attempts: tuple[PlacedAttempt, ...]
    nodes: tuple[Row, ...]
    ranks: tuple[Row, ...]
    """At most as many as were asked for: those that failed first, then by number."""
    ranks_left_out: int
    entries: tuple[Entry, ...]
    rounds: tuple[RoundTimes, ...]
    """Those of which a node reported its part."""
    offsets: Mapping[str, HostOffset]
    """Names of nodes whose wall clock is known to be off by so much; its times are shifted."""
    clock_hosts: tuple[str, ...] = ()
    """The host whose clock the axis is by, for each attempt in which clocks were compared."""


def build_timeline(parts: tuple[PlacedAttempt, ...], *, most_ranks: int = 1024) -> Timeline:
    entries = _entries(part.attempt for part in parts)
    by_round: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        by_round.setdefault((entry.attempt, entry.round), []).append(entry)
    chosen, left_out = _choose_ranks(parts, entries, most_ranks)
    node_rows, rank_rows = _Rows(), _Rows()
    for part in parts:
        _draw_nodes(part, node_rows, by_round)
        _draw_ranks(part, rank_rows, by_round, chosen)
    offsets = {part.name(node): offset for part in parts for node, offset in part.offsets.items()}
    return Timeline(
        attempts=parts,
        nodes=node_rows.build(),
        ranks=rank_rows.build(),
        ranks_left_out=left_out,
        entries=entries,
        rounds=tuple(times for part in parts for times in part.rounds if times.round in part.extents),
        offsets=offsets,
        clock_hosts=tuple(
            dict.fromkeys(p.attempt.clocks.host for p in parts if p.attempt.clocks.reference is not None)
        ),
    )


class _Rows:
    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {}
        self._keys: dict[str, list[tuple[NodeState, int, int]]] = {}
        self._marks: dict[str, list[Mark]] = {}
        self._details: dict[str, dict[str, None]] = {}

    def add(self, name: str, attempt: int, spans: Iterable[Span], detail: str) -> None:
        mine = self._spans.setdefault(name, [])
        key = self._keys.setdefault(name, [])
        for span in spans:
            if mine and mine[-1].end_ns > span.start_ns:  # a rank of a lost node runs elsewhere
                mine[-1] = mine[-1]._replace(end_ns=max(mine[-1].start_ns, span.start_ns))
            mine.append(span)
            key.append((span.state, attempt, span.round))
        self._marks.setdefault(name, [])
        details = self._details.setdefault(name, {})
        if detail:
            details[detail] = None

    def mark(self, name: str, mark: Mark) -> None:
        if name in self._marks:
            self._marks[name].append(mark)

    def build(self) -> tuple[Row, ...]:
        return tuple(
            Row(
                name=name,
                detail=", ".join(list(self._details[name])[-2:]),
                spans=tuple(spans),
                marks=tuple(sorted(self._marks[name], key=lambda mark: (mark.at_ns, IMPORTANCE[mark.kind]))),
                key=tuple(self._keys[name]),
            )
            for name, spans in self._spans.items()
        )


def _entries(attempts: Iterable[AttemptHistory]) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for attempt in attempts:
        for item in attempt.rounds:
            verdict = verdict_of(item)
            for loss in (*item.lost_nodes, *item.own_failures):
                kind = MarkKind.CAUSE if loss is verdict.lost_node else MarkKind.LOST
                found.append(Entry(number=len(found), kind=kind, attempt=attempt.number, round=item.index, loss=loss))
            for fold in fold_failures(item.failures, item.clocks):
                is_cause = verdict.failure is not None and any(f is verdict.failure for f in fold.members)
                kind = MarkKind.CAUSE if is_cause else MarkKind(FAILURE_WORDS[fold.first.failure_class])
                found.append(Entry(number=len(found), kind=kind, attempt=attempt.number, round=item.index, fold=fold))
    return tuple(found)


def _draw_nodes(part: PlacedAttempt, rows: _Rows, by_round: Mapping[tuple[int, int], Sequence[Entry]]) -> None:
    number = part.attempt.number
    indices = {*range(len(part.attempt.nodes)), *part.stays, *part.agent_starts}
    names = _unique_names(sorted(index for index in indices if index >= 0), part.name)
    ranks: dict[int, tuple[int, ...]] = {}
    for item in part.attempt.rounds:
        ranks.update({node.node: node.ranks for node in item.nodes})
    for node, name in names.items():
        rows.add(name, number, part.node_spans(node), ranks_text(ranks[node]) if ranks.get(node) else "")
    for item in part.attempt.rounds:
        for entry in by_round.get((number, item.index), ()):
            if entry.loss is not None and entry.loss.node in names:
                rows.mark(names[entry.loss.node], _loss_mark(entry, entry.loss, part))
            hit_nodes: dict[int, list[WorkerFailure]] = {}
            for failure in entry.members:
                hit_nodes.setdefault(failure.node, []).append(failure)
            for node, members in hit_nodes.items():
                if node in names:
                    at = min(part.failure_at(failure) for failure in members)
                    hit = tuple(failure.global_rank for failure in members)
                    rows.mark(names[node], Mark(entry=entry.number, kind=entry.kind, at_ns=at, ranks=hit))


def _draw_ranks(
    part: PlacedAttempt, rows: _Rows, by_round: Mapping[tuple[int, int], Sequence[Entry]], chosen: Sequence[int]
) -> None:
    wanted = set(chosen)
    for rank in chosen:
        rows.add(f"rank {rank}", part.attempt.number, (), "")
    for item in part.attempt.rounds:
        ends = {f.global_rank: part.failure_at(f) for f in item.failures if f.ended_ns}
        for node in item.nodes:
            stay = part.by_round.get(item.index, {}).get(node.node)
            if stay is not None:
                for rank in wanted.intersection(node.ranks):
                    spans = part.rank_spans(stay, ends.get(rank))
                    rows.add(f"rank {rank}", part.attempt.number, spans, part.name(node.node))
        for entry in by_round.get((part.attempt.number, item.index), ()):
            if entry.loss is not None:
                mark = _loss_mark(entry, entry.loss, part)
                for rank in (rank for node in item.nodes if node.node == entry.loss.node for rank in node.ranks):
                    rows.mark(f"rank {rank}", mark)
            for failure in (failure for failure in entry.members if failure.global_rank in wanted):
                hit = (failure.global_rank,)
                mark = Mark(entry=entry.number, kind=entry.kind, at_ns=part.failure_at(failure), ranks=hit)
                rows.mark(f"rank {failure.global_rank}", mark)


def _loss_mark(entry: Entry, loss: NodeLoss, part: PlacedAttempt) -> Mark:
    at = part.loss_at(loss)
    return Mark(entry=entry.number, kind=entry.kind, at_ns=min(max(at, part.start_ns), part.end_ns))


def _unique_names(nodes: Iterable[int], name: Callable[[int], str]) -> dict[int, str]:
    """Two nodes of an attempt never share a row."""
    found: dict[int, str] = {}
    used: set[str] = set()
    for node in nodes:
        mine = name(node)
        if mine in used:
            mine = f"{mine} (node {node})"
        used.add(mine)
        found[node] = mine
    return found


def _choose_ranks(parts: Sequence[PlacedAttempt], entries: Sequence[Entry], most: int) -> tuple[tuple[int, ...], int]:
    everybody = {rank for part in parts for item in part.attempt.rounds for node in item.nodes for rank in node.ranks}
    everybody |= {failure.global_rank for entry in entries for failure in entry.members}
    everybody = {rank for rank in everybody if rank >= 0}
    if len(everybody) <= most:
        return tuple(sorted(everybody)), 0
    first: dict[int, int] = {}
    for entry in entries:
        for failure in entry.members:
            order = IMPORTANCE[entry.kind]
            first[failure.global_rank] = min(order, first.get(failure.global_rank, order))
    order_of_all = sorted(everybody, key=lambda rank: (first.get(rank, len(IMPORTANCE)), rank))
    return tuple(sorted(order_of_all[:most])), len(everybody) - most
