"""The page's part on bad nodes.

The page's part on goodput: how much of the time was training, and what each interruption cost.

report.html: the run to look at, in one file. It needs no network and no script, and what it quotes can't act in it.

The style sheet's hash stands in the page's content security policy, which allows nothing else: no script, no address.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode

from hpc_elastic.report.clocks import NOTABLE_NS, milliseconds_text
from hpc_elastic.report.goodput import Goodput, measure_goodput
from hpc_elastic.report.history import RunHistory
from hpc_elastic.report.render_html_chart import ChartLimits, choice_rules, draw_chart
from hpc_elastic.report.render_html_markup import Markup, duration, element, shorten, stylesheet, table_head, zone
from hpc_elastic.report.render_html_parts import (
    TextRoom,
    entry_parts,
    failures_part,
    head_part,
    notes_part,
    rounds_part,
    stacks_part,
    verdict_part,
)
from hpc_elastic.report.subject import Subject, choose_subject
from hpc_elastic.report.timeline import IMPORTANCE, Entry, Timeline, build_timeline, make_axis

MOST = 50


def bad_nodes_part(history: RunHistory) -> Markup:
    """Who they are, why, and whether the next attempt does without them."""
    if not history.bad_nodes:
        return Markup("")
    rows = [
        element(
            "tr",
            element("td", shorten(score.node, 80)),
            element("td", f"{score.score:g}", class_="n"),
            element("td", "left out" if score.node in history.excluded else "stays", class_="w"),
            element("td", shorten(score.why, 300), class_="wide"),
        )
        for score in history.bad_nodes[:MOST]
    ]
    more = len(history.bad_nodes) - len(rows)
    return element(
        "section",
        element("h2", "Bad nodes"),
        element(
            "div",
            element("table", table_head("node", "score", "later attempts", "why", numbers=("score",)), *rows),
            class_="scroll",
        ),
        element("p", f"{more} more are in report.json.", class_="muted") if more > 0 else "",
        class_="card",
        aria_label="Bad nodes",
    )


COSTS = 12


def goodput_part(goodput: Goodput) -> Markup:
    """How much of the time was training, and where the rest went."""
    share = goodput.share
    if share is None:
        return Markup("")
    parts = [
        ("training", "all workers ran", goodput.training),
        ("starting", "until they first ran", goodput.starting),
        ("interrupted", "after failures, until all ran again", goodput.interrupted),
        ("queued", "between attempts", goodput.queued),
        ("ending", "ending", goodput.ending),
    ]
    parts = [part for part in parts if part[2] > 0]
    bar = [element("i", class_=f"f-{key}", style=f"width:{100 * s / goodput.wall:.2f}%") for key, _, s in parts]
    told = [
        element("li", element("i", class_=f"f-{key}"), f"{words}: {duration(s)} ({100 * s / goodput.wall:.1f} %)")
        for key, words, s in parts
    ]
    costs = sorted(goodput.costs, key=lambda cost: -cost.seconds)
    rows = [
        element(
            "tr",
            element("td", _lasted(cost.seconds, cost.queued, cost.recovered), class_="n"),
            element("td", f"attempt {cost.attempt}, round {cost.round}", class_="w"),
            element("td", shorten(cost.what, 300), class_="wide"),
        )
        for cost in costs[:COSTS]
    ]
    table: str = ""
    if rows:
        title = "What each interruption cost"
        if len(costs) > len(rows):
            title += f" (the {len(rows)} dearest of {len(costs)})"
        head = table_head("cost", "where", "what", numbers=("cost",))
        table = element(
            "details",
            element("summary", title),
            element("div", element("table", head, *rows), class_="scroll"),
            open=len(costs) <= COSTS,
        )
    return element(
        "section",
        element("h2", "Goodput"),
        element(
            "div",
            element("div", f"{100 * share:.1f} %", class_="number"),
            element("div", *bar, class_="share", aria_hidden="true"),
            element("ul", *told, class_="parts"),
            class_="goodput",
        ),
        element(
            "p",
            f"of {duration(goodput.wall)} of wall time all workers of the round were running. "
            "Steps that were computed again after a restart are not taken off.",
            class_="muted",
        ),
        table,
        class_="card",
        aria_label="Goodput",
    )


def _lasted(seconds: float, queued: float, recovered: bool) -> str:
    more = [f"{duration(queued)} in the queue"] if queued > 0.05 else []
    more += [] if recovered else ["to the end"]
    return duration(seconds) + (f" ({', '.join(more)})" if more else "")


ENTRIES = 250
"""Failures, folded, of which the page tells everything."""
_RANK_ROUNDS = 30_000
"""Of ranks' parts in rounds so many are drawn: beyond, only ranks that failed have rows of their own."""
CHEAP_NODE_ROUNDS = 20_000
"""Nodes' parts in rounds of a run whose page is made within about a second."""


def is_cheap(history: RunHistory) -> bool:
    """Whether the page can be made by the way, at the end of an attempt."""
    return sum(len(item.nodes) for part in history.attempts for item in part.rounds) <= CHEAP_NODE_ROUNDS


