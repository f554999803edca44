"""The chart of a run: rows of spans with marks over one axis of time, as values and as drawn on the page.

Each row also says in words what its picture shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.text import duration as _duration
from hpc_elastic.base.text import fit, plural, ranks_text, time_text
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.blocks import Fold, fold_failures
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.timeline_attempt import Axis, NodeState, PlacedAttempt, RoundTimes, Span, make_axis
from hpc_elastic.report.wording import FAILURE_WORDS
from hpc_elastic.slurm.job_environment import names_text


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


ROWS = 1024
PICTURE_BYTES = 1_100_000
BUTTONS = 300
"""Marks of one kind of rows that can be pressed; the others are drawn."""
ZOOMS = (1, 4, 16, 64)
_TICKS = (1, 4, 16)
"""Zooms that have their own; larger ones show the last one's."""
# Each state is a line of its own height and width, or several: they differ without their colours, and a picture
# that is stretched sideways keeps them.
_LINES: Mapping[NodeState, tuple[str, tuple[int, ...]]] = {
    NodeState.RUNNING: ("s-r", (8,)),
    NodeState.UP: ("s-r", (8,)),
    NodeState.STARTING: ("s-s", (11,)),
    NodeState.STOPPING: ("s-e", (5,)),
    NodeState.RENDEZVOUS: ("s-v", (8,)),
    NodeState.LAUNCHING: ("s-l", (8,)),
    NodeState.SPARE: ("s-w", (5, 11)),
    NodeState.DONE: ("s-d", (13,)),
    NodeState.LOST: ("s-x", (3, 8, 13)),
}
_WORKING = (NodeState.RUNNING, NodeState.UP)


duration = partial(_duration, fine=True)
ranks = partial(ranks_text, limit=60)


def clock_time(when_ns: int | None, *, fine: bool = False) -> str:
    return time_text(when_ns, fine=fine, separator=" ") if when_ns else "?"


def time_of_day(when_ns: int | None, *, fine: bool = False) -> str:
    return time_text(when_ns, date=False, fine=fine) if when_ns else "?"


def names(hosts: Sequence[str], *, limit: int = 60) -> str:
    return fit(names_text(dict.fromkeys(hosts)), limit)


