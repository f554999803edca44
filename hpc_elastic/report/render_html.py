"""report.html: the run to look at, in one file. It needs no network and no script, and what it quotes can't act in it.

A layout of the `document`, with the chart and the parts on failures between its parts. The style sheet's hash stands in
the page's content security policy, which allows nothing else: no script, no address.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_elastic.base.text import milliseconds_text, plural
from hpc_elastic.report.advice import advise
from hpc_elastic.report.clocks import NOTABLE_NS
from hpc_elastic.report.document import Document, build_document, round_entry
from hpc_elastic.report.goodput import (
    Goodput,
    describe_goodput,
    describe_progress,
    is_worth_showing,
    measure_goodput,
)
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.render_html_chart import ChartLimits, choice_rules, draw_chart
from hpc_elastic.report.render_html_failures import (
    TextRoom,
    entry_parts,
    evidence_text,
    failures_part,
    log_links,
    opener,
    stacks_part,
)
from hpc_elastic.report.render_html_markup import (
    Markup,
    card,
    clock_time,
    duration,
    element,
    fact_list,
    page,
    shorten,
    table,
    time_of_day,
    zone,
)
from hpc_elastic.report.subject import Subject
from hpc_elastic.report.timeline import IMPORTANCE, Entry, Timeline, build_timeline, make_axis
from hpc_elastic.report.wording import (
    describe_after_round,
    describe_decision,
    describe_fresh_starts,
    describe_outcome,
    describe_restarts,
    is_requeued,
)

ENTRIES = 250
"""Failures, folded, of which the page has everything."""
ROUNDS = 300
COSTS = 12
BAD_NODES = 50
_RANK_ROUNDS = 30_000
"""Of ranks' parts in rounds so many are drawn: beyond, only ranks that failed have rows of their own."""
CHEAP_NODE_ROUNDS = 20_000
"""Nodes' parts in rounds of a run whose page is made within about a second."""
_SHIFTED_HOSTS = 20


def is_cheap(history: RunHistory) -> bool:
    """Whether the page can be made by the way, at the end of an attempt."""
    return sum(len(item.nodes) for part in history.attempts for item in part.rounds) <= CHEAP_NODE_ROUNDS


