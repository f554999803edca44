"""The picture of a run, as values: rows of spans with marks on one axis of time. `render_html_chart` draws it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.text import ranks_text
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.blocks import Fold, fold_failures
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.timeline_attempt import PlacedAttempt, Span
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
    number: int
    kind: MarkKind
    attempt: int
    round: int
    headline: str
    first_ns: int | None
    """When it was seen first, by the clock of its host."""
    fold: Fold | None = None
    loss: NodeLoss | None = None

    @property
    def members(self) -> tuple[WorkerFailure, ...]:
        return self.fold.members if self.fold is not None else ()


class Mark(NamedTuple):
    entry: Entry
    at_ns: int
    ranks: tuple[int, ...] = ()


class Row(Struct):
    name: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Attempt, number of its spans."""
    details: dict[str, None] = field(default_factory=dict)

    @property
    def detail(self) -> str:
        return ", ".join(list(self.details)[-2:])

    def add(self, attempt: int, spans: Sequence[Span], detail: str) -> None:
        mine = self.spans
        if mine and spans and mine[-1].end_ns > spans[0].start_ns:  # a rank of a lost node runs elsewhere
            mine[-1] = replace(mine[-1], end_ns=max(mine[-1].start_ns, spans[0].start_ns))
        mine += spans
        self.parts.append((attempt, len(spans)))
        if detail:
            self.details[detail] = None


class Timeline(Struct, frozen=True, kw_only=True):
    nodes: tuple[Row, ...]
    ranks: tuple[Row, ...]
    """At most as many as were asked for: those that failed first, then by number."""
    ranks_left_out: int
    entries: tuple[Entry, ...]


def build_timeline(parts: tuple[PlacedAttempt, ...], *, most_ranks: int = 1024) -> Timeline:
    entries = _entries(part.attempt for part in parts)
    by_round: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        by_round.setdefault((entry.attempt, entry.round), []).append(entry)
    chosen, left_out = _choose_ranks(parts, entries, most_ranks)
    named: dict[str, Row] = {}
    ranks = {rank: Row(f"rank {rank}") for rank in chosen}
    for part in parts:
        nodes = _node_rows(part, named)
        for item in part.attempt.rounds:
            ends = {f.global_rank: part.failure_at(f) for f in item.failures if f.ended_ns}
            there = part.by_round.get(item.index, {})
            for node in (node for node in item.nodes if node.node in there and not ranks.keys().isdisjoint(node.ranks)):
                for rank in ranks.keys() & node.ranks:
                    spans = part.rank_spans(there[node.node], ends.get(rank))
                    ranks[rank].add(part.attempt.number, spans, part.name(node.node))
            for entry in by_round.get((part.attempt.number, item.index), ()):
                _mark(part, item, entry, nodes, ranks)
    for row in (*named.values(), *ranks.values()):
        row.marks.sort(key=lambda mark: (mark.at_ns, IMPORTANCE[mark.entry.kind]))
    return Timeline(nodes=tuple(named.values()), ranks=tuple(ranks.values()), ranks_left_out=left_out, entries=entries)


def _entries(attempts: Iterable[AttemptHistory]) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for attempt, item in ((one, item) for one in attempts for item in one.rounds):
        verdict = verdict_of(item)
        add = partial(Entry, attempt=attempt.number, round=item.index)
        for loss in (*item.lost_nodes, *item.own_failures):
            kind = MarkKind.CAUSE if loss is verdict.lost_node else MarkKind.LOST
            found.append(add(number=len(found), kind=kind, headline=loss.summary, first_ns=loss.gone_ns, loss=loss))
        for fold in fold_failures(item.failures, item.clocks):
            is_cause = verdict.failure is not None and any(one is verdict.failure for one in fold.members)
            kind = MarkKind.CAUSE if is_cause else MarkKind(FAILURE_WORDS[fold.first.failure_class])
            when = fold.first.ended_ns
            found.append(add(number=len(found), kind=kind, headline=fold.headline, first_ns=when, fold=fold))
    return tuple(found)


def _node_rows(part: PlacedAttempt, named: dict[str, Row]) -> dict[int, Row]:
    """Node → its row, with its spans in this attempt. Two nodes of an attempt never share one."""
    ranks = {node.node: node.ranks for item in part.attempt.rounds for node in item.nodes}
    rows: dict[int, Row] = {}
    used: set[str] = set()
    for node in sorted({*range(len(part.attempt.nodes)), *part.stays, *part.agent_starts}):
        if node < 0:
            continue
        name = part.name(node)
        name = f"{name} (node {node})" if name in used else name
        used.add(name)
        rows[node] = named.setdefault(name, Row(name))
        rows[node].add(part.attempt.number, part.node_spans(node), ranks_text(ranks[node]) if ranks.get(node) else "")
    return rows


def _mark(
    part: PlacedAttempt, item: RoundHistory, entry: Entry, nodes: Mapping[int, Row], ranks: Mapping[int, Row]
) -> None:
    if entry.loss is not None:
        at = min(max(part.loss_at(entry.loss), part.start_ns), part.end_ns)
        there = [rank for node in item.nodes if node.node == entry.loss.node for rank in node.ranks]
        for row in (nodes.get(entry.loss.node), *map(ranks.get, there)):
            if row is not None:
                row.marks.append(Mark(entry, at))
    hit: dict[int, list[tuple[int, int]]] = {}
    for failure in entry.members:
        at, rank = part.failure_at(failure), failure.global_rank
        hit.setdefault(failure.node, []).append((at, rank))
        if rank in ranks:
            ranks[rank].marks.append(Mark(entry, at, (rank,)))
    for node, members in hit.items():
        if node in nodes:
            nodes[node].marks.append(Mark(entry, min(members)[0], tuple(rank for _, rank in members)))


def _choose_ranks(parts: Sequence[PlacedAttempt], entries: Sequence[Entry], most: int) -> tuple[tuple[int, ...], int]:
    nodes = {node.ranks for part in parts for item in part.attempt.rounds for node in item.nodes}
    failed = {failure.global_rank for entry in entries for failure in entry.members}
    everybody = {rank for rank in failed.union(*nodes) if rank >= 0}
    if len(everybody) <= most:
        return tuple(sorted(everybody)), 0
    first: dict[int, int] = {}
    for entry in sorted(entries, key=lambda one: -IMPORTANCE[one.kind]):
        first |= dict.fromkeys((failure.global_rank for failure in entry.members), IMPORTANCE[entry.kind])
    order_of_all = sorted(everybody, key=lambda rank: (first.get(rank, len(IMPORTANCE)), rank))
    return tuple(sorted(order_of_all[:most])), len(everybody) - most