class _Drawing(Struct):
    axis: Axis
    grid: int
    shown: frozenset[int]
    room: int
    left_out: list[str] = field(default_factory=list)
    pictures: dict[str, int] = field(default_factory=dict)
    known: dict[tuple[tuple[Any, ...], ...], int] = field(default_factory=dict)

    def view(self, name: str, what: str, rows: Sequence[Row], total: int) -> dict[str, Any]:
        kept = rows[:ROWS]
        marks = [
            (IMPORTANCE[mark.entry.kind], mark.at_ns, number, mark.entry.number)
            for number, row in enumerate(kept)
            for mark in row.marks
            if mark.entry.number in self.shown
        ]
        pressed = {(number, entry, at) for _, at, number, entry in sorted(marks)[:BUTTONS]}
        drawn, missing, unpressed = [], len(rows) - len(kept), 0
        for number, row in enumerate(kept):
            buttons = [mark for mark in row.marks if (number, mark.entry.number, mark.at_ns) in pressed]
            others = [mark for mark in row.marks if (number, mark.entry.number, mark.at_ns) not in pressed]
            unpressed += len(others)
            picture = self._picture(row.spans, others)
            if picture is None:
                missing += 1
            else:
                drawn.append((row, picture, [self._button(row, mark) for mark in buttons]))
        if missing:
            self.left_out.append(f"{missing} of {len(rows)} {what} are not drawn: the page would grow too large")
        if unpressed:
            self.left_out.append(
                f"{unpressed} marks in the rows of {what} are drawn as thin lines: the table of failures has them all"
            )
        return {"name": name, "label": f"{what} ({total})", "what": what, "rows": drawn, "is_many": len(rows) > 40}

    def _button(self, row: Row, mark: Mark) -> tuple[Mark, str, str]:
        whose = f" on {ranks(mark.ranks, limit=30)}" if mark.ranks and not row.name.startswith("rank ") else ""
        headline = fit(mark.entry.headline, 90)
        words = f"{mark.entry.kind.value}{whose} at {time_of_day(mark.at_ns)}: {headline}"
        return mark, f"{100 * self.axis.place(mark.at_ns):.2f}", words

    def _picture(self, spans: Sequence[Span], drawn: Sequence[Mark]) -> int | None:
        """The number of a row's picture; None where there is no room for another one."""
        states = tuple([span.state for span in spans])
        starts, ends = [span.start_ns for span in spans], [span.end_ns for span in spans]
        left = self.axis.cells(starts, self.grid)
        if starts[1:] == ends[:-1]:
            right = left[1:] + self.axis.cells(ends[-1:], self.grid)
        else:
            right = self.axis.cells(ends, self.grid)
        marks = tuple(sorted({round(self.axis.place(mark.at_ns) * self.grid) for mark in drawn}))
        key = (states, tuple(left), tuple(right), marks)
        if (number := self.known.get(key)) is not None:
            return number
        source = self._paths(*key)
        if source not in self.pictures:
            self.room -= len(source) + 40
            if self.room < 0:
                return None
            self.pictures[source] = len(self.pictures)
        return self.known.setdefault(key, self.pictures[source])

    def _paths(
        self, states: Sequence[NodeState], lefts: Sequence[int], rights: Sequence[int], marks: Sequence[int]
    ) -> str:
        least = max(1, self.grid // 450)
        runs: dict[NodeState, list[list[int]]] = {}
        gaps: list[list[int]] = []
        for state, left, right in zip(states, lefts, rights, strict=True):
            mine = runs.setdefault(state, [])
            if state in _WORKING:
                if mine and gaps:  # so short a stop that only a break in the bar can show it
                    gaps[-1][1] = max(gaps[-1][1], gaps[-1][0] + least)
            elif gaps and gaps[-1][1] >= left:
                gaps[-1][1] = max(gaps[-1][1], right)
            else:
                gaps.append([left, right])
            if right > left:
                if mine and mine[-1][1] >= left and state not in _WORKING:
                    mine[-1][1] = right
                else:
                    mine.append([left, right])
        parts = []
        for one in (*_WORKING, None, *(other for other in _LINES if other not in _WORKING)):
            if one is None:
                parts.append(_path("s-g", (8,), gaps if any(runs.get(one) for one in _WORKING) else []))
            elif one in runs:
                parts.append(_path(*_LINES[one], runs[one]))
        parts.append(_path("s-m", (8,), [[at, at + least] for at in marks]))
        return "".join(parts)


def _path(name: str, heights: Sequence[int], runs: Sequence[Sequence[int]]) -> str:
    if not runs:
        return ""
    lines = "".join(f"M{left} {height}h{max(1, right - left)}" for height in heights for left, right in runs)
    return f'<path class="{name}" d="{lines}"/>'


def draw_chart(parts: Sequence[PlacedAttempt], timeline: Timeline, *, shown: frozenset[int]) -> dict[str, Any]:
    axis = make_axis([(part.attempt.number, part.start_ns, part.end_ns) for part in parts])
    every = (*timeline.nodes, *timeline.ranks)
    spans = sum(len(row.spans) for row in every)
    grid = 20_000 if spans < 5_000 else 4_000 if spans < 40_000 else 1_000
    drawing = _Drawing(axis, grid, shown, PICTURE_BYTES)
    groups = _alike(timeline.nodes)
    views = []
    if len(groups) < len(timeline.nodes):
        views.append(drawing.view("alike", "nodes that went alike", groups, len(groups)))
    views.append(drawing.view("nodes", "nodes", timeline.nodes, len(timeline.nodes)))
    left_out, total = [], len(timeline.ranks) + timeline.ranks_left_out
    if total:
        views.append(drawing.view("ranks", "ranks", timeline.ranks, total))
    if timeline.ranks_left_out:
        left_out.append(
            f"{timeline.ranks_left_out} of {total} ranks have no row of their own: those that failed come first"
        )
    used = {span.state for row in every for span in row.spans}
    kinds = {mark.entry.kind for row in every for mark in row.marks}
    rounds = [times for part in parts for times in part.rounds if times.part.index in part.extents]
    return {
        "grid": grid,
        "pictures": list(drawing.pictures),
        "views": views,
        "chosen": "nodes" if len(groups) == len(timeline.nodes) or len(timeline.nodes) <= 16 else "alike",
        "corner": clock_time(parts[0].start_ns)[:10] if parts else "",
        "labels": [*_labels(axis, rounds)],
        "lines": _lines(axis, rounds),
        "states": [(_path(*line, [[0, 36]]), state.value) for state, line in _LINES.items() if state in used],
        "kinds": [kind for kind in MarkKind if kind in kinds],
        "left_out": [*left_out, *drawing.left_out],
    }


def _alike(rows: Sequence[Row]) -> tuple[Row, ...]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        # Nodes are alike whether they noticed another one's failure or were stopped before.
        marks = {m.entry.number for m in row.marks if m.entry.kind not in (MarkKind.SYMPTOM, MarkKind.STOPPED)}
        states = [(span.state, span.round) for span in row.spans]
        groups.setdefault((*row.parts, *states, *sorted(marks)), []).append(row)
    return tuple(members[0] if len(members) == 1 else _merged(members) for members in groups.values())


def _merged(rows: Sequence[Row]) -> Row:
    merged: dict[int, Mark] = {}
    for mark in (mark for row in rows for mark in row.marks):
        before = merged.get(mark.entry.number, mark._replace(ranks=()))
        merged[mark.entry.number] = Mark(mark.entry, min(mark.at_ns, before.at_ns), (*before.ranks, *mark.ranks))
    marks = sorted(merged.values(), key=lambda mark: mark.at_ns)
    hosts = names([row.name for row in rows], limit=200)
    return Row(plural(len(rows), "node"), rows[0].spans, marks, details={hosts: None})


def describe_spans(row: Row) -> str:
    sums = dict.fromkeys(NodeState, 0)
    for span in row.spans:
        sums[span.state] += span.end_ns - span.start_ns
    spans = [f"{state.value} {duration(time / 1e9)}" for state, time in sums.items() if time]
    return f"{fit(row.name, 40)}: {', '.join(spans) or 'nothing is known'}"


def _labels(axis: Axis, rounds: Sequence[RoundTimes]) -> Iterator[tuple[str, str, str, str, str]]:
    """An attempt (``b``), a round (``em``) or a time on the axis: tag, text, place, title, class."""
    waited = ""
    for piece in axis.pieces:
        if piece.attempt is None:
            waited = f" ({duration((piece.end_ns - piece.start_ns) / 1e9)} later)"
            continue
        text = f"attempt {piece.attempt}{waited if piece.right - piece.left > 0.15 else ''}"
        yield "b", text, f"{100 * piece.left:.2f}", f"from {clock_time(piece.start_ns)}", ""
        waited = ""
    free = -1.0
    for times in rounds:
        place = axis.place(times.start_ns)
        if place >= free and place < 0.985:
            name = f"round {times.part.index}"
            title = f"{name} of attempt {times.attempt}: {fit(times.part.reason, 120)}"
            yield "em", name, f"{100 * place:.2f}", title, ""
            free = place + 0.08
    for factor in _TICKS:
        for when in axis.ticks(spacing=0.1 / factor):
            place = axis.place(when)
            look = f"t{factor}{' first' if place * factor < 0.02 else ''}"
            yield "time", time_of_day(when), f"{100 * place:.3f}", "", look


def _lines(axis: Axis, rounds: Sequence[RoundTimes]) -> list[tuple[str, str]]:
    lines = []
    for piece in axis.pieces:
        width = f";width:{100 * (piece.right - piece.left):.2f}%" if piece.attempt is None else ""
        lines.append(("q" if width else "a", f"left:{100 * piece.left:.2f}%{width}"))
    free = -1.0
    for place in (axis.place(times.start_ns) for times in rounds):
        if place >= free:  # of a hundred rounds the gaps between the bars are enough
            lines.append(("", f"left:{100 * place:.2f}%"))
            free = place + 0.02
    return lines