def render_html(history: RunHistory, *, attempt: int | None = None, limits: ChartLimits | None = None) -> str:
    """Render the page.

    Args:
        history: The run.
        attempt: The attempt that the verdict is about; None: the last one in which something failed. The timeline is
            the whole run's.
        limits: How much of the chart a page may hold.

    Returns:
        HTML without a character that UTF-8 can't write.
    """
    subject = choose_subject(history, attempt=attempt)
    shown = next((part for part in history.attempts if part.number == attempt), None)
    if attempt is None and history.attempts:
        shown = history.attempts[-1]
    limits = limits or ChartLimits()
    rounds = sum(len(part.rounds) for part in history.attempts)
    timeline = build_timeline(history, most_ranks=min(limits.rows, max(64, _RANK_ROUNDS // max(1, rounds))))
    axis = make_axis([(span.number, span.start_ns, span.end_ns) for span in timeline.attempts])
    goodput = measure_goodput(history, attempts=timeline.attempts, rounds=timeline.rounds)
    told = _told(timeline)
    verdict = _entry_of(subject, timeline)
    chart = draw_chart(timeline, axis, shown=told, limits=limits)
    room = TextRoom()
    windows = entry_parts(timeline.entries, told, room)
    stacks = subject.round if subject.round is not None and subject.round.stacks else None
    first_ns = timeline.attempts[0].start_ns if timeline.attempts else None
    notes = [*_clock_notes(timeline), *_gap_notes(timeline), *chart.left_out]
    if len(told) < len(timeline.entries):
        hidden = len(timeline.entries) - len(told)
        notes.append(f"{hidden} of {len(timeline.entries)} kinds of failures are left out here; report.json has all.")
    if room.refused:
        notes.append(f"{room.refused} tracebacks are left out for the page's size.")
    body = element(
        "main",
        head_part(history, shown, zone=zone(first_ns)),
        verdict_part(history, subject, shown, entry=verdict if verdict in told else None),
        goodput_part(goodput),
        element("section", element("h2", "Timeline"), chart.html, class_="card", aria_label="Timeline of the run"),
        stacks_part(subject.attempt, stacks),
        failures_part(timeline.entries, told),
        rounds_part(history),
        bad_nodes_part(history),
        windows,
        notes_part(notes),
    )
    return _page(f"{history.name} \u00b7 {history.run_id}", body)


def _page(title: str, body: Markup) -> str:
    style = f"{stylesheet()}{choice_rules()}\n"
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # style-src is for browsers that don't know the two others. Places on the axis are style attributes.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"style-src-elem 'sha256-{digest}'; style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _told(timeline: Timeline) -> frozenset[int]:
    """The entries that have their place in the page: what counts first, then the latest."""
    order = sorted(timeline.entries, key=lambda e: (IMPORTANCE[e.kind], -e.attempt, -e.round))
    return frozenset(entry.number for entry in order[:ENTRIES])


def _entry_of(subject: Subject, timeline: Timeline) -> int | None:
    failure, loss = subject.verdict.failure, subject.verdict.lost_node
    for entry in timeline.entries:
        if loss is not None and entry.loss is loss:
            return entry.number
        if failure is not None and _has(entry, failure):
            return entry.number
    return None


def _has(entry: Entry, failure: object) -> bool:
    return entry.fold is not None and any(member is failure for member in entry.fold.members)


def _clock_notes(timeline: Timeline) -> list[str]:
    offsets = timeline.offsets
    measured = [offset for offset in offsets.values() if offset.measured]
    notes = []
    if measured:
        bound = milliseconds_text(max(offset.bound_ns for offset in measured))
        notes.append(
            f"The hosts' clocks were compared by packets. The axis is by {' and '.join(timeline.clock_hosts)}'s clock, "
            f"the others' to within {bound} of it; times in words are by each host's own."
        )
    else:
        notes.append(
            "Times are those of each host's own clock. These were not compared (no packets passed between the agents), "
            "so that marks on different hosts may have come in another order."
        )
    off = {name: offset for name, offset in offsets.items() if abs(offset.offset_ns) > max(NOTABLE_NS, offset.bound_ns)}
    for name, offset in sorted(off.items())[:20]:
        way = "ahead of" if offset.offset_ns > 0 else "behind"
        how = "measured" if offset.measured else "concluded from when it learned of each round"
        notes.append(
            f"The clock of {name} is {duration(abs(offset.offset_ns) / 1e9)} {way} the others' ({how}, to within "
            f"{milliseconds_text(offset.bound_ns)}): its row is shifted by that, and the times in words are not."
        )
    if len(off) > 20:
        notes.append(f"{len(off) - 20} more hosts' rows are shifted in the same way.")
    return notes


def _gap_notes(timeline: Timeline) -> list[str]:
    if len(timeline.attempts) < 2:
        return []
    return ["Attempts are to scale; the waits between them are hatched and cut short, short attempts widened."]
