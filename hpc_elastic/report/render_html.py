"""report.html: the run in one file, which needs no network and no script, and where no quoted text can act."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hpc_elastic.base.text import fit, local_time, milliseconds_text, plural, safe_text
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report import render_html_chart as chart
from hpc_elastic.report import wording
from hpc_elastic.report.blocks import AttemptEntry, RoundEntry
from hpc_elastic.report.clocks import NOTABLE_NS
from hpc_elastic.report.document import Document, Subject
from hpc_elastic.report.goodput import Cost, Goodput, describe_goodput, describe_progress, is_worth_showing
from hpc_elastic.report.history import AttemptHistory
from hpc_elastic.report.render_html_chart import IMPORTANCE, Entry, build_timeline, clock_time, duration, names, ranks
from hpc_elastic.report.timeline_attempt import PlacedAttempt
from hpc_elastic.run.paths import RunPaths

if TYPE_CHECKING:
    import jinja2

ENTRIES = 250
"""Failures, folded, of which the page has everything."""
ROUNDS = 300
COSTS = 12
TRACEBACK_CHARS = 12_000
TRACEBACK_TOTAL = 600_000
WORDINGS = 12
_RANK_ROUNDS = 30_000
"""Rank rows times rounds that are drawn: beyond, only ranks that failed have rows of their own."""
CHEAP_NODE_ROUNDS = 20_000
"""Nodes' parts in rounds of a run whose page is made within about a second."""
_SHIFTED_HOSTS = 20
_PACKAGE = Path(__file__).resolve().parent.parent
STYLE = _PACKAGE / "report" / "templates" / "page.css"


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PACKAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # a page is rendered once: the optimizer takes longer than it spares
        # No text deceives a reader by characters that turn its direction, or are invisible.
        finalize=lambda value: safe_text(value) if type(value) is str else value,
    )
    environment.filters |= {
        "class": wording.describe_class,
        "clock_time": clock_time,
        "decision": wording.describe_decision,
        "duration": duration,
        "exit": wording.describe_exit,
        "milliseconds": milliseconds_text,
        "progress": describe_progress,
        "ranks": ranks,
        "fit": fit,
        "time_of_day": chart.time_of_day,
        "what": describe_entry,
        "whose": describe_whose,
        "words": chart.describe_spans,
    }
    return environment


def render_page(template: str, **context: Any) -> str:
    style = STYLE.read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _environment().get_template(template).render(style=style, digest=digest, plural=plural, **context)


