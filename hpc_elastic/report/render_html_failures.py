"""The page's parts on failures: the table of all, a window for each with its evidence, and where hung ranks stood."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.text import plural
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.document import NOT_AVAILABLE, Fold
from hpc_elastic.report.history import AttemptHistory, RoundHistory
from hpc_elastic.report.render_html_markup import (
    Markup,
    card,
    clock_time,
    duration,
    element,
    fact_list,
    join,
    names,
    ranks,
    shorten,
    table,
    time_of_day,
)
from hpc_elastic.report.timeline import IMPORTANCE, Entry
from hpc_elastic.report.wording import describe_class, describe_exit, known_stacks
from hpc_elastic.run.paths import RunPaths

TRACEBACK_CHARS = 12_000
TRACEBACK_TOTAL = 600_000
MEMBERS = 40
STACKS = 60
WORDINGS = 12


class TextRoom(Struct):
    """How many characters of tracebacks the page still takes."""

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


def failures_part(entries: Sequence[Entry], shown: frozenset[int]) -> Markup:
    """All failures, folded, each leading to its traceback."""
    if not entries:
        return Markup("")
    rows = []
    place = None
    for entry in sorted(
        (entry for entry in entries if entry.number in shown), key=lambda e: (e.attempt, e.round, IMPORTANCE[e.kind])
    ):
        if place != (entry.attempt, entry.round):
            place = (entry.attempt, entry.round)
            title = f"Attempt {entry.attempt}, round {entry.round}"
            rows.append(element("tr", element("td", title, colspan="4"), class_="group"))
        name = entry.kind.name.lower()
        shape = element("span", class_=f"m {name}", style="position:relative;margin:0", aria_hidden="true")
        first_ns = entry.loss.gone_ns if entry.loss is not None else entry.fold.first.ended_ns if entry.fold else None
        rows.append(
            element(
                "tr",
                element("td", shape, " ", entry.kind.value, class_="w"),
                element("td", time_of_day(first_ns, fine=True), class_="w"),
                element("td", _breakable(_whose(entry)), class_="who"),
                element("td", opener(entry.number, _what(entry, 220)), class_="wide"),
            )
        )
    return card("Failures", table(("kind", "first at", "where", "what"), rows))


def entry_parts(entries: Sequence[Entry], shown: frozenset[int], room: TextRoom, *, links: str) -> Markup:
    """One window per entry; on paper, one after the other."""
    order = sorted(entries, key=lambda e: (IMPORTANCE[e.kind], -e.attempt, -e.round))
    found = [_entry(entry, room, links) for entry in order if entry.number in shown]
    return element("section", element("h2", "Failures in full"), *found, class_="entries") if found else Markup("")


def _entry(entry: Entry, room: TextRoom, links: str) -> Markup:
    name = f"e{entry.number}"
    facts: list[tuple[str, str]] = [
        ("kind", entry.kind.value),
        ("where", f"{_whose(entry)}, round {entry.round} of attempt {entry.attempt}"),
    ]
    body: list[Markup] = []
    if entry.loss is not None:
        loss = entry.loss
        facts.append(("taken out at", clock_time(loss.seen_ns, fine=True)))
        facts += [("without a heartbeat", duration(loss.age))] if loss.age else []
        facts += [("known", loss.detail)] if loss.detail else []
    elif entry.fold is not None:
        first = entry.fold.first
        facts.append(("first at", f"{clock_time(first.ended_ns, fine=True)} ({first.host}'s clock)"))
        facts.append(("exitcode", describe_exit(first)))
        facts.append(("class", describe_class(first)))
        facts += [("last step", str(first.last_step))] if first.last_step is not None else []
        facts.append(("error_file", first.error_file or NOT_AVAILABLE))
        facts += [("note", first.problem)] if first.problem else []
        body.append(evidence_text(first, room, is_open=True))
        body.append(log_links(first, links))
        body += _other_wordings(entry.fold, room)
        body += _members(entry.fold)
    close = element("button", "Close", type="button", class_="close", popovertarget=name, popovertargetaction="hide")
    title = element("h3", _what(entry), id=f"{name}h")
    return element(
        "div",
        element("div", title, close, class_="head"),
        fact_list(facts),
        *body,
        popover=True,
        id=name,
        class_="entry",
        role="dialog",
        aria_labelledby=f"{name}h",
        tabindex="-1",
        autofocus=True,
    )


def _members(fold: Fold) -> list[Markup]:
    """The single failures of a fold."""
    if len(fold.members) == 1:
        return []
    rows = [
        element(
            "tr",
            element("td", str(failure.global_rank), class_="n"),
            element("td", failure.host),
            element("td", time_of_day(failure.ended_ns, fine=True), class_="w"),
            element("td", str(failure.pid), class_="n"),
        )
        for failure in fold.members[:MEMBERS]
    ]
    how = f", in {len(fold.wordings)} wordings" if len(fold.wordings) > 1 else ""
    left = len(fold.members) - MEMBERS
    more = element("p", f"and {left} more, which report.json has", class_="muted") if left > 0 else ""
    members = table(("rank", "host", "time", "pid"), rows, numbers=("rank", "pid"))
    return [element("details", element("summary", f"The same on {len(fold.members)} ranks{how}"), members, more)]


def _other_wordings(fold: Fold, room: TextRoom) -> list[Markup]:
    """What each rank of a fold printed, where that differs."""
    if len(fold.wordings) == 1:
        return []
    rows = [
        element(
            "tr",
            element("td", str(len(same.ranks)), class_="n"),
            element("td", _breakable(ranks(same.ranks, limit=40)), class_="who"),
            element("td", shorten(same.first.headline, 220) or "(no message)", class_="wide"),
        )
        for same in fold.wordings[:WORDINGS]
    ]
    more = [same for same in fold.wordings[:WORDINGS] if same.first is not fold.first]
    left_out = len(fold.wordings) - WORDINGS
    return [
        table(("ranks", "who", "what"), rows, numbers=("ranks",)),
        *([element("p", f"and {plural(left_out, 'wording')} more, in report.json", class_="muted")] * (left_out > 0)),
        *(evidence_text(same.first, room, is_open=False, whose=ranks(same.ranks, limit=40)) for same in more),
    ]


def evidence_text(failure: WorkerFailure, room: TextRoom, *, is_open: bool, whose: str = "") -> Markup:
    """A failure's traceback, or the end of its stderr."""
    text = failure.traceback.rstrip("\n") or failure.stderr_tail.rstrip("\n")
    if not text:
        return element("p", "Its stderr is empty, so there is no traceback.", class_="muted")
    kept = room.take(text)
    if kept is None:
        return element("p", "The traceback is left out here for the page's size: see the error file.", class_="muted")
    title = "Traceback" if failure.traceback else "The end of its stderr"
    shown = _unfolding(f"{title} ({whose})" if whose else title, kept, is_open=is_open)
    tail = failure.stderr_tail.rstrip("\n")
    if not failure.traceback or not tail or tail == text or whose or (rest := room.take(tail)) is None:
        return shown
    return join(shown, _unfolding("The end of its stderr", rest, is_open=False))


