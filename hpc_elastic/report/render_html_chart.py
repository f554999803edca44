"""The chart: rows of bars with marks over one axis. Each row also says in words what its picture shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from hpc_elastic.base.text import plural
from hpc_elastic.report.render_html_markup import (
    Markup,
    clock_time,
    duration,
    element,
    join,
    names,
    ranks,
    shorten,
    time_of_day,
)
from hpc_elastic.report.timeline import IMPORTANCE, Axis, Entry, Mark, MarkKind, Row, Timeline
from hpc_elastic.report.timeline_attempt import Span, State

MANY = 40
"""Rows are lower where there are more."""
ZOOMS = (1, 4, 16, 64)
_TICKS = (1, 4, 16)
"""Zooms that have their own; larger ones show the last one's."""
_TICK_SPACING = 0.1
_LINE_SPACING = 0.02
# Each state is a line of its own height and width, or several: they differ without their colours, and a picture
# that is stretched sideways keeps them.
_LINES: Mapping[State, tuple[str, tuple[int, ...]]] = {
    State.RUNNING: ("s-r", (8,)),
    State.UP: ("s-r", (8,)),
    State.STARTING: ("s-s", (11,)),
    State.STOPPING: ("s-e", (5,)),
    State.RENDEZVOUS: ("s-v", (8,)),
    State.LAUNCHING: ("s-l", (8,)),
    State.SPARE: ("s-w", (5, 11)),
    State.DONE: ("s-d", (13,)),
    State.LOST: ("s-x", (3, 8, 13)),
}
_HEIGHT = 16
_WORKING = (State.RUNNING, State.UP)
_OTHERS_FAULT = (MarkKind.SYMPTOM, MarkKind.STOPPED)
"""Nodes are alike whether they noticed another one's failure or were stopped before."""


class ChartLimits(Struct, frozen=True, kw_only=True):
    """What a page may hold."""

    rows: int = 1024
    """Of each kind."""
    picture_bytes: int = 1_100_000
    buttons: int = 300
    """Marks of one kind of rows that can be pressed; the others are drawn."""


class Chart(Struct, frozen=True, kw_only=True):
    """The chart's HTML, and what is not in it."""

    html: Markup
    left_out: tuple[str, ...]


