"""The chart: rows of bars with marks over one axis. Each row also says in words what its picture shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, field

from hpc_elastic.base.text import duration as _duration
from hpc_elastic.base.text import fit, plural, ranks_text, time_text
from hpc_elastic.report.timeline import IMPORTANCE, Axis, Mark, MarkKind, Row, Timeline, make_axis
from hpc_elastic.report.timeline_attempt import NodeState, PlacedAttempt, RoundTimes, Span
from hpc_elastic.slurm.notation import names_text

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