def render_html(
    history: RunHistory, *, attempt: int | None = None, limits: ChartLimits | None = None, links: str = ".."
) -> str:
    """Render the page.

    Args:
        history: The run.
        attempt: The attempt that the verdict is about; None: the last one in which something failed. The timeline is
            the whole run's.
        limits: How much of the chart a page may hold.
        links: What leads from the page to the run directory, for the links to the ranks' logs.

    Returns:
        HTML without a character that UTF-8 can't write.
    """
    limits = limits or ChartLimits()
    rounds = sum(len(part.rounds) for part in history.attempts)
    timeline = build_timeline(history, most_ranks=min(limits.rows, max(64, _RANK_ROUNDS // max(1, rounds))))
    axis = make_axis([(span.number, span.start_ns, span.end_ns) for span in timeline.attempts])
    goodput = measure_goodput(history, attempts=timeline.attempts, rounds=timeline.rounds)
    document = build_document(history, attempt=attempt, goodput=goodput, separator=" ")
    subject = document.subject
    # What has its place in the page: the most important first, then the latest.
    order = sorted(timeline.entries, key=lambda e: (IMPORTANCE[e.kind], -e.attempt, -e.round))
    shown = frozenset(entry.number for entry in order[:ENTRIES])
    verdict = _entry_of(subject, timeline)
    chart = draw_chart(timeline, axis, shown=shown, limits=limits)
    room = TextRoom()
    windows = entry_parts(timeline.entries, shown, room, links=links)
    notes = [*_clock_notes(timeline), *_gap_notes(timeline), *chart.left_out]
    if hidden := len(timeline.entries) - len(shown):
        notes.append(f"{hidden} of {len(timeline.entries)} kinds of failures are left out here; report.json has all.")
    if room.refused:
        notes.append(f"{room.refused} tracebacks are left out for the page's size.")
    body = element(
        "main",
        _head(document, zone=zone(timeline.attempts[0].start_ns if timeline.attempts else None)),
        _verdict(document, entry=verdict if verdict in shown else None, links=links),
        _goodput(goodput, [one.text for one in advise(history, goodput)]),
        card("Timeline", chart.html, label="Timeline of the run"),
        stacks_part(subject.attempt, subject.round),
        failures_part(timeline.entries, shown),
        _rounds(history),
        _bad_nodes(history),
        windows,
        card("About this page", element("ul", *(element("li", note) for note in notes), class_="plain muted")),
    )
    return page(f"{history.name} \u00b7 {history.run_id}", body, rules=choice_rules())


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


def _head(document: Document, *, zone: str) -> Markup:
    """Which run, and how it ended."""
    history, shown = document.history, document.shown
    ended = shown.outcome if shown is not None else ""
    tone = (
        "good" if ended == "succeeded" else "bad" if shown is not None and ended and not is_requeued(shown) else "warn"
    )
    sign = {"good": "\u2713 ", "bad": "\u2715 ", "warn": "\u2026 "}[tone]
    facts = []
    if shown is not None:
        facts.append(f"attempt {shown.number}")
        facts += [f"job {shown.job_id}"] if shown.job_id else []
        facts += [f"exit code {shown.exit_code}"] if shown.exit_code is not None else []
        facts += [plural(len(shown.nodes), "node")] if shown.nodes else []
        facts += [f"started {clock_time(history.attempts[0].started_ns)}"]
        facts += [f"times are {zone}"]
    return element(
        "header",
        element("h1", history.name),
        element("span", sign, document.status, class_=f"chip {tone}"),
        element("p", " \u00b7 ".join(facts), class_="muted"),
        element("p", document.survived) if document.survived else "",
        _labelled("command", history.command),
        _labelled("run directory", history.run_dir),
        _labelled("versions", ", ".join(f"{name} {value}" for name, value in shown.versions) if shown else ""),
        class_="top",
    )


def _labelled(name: str, value: str) -> Markup | str:
    return element("p", element("span", f"{name} ", class_="muted"), element("code", value)) if value else ""


def _verdict(document: Document, *, entry: int | None, links: str) -> Markup:
    """The root cause with its evidence, and the recovery."""
    subject, verdict, finding = document.subject, document.subject.verdict, document.finding
    facts = [
        (name, f"{text} (confidence: {verdict.confidence.value})" if name == "verdict" else text)
        for name, text in finding.facts
    ]
    facts += [("" if number else "agents", line) for number, line in enumerate(document.agents)]
    done = [line.replace(" -> ", " \u2192 ") for line in document.done]
    last = [("" if number else "recovery", line) for number, line in enumerate(done)]
    last += [*finding.details, *document.notes]
    button: str = ""
    if entry is not None and subject.round is not None and len(subject.round.failures) > 1:
        button = element("p", opener(entry, "All that is known of this failure"), class_="screen")
    return element(
        "section",
        element("div", finding.title, class_="label") if finding.headline else "",
        element("h2", finding.headline or finding.title, class_="what"),
        element("p", finding.place) if finding.place else "",
        fact_list(facts),
        evidence_text(finding.evidence, TextRoom(), is_open=True) if finding.evidence is not None else "",
        log_links(finding.evidence, links) if finding.evidence is not None else "",
        fact_list(last),
        button,
        class_=f"card verdict{' good' if document.is_fine else ''}",
        aria_label="Verdict",
    )


def _goodput(goodput: Goodput, advice: Sequence[str]) -> Markup:
    """How much of the time was useful, where the rest went, and what each interruption cost."""
    share = goodput.share
    if share is None or not is_worth_showing(goodput):
        return Markup("")
    parts = [part for part in describe_goodput(goodput) if part[2] > 0]
    bar = [element("i", class_=f"f-{key}", style=f"width:{100 * s / goodput.wall:.2f}%") for key, _, s in parts]
    legend = [
        element("li", element("i", class_=f"f-{key}"), f"{what}: {duration(s)} ({100 * s / goodput.wall:.1f} %)")
        for key, what, s in parts
    ]
    note = (
        f"of {duration(goodput.wall)} since the start of the first attempt went into steps that no restart took back."
    )
    if not goodput.steps_known:
        note = f"of {duration(goodput.wall)} since the start of the first attempt all processes of the round were up."
    note += f" {describe_progress(goodput)}"
    return card(
        "Goodput" if goodput.steps_known else "Uptime",
        element(
            "div",
            element("div", f"{100 * share:.1f} %", class_="number"),
            element("div", *bar, class_="share", aria_hidden="true"),
            element("ul", *legend, class_="parts"),
            class_="goodput",
        ),
        element("p", note, class_="muted"),
        *(element("p", f"Advice: {text}") for text in advice),
        _costs(goodput),
    )


def _costs(goodput: Goodput) -> Markup:
    costs = sorted(goodput.costs, key=lambda cost: -cost.seconds)
    if not costs:
        return Markup("")
    rows = []
    for cost in costs[:COSTS]:
        more = [f"{duration(cost.queued)} of it in the queue"] if cost.queued > 0.05 else []
        more += [f"{duration(cost.recomputed)} of steps done again"] if cost.recomputed > 0.05 else []
        more += [] if cost.recovered else ["no step after it" if goodput.steps_known else "to the end"]
        what = shorten(cost.what, 300) + (f" ({', '.join(more)})" if more else "")
        rows.append(
            element(
                "tr",
                element("td", duration(cost.seconds), class_="n"),
                element("td", f"attempt {cost.attempt}, round {cost.round}", class_="w"),
                element("td", what, class_="wide"),
            )
        )
    title = "What each interruption cost" if goodput.steps_known else "How long processes were down"
    title += f" (the {len(rows)} most expensive of {len(costs)})" if len(costs) > len(rows) else ""
    head = "cost" if goodput.steps_known else "down"
    body = table((head, "where", "what"), rows, numbers=(head,))
    return element("details", element("summary", title), body, open=len(costs) <= COSTS)


def _rounds(history: RunHistory) -> Markup:
    """Attempts and rounds in words."""
    rows = []
    total = sum(len(attempt.rounds) for attempt in history.attempts)
    skipped = max(0, total - ROUNDS)
    seen = 0
    for attempt in history.attempts:
        lasted = f", {duration(attempt.seconds)}" if attempt.seconds is not None else ""
        job = f" (job {attempt.job_id})" if attempt.job_id else ""
        code = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
        end = f"{describe_outcome(history, attempt)}{code}"
        title = f"Attempt {attempt.number}{job}: {clock_time(attempt.started_ns)}{lasted}: {end}"
        rows.append(element("tr", element("td", title, colspan="5"), class_="group"))
        for part in attempt.rounds:
            seen += 1
            if seen > skipped:
                rows.append(_round_row(history, attempt, part))
        if attempt.decision and attempt.outcome != "succeeded":
            decision = describe_decision(attempt.decision)
            rows.append(element("tr", element("td", decision, colspan="5", class_="wide")))
    if not rows:
        return Markup("")
    columns = ("round", "began", "lasted", "who", "how it ended")
    more = element("p", f"The first {skipped} of {total} rounds are left out.", class_="muted") if skipped else ""
    return card("Attempts and rounds", table(columns, rows, numbers=("round", "lasted")), more)


def _round_row(history: RunHistory, attempt: AttemptHistory, part: RoundHistory) -> Markup:
    entry = round_entry(history, attempt, part, separator=" ")
    how = [shorten(entry.how, 240)]
    how += describe_after_round(attempt, part)[:1] if entry.failure else []
    how += describe_fresh_starts(part.fresh_starts)
    how += describe_restarts(part.in_process, everything=False)
    return element(
        "tr",
        element("td", str(part.index), class_="n round"),
        element("td", time_of_day(part.started_ns), class_="w"),
        element("td", duration(part.seconds) if part.seconds is not None else "", class_="n"),
        element("td", entry.size, class_="w"),
        element("td", shorten("; ".join(how), 500).replace(" -> ", " \u2192 "), class_="wide"),
    )


def _bad_nodes(history: RunHistory) -> Markup:
    """Which nodes are bad, why, and whether the next attempt does without them."""
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
        for score in history.bad_nodes[:BAD_NODES]
    ]
    more = len(history.bad_nodes) - len(rows)
    return card(
        "Bad nodes",
        table(("node", "score", "later attempts", "why"), rows, numbers=("score",)),
        element("p", f"{more} more are in report.json.", class_="muted") if more > 0 else "",
    )


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
    for name, offset in sorted(off.items())[:_SHIFTED_HOSTS]:
        way = "ahead of" if offset.offset_ns > 0 else "behind"
        how = "measured" if offset.measured else "concluded from when it learned of each round"
        notes.append(
            f"The clock of {name} is {duration(abs(offset.offset_ns) / 1e9)} {way} the others' ({how}, to within "
            f"{milliseconds_text(offset.bound_ns)}): its row is shifted by that, and the times in words are not."
        )
    if len(off) > _SHIFTED_HOSTS:
        notes.append(f"{len(off) - _SHIFTED_HOSTS} more hosts' rows are shifted in the same way.")
    return notes


def _gap_notes(timeline: Timeline) -> list[str]:
    if len(timeline.attempts) < 2:
        return []
    return ["Attempts are to scale; the waits between them are hatched and cut short, short attempts widened."]