class _Pictures(Struct):
    """Bars, each kind of row drawn once however many look the same."""

    axis: Axis
    grid: int
    room: int
    _known: dict[str, int] = field(default_factory=dict)

    def use(self, spans: Iterable[Span], drawn: Iterable[Mark]) -> int | None:
        """The number of a row's picture; None where there is no room for another one."""
        source = self._paths(spans, drawn)
        number = self._known.get(source)
        if number is None:
            self.room -= len(source) + 40
            if self.room < 0:
                return None
            number = self._known[source] = len(self._known)
        return number

    def definitions(self) -> Markup:
        """To be put once into the page."""
        groups = (element("g", Markup(source), id=f"p{number}") for source, number in self._known.items())
        return element("svg", element("defs", *groups), width="0", height="0", aria_hidden="true", class_="vh")

    def _paths(self, spans: Iterable[Span], drawn: Iterable[Mark]) -> str:
        grid, least = self.grid, max(1, self.grid // 450)
        runs: dict[State, list[list[int]]] = {}
        gaps: list[list[int]] = []
        place, at_ns, at = self.axis.place, -1, 0
        for span in spans:
            left = at if span.start_ns == at_ns else round(place(span.start_ns) * grid)  # most follow upon each other
            at_ns = span.end_ns
            right = at = round(place(at_ns) * grid)
            mine = runs.setdefault(span.state, [])
            if span.state in _WORKING:
                if mine and gaps:  # so short a stop that only a break in the bar can show it
                    gaps[-1][1] = max(gaps[-1][1], gaps[-1][0] + least)
            elif gaps and gaps[-1][1] >= left:
                gaps[-1][1] = max(gaps[-1][1], right)
            else:
                gaps.append([left, right])
            if right > left:
                if mine and mine[-1][1] >= left and span.state not in _WORKING:
                    mine[-1][1] = right
                else:
                    mine.append([left, right])
        parts = []
        for state in (*_WORKING, None, *(other for other in _LINES if other not in _WORKING)):
            if state is None:
                parts.append(_path("s-g", (8,), gaps if any(runs.get(one) for one in _WORKING) else []))
            elif state in runs:
                name, heights = _LINES[state]
                parts.append(_path(name, heights, runs[state]))
        marks = sorted({round(self.axis.place(mark.at_ns) * grid) for mark in drawn})
        parts.append(_path("s-m", (8,), [[at, at + least] for at in marks]))
        return "".join(parts)


def _path(name: str, heights: Sequence[int], runs: Sequence[Sequence[int]]) -> str:
    if not runs:
        return ""
    lines = "".join(f"M{left} {height}h{max(1, right - left)}" for height in heights for left, right in runs)
    return str(element("path", class_=name, d=lines))


def draw_chart(timeline: Timeline, axis: Axis, *, shown: frozenset[int], limits: ChartLimits | None = None) -> Chart:
    """Draw a run.

    Args:
        timeline: The run's picture.
        axis: Its time.
        shown: Numbers of the entries that have a place in the page, to which marks lead.
        limits: The page's.
    """
    limits = limits or ChartLimits()
    spans = sum(len(row.spans) for row in (*timeline.nodes, *timeline.ranks))
    pictures = _Pictures(axis, 20_000 if spans < 5_000 else 4_000 if spans < 40_000 else 1_000, limits.picture_bytes)
    left_out: list[str] = []
    groups = _alike(timeline.nodes)
    views: list[tuple[str, str, Markup]] = []
    draw = _View(pictures, timeline.entries, shown, limits)
    if len(groups) < len(timeline.nodes):
        views.append(("alike", f"nodes that went alike ({len(groups)})", draw.rows(groups, "nodes that went alike")))
    views.append(("nodes", f"nodes ({len(timeline.nodes)})", draw.rows(timeline.nodes, "nodes")))
    total = len(timeline.ranks) + timeline.ranks_left_out
    if total:
        views.append(("ranks", f"ranks ({total})", draw.rows(timeline.ranks, "ranks")))
        if timeline.ranks_left_out:
            left_out.append(
                f"{timeline.ranks_left_out} of {total} ranks have no row of their own: those that failed come first"
            )
    left_out += draw.left_out
    chosen = "nodes" if len(groups) == len(timeline.nodes) or len(timeline.nodes) <= 16 else "alike"
    head = join(_axis_row(axis, timeline), _lines(axis, timeline))
    inputs, labels = _choices(views, chosen)
    body = element(
        "div",
        element("div", head, *(view for _, _, view in views), class_="chart"),
        class_="chartscroll",
        tabindex="0",
        role="region",
        aria_label="Timeline",
    )
    html = join(
        pictures.definitions(),
        element("div", *inputs, labels, body, class_="chartbox"),
        _legend(timeline),
    )
    return Chart(html=html, left_out=tuple(left_out))


def _alike(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows that went through the same, as one: the picture is the first one's."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        marks = tuple(sorted({mark.entry for mark in row.marks if mark.kind not in _OTHERS_FAULT}))
        groups.setdefault((row.key, marks), []).append(row)
    found = []
    for members in groups.values():
        first = members[0]
        if len(members) == 1:
            found.append(first)
            continue
        merged: dict[int, Mark] = {}
        for mark in (mark for row in members for mark in row.marks):
            before = merged.get(mark.entry)
            hit = (*(before.ranks if before else ()), *mark.ranks)
            at = min(mark.at_ns, before.at_ns) if before else mark.at_ns
            merged[mark.entry] = Mark(entry=mark.entry, kind=mark.kind, at_ns=at, ranks=hit)
        found.append(
            Row(
                name=plural(len(members), "node"),
                detail=names([row.name for row in members], limit=200),
                spans=first.spans,
                marks=tuple(sorted(merged.values(), key=lambda mark: mark.at_ns)),
                key=first.key,
            )
        )
    return tuple(found)


class _View(Struct):
    pictures: _Pictures
    entries: Sequence[Entry]
    shown: frozenset[int]
    limits: ChartLimits
    left_out: list[str] = field(default_factory=list)

    def rows(self, rows: Sequence[Row], what: str) -> Markup:
        """All rows of a kind, as far as there is room."""
        kept = rows[: self.limits.rows]
        pressed = self._pressed(kept)
        drawn, missing, unpressed = [], len(rows) - len(kept), 0
        for number, row in enumerate(kept):
            buttons = [mark for mark in row.marks if (number, mark.entry, mark.at_ns) in pressed]
            others = [mark for mark in row.marks if (number, mark.entry, mark.at_ns) not in pressed]
            unpressed += len(others)
            picture = self.pictures.use(row.spans, others)
            if picture is None:
                missing += 1
            else:
                drawn.append(self._row(row, picture, buttons))
        if missing:
            self.left_out.append(f"{missing} of {len(rows)} {what} are not drawn: the page would grow too large")
        if unpressed:
            self.left_out.append(
                f"{unpressed} marks in the rows of {what} are drawn as thin lines: the table of failures has them all"
            )
        return element(
            "ol",
            *drawn,
            class_=f"rows view v-{'alike' if 'alike' in what else what}{' many' if len(rows) > MANY else ''}",
            aria_label=f"Timeline by {what}",
        )

    def _pressed(self, rows: Sequence[Row]) -> set[tuple[int, int, int]]:
        marks = [
            (IMPORTANCE[mark.kind], mark.at_ns, number, mark.entry)
            for number, row in enumerate(rows)
            for mark in row.marks
            if mark.entry in self.shown
        ]
        return {(number, entry, at) for _, at, number, entry in sorted(marks)[: self.limits.buttons]}

    def _row(self, row: Row, picture: int, buttons: Sequence[Mark]) -> Markup:
        label = element("span", element("b", row.name), element("small", row.detail), class_="name", title=_title(row))
        bars = element(
            "svg",
            element("title", _words(row)),
            element("use", href=f"#p{picture}"),
            viewBox=f"0 0 {self.pictures.grid} {_HEIGHT}",
            preserveAspectRatio="none",
            role="img",
        )
        pressed = (self._button(row, mark) for mark in buttons)
        return element("li", label, element("span", bars, *pressed, class_="at"), class_="row")

    def _button(self, row: Row, mark: Mark) -> Markup:
        entry = self.entries[mark.entry]
        whose = f" on {ranks(mark.ranks, limit=30)}" if mark.ranks and not row.name.startswith("rank ") else ""
        words = f"{mark.kind.value}{whose} at {time_of_day(mark.at_ns)}: {shorten(entry.headline, 90)}"
        return element(
            "button",
            type="button",
            class_=f"m {mark.kind.name.lower()}",
            style=f"left:{100 * self.pictures.axis.place(mark.at_ns):.2f}%",
            popovertarget=f"e{mark.entry}",
            aria_label=f"{shorten(row.name, 40)}: {words}",
            title=words,
        )


def _title(row: Row) -> str:
    return f"{row.name}: {row.detail}" if row.detail else row.name


def _words(row: Row) -> str:
    """What a row's bars show."""
    sums: dict[State, int] = {}
    for span in row.spans:
        sums[span.state] = sums.get(span.state, 0) + span.end_ns - span.start_ns
    spans = [f"{state.value} {duration(sums[state] / 1e9)}" for state in State if sums.get(state)]
    return f"{shorten(row.name, 40)}: {', '.join(spans) or 'nothing is known'}"


def _axis_row(axis: Axis, timeline: Timeline) -> Markup:
    words: list[Markup] = []
    waited = ""
    for piece in axis.pieces:
        if piece.attempt is None:
            waited = f" ({duration((piece.end_ns - piece.start_ns) / 1e9)} later)"
            continue
        since = f"from {clock_time(piece.start_ns)}"
        name = f"attempt {piece.attempt}{waited if piece.right - piece.left > 0.15 else ''}"
        words.append(element("b", name, style=f"left:{100 * piece.left:.2f}%", title=since))
        waited = ""
    free = -1.0
    for divider in timeline.dividers:
        place = axis.place(divider.at_ns)
        if place >= free and place < 0.985:
            title = f"round {divider.round} of attempt {divider.attempt}: {shorten(divider.reason, 120)}"
            name = f"round {divider.round}"
            words.append(element("em", name, style=f"left:{100 * place:.2f}%", title=title))
            free = place + 0.08
    for factor in _TICKS:
        for when in axis.ticks(spacing=_TICK_SPACING / factor):
            place = axis.place(when)
            edge = " first" if place * factor < 0.02 else ""
            at = f"left:{100 * place:.3f}%"
            words.append(element("time", time_of_day(when), style=at, class_=f"t{factor}{edge}"))
    corner = element("span", clock_time(timeline.attempts[0].start_ns)[:10] if timeline.attempts else "")
    return element("div", corner, element("span", *words, class_="at"), class_="axis", aria_hidden="true")


def _lines(axis: Axis, timeline: Timeline) -> Markup:
    lines: list[Markup] = []
    for piece in axis.pieces:
        at = f"left:{100 * piece.left:.2f}%"
        if piece.attempt is None:
            width = 100 * (piece.right - piece.left)
            lines.append(element("i", class_="q", style=f"{at};width:{width:.2f}%"))
        else:
            lines.append(element("i", class_="a", style=at))
    free = -1.0
    for place in (axis.place(divider.at_ns) for divider in timeline.dividers):
        if place >= free:  # of a hundred rounds the gaps between the bars are enough
            lines.append(element("i", style=f"left:{100 * place:.2f}%"))
            free = place + _LINE_SPACING
    return element("div", *lines, class_="lines", aria_hidden="true")


def _choices(views: Sequence[tuple[str, str, Markup]], chosen: str) -> tuple[list[Markup], Markup]:
    """Radio buttons, which style alone acts upon: the page has no script."""
    inputs: list[Markup] = []
    groups: list[Markup] = []
    rows: list[Markup] = []
    for name, words, _ in views:
        inputs.append(element("input", type="radio", name="rows", id=f"v-{name}", checked=name == chosen))
        rows.append(element("label", words, for_=f"v-{name}"))
    groups.append(element("span", "Rows: ", *rows))
    zooms: list[Markup] = []
    for factor in ZOOMS:
        inputs.append(element("input", type="radio", name="zoom", id=f"z{factor}", checked=factor == 1))
        zooms.append(element("label", f"{factor}\u00d7", for_=f"z{factor}"))
    groups.append(element("span", "Zoom: ", *zooms))
    return inputs, element("div", *groups, class_="choices")


def choice_rules() -> str:
    """The style by which the radio buttons work."""
    rules = []
    for name in ("alike", "nodes", "ranks"):
        rules.append(f"#v-{name}:checked~.chartscroll .v-{name}{{display:block}}")
        rules.append(_label_rule(f"v-{name}"))
    for factor in ZOOMS:
        rules.append(f"#z{factor}:checked~.chartscroll{{--zoom:{factor}}}")
        ticks = max(own for own in _TICKS if own <= factor)
        rules.append(f"#z{factor}:checked~.chartscroll .t{ticks}{{display:block}}")
        rules.append(_label_rule(f"z{factor}"))
    return "\n".join(rules)


def _label_rule(name: str) -> str:
    label = f"~.choices label[for={name}]"
    return (
        f"#{name}:checked{label}{{background:var(--link);color:var(--card);border-color:var(--link)}}\n"
        f"#{name}:focus-visible{label}{{outline:3px solid var(--link);outline-offset:2px}}"
    )


def _legend(timeline: Timeline) -> Markup:
    used = {span.state for row in (*timeline.nodes, *timeline.ranks) for span in row.spans}
    items = []
    for state, (name, heights) in _LINES.items():
        if state in used:
            lines = Markup(_path(name, heights, [[0, 36]]))
            sample = element("svg", lines, viewBox=f"0 0 36 {_HEIGHT}", aria_hidden="true")
            items.append(element("li", sample, state.value))
    kinds = {mark.kind for row in (*timeline.nodes, *timeline.ranks) for mark in row.marks}
    for kind in MarkKind:
        if kind in kinds:
            shape = element("span", class_=f"m {kind.name.lower()}", aria_hidden="true")
            items.append(element("li", shape, kind.value))
    return element("ul", *items, class_="legend", aria_label="Legend")