def log_links(failure: WorkerFailure, links: str) -> Markup:
    """The files that the rank has left, by their places in the run directory."""
    paths = RunPaths(Path()).attempt(failure.attempt).rank(failure.round, failure.global_rank)
    found = [
        element("a", path.name, href=f"{links}/{path.as_posix()}")
        for path in (paths.stdout, paths.stderr, paths.error_file)
    ]
    return element("p", f"Files of rank {failure.global_rank}: ", join(found[0], ", ", found[1], ", ", found[2]))


def stacks_part(attempt: AttemptHistory | None, part: RoundHistory | None) -> Markup:
    """Where every rank was when a round was ended because of a hang, the odd one out first."""
    stacks = known_stacks(part) if part is not None else []
    if part is None or attempt is None or not stacks:
        return Markup("")
    steps = {status.rank: status for status in part.rank_statuses}
    items = []
    for number, group in enumerate(stacks[:STACKS]):
        at = sorted({status.step for rank in group.ranks if (status := steps.get(rank)) and status.step is not None})
        step = "" if not at else f", step {at[0]}" if len(at) == 1 else f", steps {at[0]} to {at[-1]}"
        inner = group.stack[-1] if group.stack else f"no Python stack; {group.state}".rstrip("; ")
        title = f"{ranks(group.ranks)} ({plural(len(group.ranks), 'rank')}{step}): {shorten(inner, 120)}"
        lines = "\n".join(reversed(group.stack)) or group.state or "none could be had"
        items.append(_unfolding(title, lines, is_open=number < 3, label=f"Stack of {ranks(group.ranks)}"))
    hidden = sum(len(group.ranks) for group in stacks[STACKS:])
    return card(
        f"Where each rank's main thread was in round {part.index} of attempt {attempt.number}",
        element("p", "The innermost call first, the rarest place first.", class_="muted"),
        *items,
        element("p", f"and {plural(hidden, 'rank')} more, in report.json", class_="muted") if hidden else "",
        _threads(part),
        label="Stacks",
    )


def _threads(part: RoundHistory) -> Markup | str:
    """The other threads, all in one place that is closed at first."""
    if not part.threads:
        return ""
    lines = []
    for group in part.threads[:STACKS]:
        name = f", {group.name}" if group.name else ""
        lines += [f"{ranks(group.ranks)} ({plural(len(group.ranks), 'rank')}{name})"]
        lines += [*(f"    {frame}" for frame in reversed(group.stack)), ""]
    if len(part.threads) > STACKS:
        lines.append(f"and {plural(len(part.threads) - STACKS, 'place')} more, in report.json")
    title = f"The other threads: {plural(len(part.threads), 'place')}"
    return _unfolding(title, "\n".join(lines), is_open=False, label="Stacks of the other threads")


def _unfolding(title: str, text: str, *, is_open: bool, label: str = "") -> Markup:
    body = element("pre", text, tabindex="0", role="region", aria_label=label or title)
    return element("details", element("summary", title), body, open=is_open)


def opener(entry: int, text: str) -> Markup:
    """The button that opens an entry's window."""
    return element("button", text, type="button", class_="open", popovertarget=f"e{entry}")


def _what(entry: Entry, limit: int | None = None) -> str:
    """What most of an entry's failures say, in at most so many characters, and in how many other wordings."""
    text = entry.headline if limit is None else shorten(entry.headline, limit)
    others = len(entry.fold.wordings) - 1 if entry.fold is not None else 0
    more = f" (+{plural(others, 'other wording')})" if others else ""
    return f"{text or '(no message)'}{more}"


def _whose(entry: Entry) -> str:
    if entry.loss is not None:
        return f"{entry.loss.host} (node {entry.loss.node})"
    if entry.fold is None:
        return ""
    return f"{ranks(entry.fold.ranks, limit=40)} on {names(entry.fold.hosts, limit=40)}"


def _breakable(text: str) -> Markup:
    """A list of ranks that may be broken between two of them, and nowhere else."""
    first, *others = text.split(",")
    return join(first, *(join(",", element("wbr"), other) for other in others))