def render_html(document: Document, *, links: str = "..") -> str:
    """`links`: the way from the page to the run directory, for the links to the ranks' logs."""
    history, subject = document.history, document.subject
    rounds = sum(len(part.rounds) for part in history.attempts)
    timeline = build_timeline(document.placed, most_ranks=min(chart.ROWS, max(64, _RANK_ROUNDS // max(1, rounds))))
    # What has its place in the page: the most important first, then the latest.
    entries = sorted(timeline.entries, key=lambda e: (IMPORTANCE[e.kind], -e.attempt, -e.round))[:ENTRIES]
    shown = frozenset(entry.number for entry in entries)
    drawn = chart.draw_chart(document.placed, timeline, shown=shown)
    failures: dict[tuple[int, int], list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (e.attempt, e.round, IMPORTANCE[e.kind], e.number)):
        failures.setdefault((entry.attempt, entry.round), []).append(entry)
    room = TextRoom()
    windows = [make_window(entry, room) for entry in entries]
    return render_page(
        "report/templates/page.html",
        title=f"{history.name} \u00b7 {history.run_id}",
        document=document,
        tone=_tone(document.shown),
        zone=_zone(document.placed[0].start_ns if document.placed else None),
        verdict=_verdict(document, opens=_entry_of(subject, entries)),
        goodput=_goodput(document),
        chart=drawn,
        zooms=chart.ZOOMS,
        failures=failures,
        **_attempts(document.attempts),
        windows=windows,
        clocks=_clocks(document.placed),
        entries_left_out=(len(timeline.entries) - len(entries), len(timeline.entries)),
        texts_left_out=room.refused,
        links=links,
        files_of=files_of,
        most_wordings=WORDINGS,
    )


def _entry_of(subject: Subject, entries: Sequence[Entry]) -> int | None:
    failure, loss = subject.verdict.failure, subject.verdict.lost_node
    if subject.round is None or len(subject.round.failures) < 2:
        return None
    for entry in sorted(entries, key=lambda e: e.number):
        if (loss is not None and entry.loss is loss) or any(member is failure for member in entry.members):
            return entry.number
    return None


def _tone(shown: AttemptHistory | None) -> str:
    if shown is None or not shown.outcome:
        return "warn"
    return "good" if shown.outcome == "succeeded" else "warn" if wording.is_requeued(shown) else "bad"


def _verdict(document: Document, *, opens: int | None) -> dict[str, Any]:
    verdict, finding = document.subject.verdict, document.finding
    facts = [
        (name, f"{text} (confidence: {verdict.confidence.value})" if name == "verdict" else text)
        for name, text in finding.facts
    ]
    facts += [("" if number else "agents", line) for number, line in enumerate(document.agents)]
    outcome = [("" if number else "recovery", _arrow(line)) for number, line in enumerate(document.done)]
    texts = evidence_texts(finding.evidence, TextRoom()) if finding.evidence is not None else []
    # torch puts a ``_`` between the date and the hour.
    details = [(name, text.replace("_", " ", 1) if name == "time" else text) for name, text in finding.details]
    return {"facts": facts, "texts": texts, "outcome": [*outcome, *details, *document.notes], "opens": opens}


def _arrow(line: str) -> str:
    return line.replace(" -> ", " \u2192 ")


def _goodput(document: Document) -> dict[str, Any]:
    goodput = document.goodput
    if goodput.share is None or not is_worth_showing(goodput):
        return {"parts": ()}
    costs = sorted(goodput.costs, key=lambda cost: -cost.seconds)[:COSTS]
    return {
        "of": goodput,
        "parts": [part for part in describe_goodput(goodput) if part[2] > 0],
        "costs": [(cost, _describe_cost(cost, goodput)) for cost in costs],
    }


def _describe_cost(cost: Cost, goodput: Goodput) -> str:
    more = [f"{duration(cost.queued)} of it in the queue"] if cost.queued > 0.05 else []
    more += [f"{duration(cost.recomputed)} of steps done again"] if cost.recomputed > 0.05 else []
    more += [] if cost.recovered else ["no step after it" if goodput.steps_known else "to the end"]
    return fit(cost.what, 300) + (f" ({', '.join(more)})" if more else "")


def _zone(when_ns: int | None) -> str:
    """``UTC+02:00``: what the page's times are to be read as."""
    moment = local_time(when_ns)
    offset = moment.astimezone().strftime("%z") if moment is not None else ""
    return f"UTC{offset[:3]}:{offset[3:5]}" if offset else "local time"


def _attempts(entries: Sequence[AttemptEntry]) -> dict[str, Any]:
    total = sum(len(entry.rounds) for entry in entries)
    skipped, seen = max(0, total - ROUNDS), 0
    attempts = []
    for entry in entries:
        rounds = entry.rounds[max(0, skipped - seen) :]
        seen += len(entry.rounds)
        attempts.append((entry, [(one, _how(entry.attempt, one)) for one in rounds]))
    return {"attempts": attempts, "rounds_left_out": (skipped, total) if skipped else ()}


def _how(attempt: AttemptHistory, entry: RoundEntry) -> str:
    part = entry.part
    how = [fit(entry.how, 240) + (f", since {clock_time(entry.since_ns)}" if entry.since_ns else "")]
    how += wording.describe_after_round(attempt, part)[:1] if entry.failure else []
    how += wording.describe_fresh_starts(part.fresh_starts)
    how += wording.describe_restarts(part.in_process, everything=False)
    return _arrow(fit("; ".join(how), 500))


def _clocks(parts: Sequence[PlacedAttempt]) -> dict[str, Any]:
    offsets = {part.name(node): offset for part in parts for node, offset in part.offsets.items()}
    off = {name: offset for name, offset in offsets.items() if abs(offset.offset_ns) > max(NOTABLE_NS, offset.bound_ns)}
    hosts = dict.fromkeys(p.attempt.clocks.host for p in parts if p.attempt.clocks.reference is not None)
    return {
        "bound_ns": max((offset.bound_ns for offset in offsets.values() if offset.measured), default=None),
        "hosts": list(hosts),
        "off": sorted(off.items())[:_SHIFTED_HOSTS],
        "more": max(0, len(off) - _SHIFTED_HOSTS),
    }


class TextRoom(Struct):
    left: int = TRACEBACK_TOTAL
    refused: int = 0

    def take(self, text: str) -> str | None:
        """A text, cut to its end where the cause stands; None where there is no room any more."""
        if len(text) > TRACEBACK_CHARS:
            text = f"\u2026 {len(text) - TRACEBACK_CHARS} characters above\n{text[-TRACEBACK_CHARS:]}"
        if len(text) > self.left:
            self.refused += 1
            return None
        self.left -= len(text)
        return text


class Text(Struct, frozen=True, kw_only=True):
    title: str
    text: str = ""
    is_open: bool = False


def make_window(entry: Entry, room: TextRoom) -> dict[str, Any]:
    if entry.fold is None:
        return {"entry": entry}
    first = entry.fold.first
    texts = evidence_texts(first, room)
    others = [same for same in entry.fold.wordings[:WORDINGS] if same.first is not first]
    more = [text for one in others for text in evidence_texts(one.first, room, whose=ranks(one.ranks, limit=40))]
    return {"entry": entry, "texts": texts, "other_texts": more}


def evidence_texts(failure: WorkerFailure, room: TextRoom, *, whose: str = "") -> list[Text]:
    tail = failure.stderr_tail.rstrip("\n")
    text = failure.traceback.rstrip("\n") or tail
    if not text:
        return [Text(title="Its stderr is empty, so there is no traceback.")]
    kept = room.take(text)
    if kept is None:
        return [Text(title="The traceback is left out here for the page's size: see the error file.")]
    title = "Traceback" if failure.traceback else "The end of its stderr"
    shown = [Text(title=f"{title} ({whose})" if whose else title, text=kept, is_open=not whose)]
    if failure.traceback and tail and tail != text and not whose and (rest := room.take(tail)) is not None:
        shown.append(Text(title="The end of its stderr", text=rest))
    return shown


def files_of(failure: WorkerFailure) -> tuple[Path, ...]:
    paths = RunPaths(Path()).attempt(failure.attempt).rank(failure.round, failure.global_rank)
    return (paths.stdout, paths.stderr, paths.error_file)


def describe_entry(entry: Entry, limit: int | None = None) -> str:
    text = entry.headline if limit is None else fit(entry.headline, limit)
    others = len(entry.fold.wordings) - 1 if entry.fold is not None else 0
    more = f" (+{plural(others, 'other wording')})" if others else ""
    return f"{text or '(no message)'}{more}"


def describe_whose(entry: Entry) -> str:
    if entry.loss is not None:
        return f"{entry.loss.host} (node {entry.loss.node})"
    if entry.fold is None:
        return ""
    return f"{ranks(entry.fold.ranks, limit=40)} on {names(entry.fold.hosts, limit=40)}"
