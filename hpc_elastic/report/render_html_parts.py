"""What stands around the chart: the verdict, the goodput, failures, stacks and rounds in words."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, whose_clock
from hpc_elastic.report.fold import Fold
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.incidents import describe_losses, describe_outages, in_process_lines
from hpc_elastic.report.render_html_chart import MARK_CLASSES, MARK_WORDS
from hpc_elastic.report.render_html_markup import (
    Markup,
    clock_time,
    count,
    duration,
    element,
    join,
    names,
    ranks,
    shorten,
    table_head,
)
from hpc_elastic.report.render_text import describe_class, describe_end
from hpc_elastic.report.render_text_past import describe_after_round, describe_decision, describe_outcome
from hpc_elastic.report.subject import Subject, failure_count, nodes_done_without, verdict_of
from hpc_elastic.report.timeline import IMPORTANCE, Entry
from hpc_elastic.report.verdict import Cause

TRACEBACK_CHARS = 12_000
TRACEBACK_TOTAL = 600_000
MEMBERS = 40
ROUNDS = 300
STACKS = 60
WORDINGS = 12


class TextRoom(Struct):
    """How many characters of tracebacks the page still takes."""

    left: int = TRACEBACK_TOTAL
    refused: int = 0

    def take(self, words: str) -> str | None:
        """A text, cut to its end where the cause stands; None where there is no room any more."""
        if len(words) > TRACEBACK_CHARS:
            words = f"\u2026 {len(words) - TRACEBACK_CHARS} characters above\n{words[-TRACEBACK_CHARS:]}"
        if len(words) > self.left:
            self.refused += 1
            return None
        self.left -= len(words)
        return words


def head_part(history: RunHistory, shown: AttemptHistory | None, *, zone: str) -> Markup:
    """Which run, and how it ended."""
    outcome = describe_outcome(history, shown)
    broken = failure_count(history)
    ended = shown.outcome if shown is not None else ""
    tone = "good" if ended == "succeeded" else "bad" if ended else "warn"
    sign = {"good": "\u2713 ", "bad": "\u2715 ", "warn": "\u2026 "}[tone]
    facts = []
    if shown is not None:
        facts.append(f"attempt {shown.number}")
        facts += [f"job {shown.job_id}"] if shown.job_id else []
        facts += [f"exit code {shown.exit_code}"] if shown.exit_code is not None else []
        facts += [count(len(shown.nodes), "node")] if shown.nodes else []
        facts += [f"started {clock_time(history.attempts[0].started_ns, date=True)}"]
        facts += [f"times are {zone}"]
    survived = ""
    if ended == "succeeded" and broken:
        were = "was" if broken == 1 else "were"
        survived = f"{count(broken, 'failure')} {were} survived; the run went on and succeeded."
    return element(
        "header",
        element("h1", history.name),
        element("span", sign, outcome, class_=f"chip {tone}"),
        element("p", " \u00b7 ".join(facts), class_="muted"),
        element("p", survived) if survived else "",
        element("p", element("span", "run directory ", class_="muted"), element("code", history.run_dir)),
        class_="top",
    )


def verdict_part(history: RunHistory, subject: Subject, shown: AttemptHistory | None, *, entry: int | None) -> Markup:
    """The root cause with its evidence, and what was done about it."""
    verdict, failure, loss = subject.verdict, subject.verdict.failure, subject.verdict.lost_node
    fine = verdict.cause is Cause.NONE and (shown is None or shown.outcome in ("", "succeeded"))
    facts: list[tuple[str, str]] = []
    body: list[Markup] = []
    where = ""
    if subject.round is not None and subject.attempt is not None:
        where = f", in round {subject.round.index} of attempt {subject.attempt.number}"
    elif subject.attempt is not None:
        where = f", in attempt {subject.attempt.number}"
    if loss is not None:
        what = loss.summary
        facts.append(("time", f"{clock_time(loss.gone_ns, date=True)} ({loss.whose_clock})"))
        facts.append(("host", f"{loss.host} (node {loss.node}){where}"))
    elif failure is not None:
        what = failure.headline or "(no message)"
        same = verdict.same_failure
        also = f"; the same on {count(len(same), 'rank')}: {ranks(same)}" if len(same) > 1 else ""
        whose = whose_clock(failure.host, failure.node, subject.attempt.clocks if subject.attempt else NO_CLOCKS)
        facts.append(("time", f"{clock_time(failure.ended_ns, date=True, fine=True)} ({whose})"))
        facts.append(("host", f"{failure.host} (node {failure.node}){where}"))
        facts.append(("rank", f"{failure.global_rank} (local_rank: {failure.local_rank}){also}"))
        signal = f" ({failure.signal})" if failure.signal else ""
        facts.append(("exitcode", f"{failure.exitcode} (pid: {failure.pid}){signal}"))
        facts.append(("error_file", failure.error_file or "<N/A>"))
        facts.append(("kind", describe_class(failure)))
        if failure.last_step is not None:
            facts.append(("last step", str(failure.last_step)))
    elif verdict.what:
        what = verdict.what
    elif fine:
        what = "No worker failed by itself."
    else:
        what = verdict.headline or f"None of the workers: {verdict.evidence}"
        facts.append(("reason", shown.reason if shown is not None and shown.reason else describe_end(shown)))
    if verdict.cause is not Cause.NONE or verdict.headline:
        facts.append(("verdict", f"{verdict.evidence} (confidence: {verdict.confidence.value})"))
    facts += [("" if number else "then", line) for number, line in enumerate(_done(subject, shown))]
    if shown is not None:
        facts += [("did without", line) for line in nodes_done_without(subject, shown)]
        facts += describe_outages(shown.outages, clock_time)
        facts += [("output lost", line) for line in describe_losses(shown.output_lost)]
    problems = [*history.problems, *(shown.problems if shown is not None else ())]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        facts.append(("incomplete", f"{problems[0]}{more}"))
    if failure is not None:
        body.append(_evidence_text(failure, TextRoom(), is_open=True))
    button: str = ""
    if entry is not None and subject.round is not None and len(subject.round.failures) > 1:
        button = element("p", _opener(entry, "All that is known of this failure"), class_="screen")
    title = "" if fine else element("div", "Root Cause (first observed failure)", class_="label")
    return element(
        "section",
        title,
        element("h2", what, class_="what"),
        _facts(facts),
        *body,
        button,
        class_=f"card verdict{' good' if fine else ''}",
        aria_label="Verdict",
    )


def _done(subject: Subject, shown: AttemptHistory | None) -> list[str]:
    lines: list[str] = []
    if subject.round is not None and subject.attempt is not None:
        lines += describe_after_round(subject.attempt, subject.round)
        if subject.attempt is not shown and subject.attempt.decision:
            lines.append(describe_decision(subject.attempt.decision))
    if shown is not None and shown.decision and shown.outcome != "succeeded":
        lines.append(describe_decision(shown.decision))
    return list(dict.fromkeys(line.replace(" -> ", " \u2192 ") for line in lines))


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
        shape = element(
            "span", class_=f"m {MARK_CLASSES[entry.kind]}", style="position:relative;margin:0", aria_hidden="true"
        )
        rows.append(
            element(
                "tr",
                element("td", shape, " ", MARK_WORDS[entry.kind], class_="w"),
                element("td", clock_time(_first_seen(entry), fine=True), class_="w"),
                element("td", _breakable(_whose(entry)), class_="who"),
                element("td", _opener(entry.number, _what(entry, 220)), class_="wide"),
            )
        )
    return element(
        "section",
        element("h2", "Failures"),
        element("div", element("table", table_head("kind", "first at", "where", "what"), *rows), class_="scroll"),
        class_="card",
        aria_label="Failures",
    )


def entry_parts(entries: Sequence[Entry], shown: frozenset[int], room: TextRoom) -> Markup:
    """One window per entry; on paper, one after the other."""
    found = []
    for entry in sorted(entries, key=lambda e: (IMPORTANCE[e.kind], -e.attempt, -e.round)):
        if entry.number in shown:
            found.append(_entry(entry, room))
    if not found:
        return Markup("")
    return element("section", element("h2", "Failures in full"), *found, class_="entries")


def _entry(entry: Entry, room: TextRoom) -> Markup:
    name = f"e{entry.number}"
    facts: list[tuple[str, str]] = [
        ("kind", MARK_WORDS[entry.kind]),
        ("where", f"{_whose(entry)}, round {entry.round} of attempt {entry.attempt}"),
    ]
    body: list[Markup] = []
    if entry.loss is not None:
        loss = entry.loss
        facts.append(("taken out at", clock_time(loss.seen_ns, date=True, fine=True)))
        if loss.age:
            facts.append(("without a sign", duration(loss.age)))
        if loss.detail:
            facts.append(("known", loss.detail))
    elif entry.fold is not None:
        first = entry.fold.first
        facts.append(("first at", f"{clock_time(first.ended_ns, date=True, fine=True)} ({first.host}'s clock)"))
        signal = f" ({first.signal})" if first.signal else ""
        facts.append(("exitcode", f"{first.exitcode} (pid: {first.pid}){signal}"))
        facts.append(("class", describe_class(first)))
        if first.last_step is not None:
            facts.append(("last step", str(first.last_step)))
        facts.append(("error_file", first.error_file or "<N/A>"))
        if first.problem:
            facts.append(("note", first.problem))
        body.append(_evidence_text(first, room, is_open=True))
        body += _other_wordings(entry.fold, room)
        if len(entry.fold.members) > 1:
            body.append(_members(entry))
    close = element("button", "Close", type="button", class_="close", popovertarget=name, popovertargetaction="hide")
    title = element("h3", _what(entry), id=f"{name}h")
    return element(
        "div",
        element("div", title, close, class_="head"),
        _facts(facts),
        *body,
        popover=True,
        id=name,
        class_="entry",
        role="dialog",
        aria_labelledby=f"{name}h",
        tabindex="-1",
        autofocus=True,
    )


def _members(entry: Entry) -> Markup:
    members = entry.fold.members if entry.fold is not None else ()
    rows = [
        element(
            "tr",
            element("td", str(failure.global_rank), class_="n"),
            element("td", failure.host),
            element("td", clock_time(failure.ended_ns, fine=True), class_="w"),
            element("td", str(failure.pid), class_="n"),
        )
        for failure in members[:MEMBERS]
    ]
    more: str = ""
    if len(members) > MEMBERS:
        more = element("p", f"and {len(members) - MEMBERS} more, which report.json has", class_="muted")
    table = element("table", table_head("rank", "host", "time", "pid", numbers=("rank", "pid")), *rows)
    wordings = len(entry.fold.wordings) if entry.fold is not None else 1
    how = f", in {wordings} wordings" if wordings > 1 else ""
    return element(
        "details",
        element("summary", f"The same on {len(members)} ranks{how}"),
        element("div", table, class_="scroll"),
        more,
    )


def _other_wordings(fold: Fold, room: TextRoom) -> list[Markup]:
    """Who of a fold says what, where not all say the same, each with what its first one printed."""
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
    table = element("table", table_head("ranks", "who", "what", numbers=("ranks",)), *rows)
    more = [same for same in fold.wordings[:WORDINGS] if same.first is not fold.first]
    left_out = len(fold.wordings) - WORDINGS
    return [
        element("div", table, class_="scroll"),
        *([element("p", f"and {count(left_out, 'wording')} more, in report.json", class_="muted")] * (left_out > 0)),
        *(_evidence_text(same.first, room, is_open=False, whose=ranks(same.ranks, limit=40)) for same in more),
    ]


def _evidence_text(failure: WorkerFailure, room: TextRoom, *, is_open: bool, whose: str = "") -> Markup:
    words = failure.traceback.rstrip("\n") or failure.stderr_tail.rstrip("\n")
    if not words:
        return element("p", "No traceback was printed, and nothing else on stderr.", class_="muted")
    kept = room.take(words)
    if kept is None:
        return element("p", "The traceback is left out here for the page's size: see the error file.", class_="muted")
    title = "Traceback" if failure.traceback else "No traceback was printed; the end of its stderr"
    title += f" ({whose})" if whose else ""
    return element(
        "details",
        element("summary", title),
        element("pre", kept, tabindex="0", role="region", aria_label=title),
        open=is_open,
    )


def stacks_part(attempt: AttemptHistory | None, part: RoundHistory | None) -> Markup:
    """Where every rank was when a round was ended because of a hang, the odd one out first."""
    if part is None or attempt is None or not part.stacks:
        return Markup("")
    steps = {status.rank: status for status in part.rank_statuses}
    items = []
    for number, group in enumerate(part.stacks[:STACKS]):
        at = sorted({status.step for rank in group.ranks if (status := steps.get(rank)) and status.step is not None})
        step = "" if not at else f", step {at[0]}" if len(at) == 1 else f", steps {at[0]} to {at[-1]}"
        inner = group.stack[-1] if group.stack else f"no Python stack; {group.state}".rstrip("; ")
        title = f"{ranks(group.ranks)} ({count(len(group.ranks), 'rank')}{step}): {shorten(inner, 120)}"
        lines = "\n".join(reversed(group.stack)) or group.state or "none could be had"
        items.append(
            element(
                "details",
                element("summary", title),
                element("pre", lines, tabindex="0", role="region", aria_label=f"Stack of {ranks(group.ranks)}"),
                open=number < 3,
            )
        )
    more: str = ""
    if len(part.stacks) > STACKS:
        hidden = sum(len(group.ranks) for group in part.stacks[STACKS:])
        more = element("p", f"and {count(hidden, 'rank')} more, in report.json", class_="muted")
    return element(
        "section",
        element("h2", f"Where each rank's main thread was in round {part.index} of attempt {attempt.number}"),
        element("p", "The innermost call first, the rarest place first.", class_="muted"),
        *items,
        more,
        _threads_part(part),
        class_="card",
        aria_label="Stacks",
    )


def _threads_part(part: RoundHistory) -> Markup | str:
    """The other threads, all in one place that is closed at first."""
    if not part.threads:
        return ""
    lines = []
    for group in part.threads[:STACKS]:
        name = f", {group.name}" if group.name else ""
        lines += [f"{ranks(group.ranks)} ({count(len(group.ranks), 'rank')}{name})"]
        lines += [*(f"    {frame}" for frame in reversed(group.stack)), ""]
    if len(part.threads) > STACKS:
        lines.append(f"and {count(len(part.threads) - STACKS, 'place')} more, in report.json")
    return element(
        "details",
        element("summary", f"The other threads: {count(len(part.threads), 'place')}"),
        element("pre", "\n".join(lines), tabindex="0", role="region", aria_label="Stacks of the other threads"),
    )


def rounds_part(history: RunHistory) -> Markup:
    """Attempts and rounds in words."""
    rows = []
    total = sum(len(attempt.rounds) for attempt in history.attempts)
    skipped = max(0, total - ROUNDS)
    seen = 0
    for attempt in history.attempts:
        lasted = ""
        if attempt.started_ns and attempt.ended_ns:
            lasted = f", {duration((attempt.ended_ns - attempt.started_ns) / 1e9)}"
        job = f" (job {attempt.job_id})" if attempt.job_id else ""
        code = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
        began = clock_time(attempt.started_ns, date=True)
        title = f"Attempt {attempt.number}{job}: {began}{lasted}: {describe_outcome(history, attempt)}{code}"
        rows.append(element("tr", element("td", title, colspan="5"), class_="group"))
        for part in attempt.rounds:
            seen += 1
            if seen > skipped:
                rows.append(_round_row(attempt, part))
        if attempt.decision and attempt.outcome != "succeeded":
            decision = describe_decision(attempt.decision)
            rows.append(element("tr", element("td", decision, colspan="5", class_="wide")))
    if not rows:
        return Markup("")
    more: str = ""
    if skipped:
        more = element("p", f"The first {skipped} of {total} rounds are left out.", class_="muted")
    head = table_head("round", "began", "lasted", "who", "how it ended", numbers=("round", "lasted"))
    return element(
        "section",
        element("h2", "Attempts and rounds"),
        element("div", element("table", head, *rows), class_="scroll"),
        more,
        class_="card",
        aria_label="Attempts and rounds",
    )


def _round_row(attempt: AttemptHistory, part: RoundHistory) -> Markup:
    verdict = verdict_of(part)
    if verdict.cause is not Cause.NONE:
        others = len(part.failures) - (1 if verdict.failure is not None else 0)
        how = shorten(verdict.summary, 240) + (f" (+{others} more)" if others else "")
        how = "; ".join([how, *describe_after_round(attempt, part)[:1]])
    elif part.succeeded:
        how = "all workers ended with 0"
    elif part.stopping_reasons:
        how = f"stopped: {part.stopping_reasons[0]}"
    else:
        how = "running" if not attempt.outcome else "no end is recorded"
    how = "; ".join([how, *in_process_lines(part.in_process, everything=False)])
    size = count(len(part.nodes), "node") if part.nodes else "never started"
    if part.world_size is not None:
        size += f", {count(part.world_size, 'worker')}"
    return element(
        "tr",
        element("td", str(part.index), class_="n"),
        element("td", clock_time(part.started_ns), class_="w"),
        element("td", duration(part.seconds) if part.seconds is not None else "", class_="n"),
        element("td", size, class_="w"),
        element("td", shorten(how, 500).replace(" -> ", " \u2192 "), class_="wide"),
    )


def notes_part(notes: Sequence[str]) -> Markup:
    """What the picture is worth, and what is not in it."""
    items = [element("li", note) for note in notes]
    return element(
        "section",
        element("h2", "About this page"),
        element("ul", *items, class_="plain muted"),
        class_="card",
        aria_label="About this page",
    )


def _facts(facts: Sequence[tuple[str, str]]) -> Markup:
    pairs = (join(element("dt", name), element("dd", value)) for name, value in facts)
    return element("dl", *pairs, class_="facts")


def _opener(entry: int, words: str) -> Markup:
    return element("button", words, type="button", class_="open", popovertarget=f"e{entry}")


def _what(entry: Entry, limit: int | None = None) -> str:
    """What most of it say, in at most so many characters, and that others say it otherwise."""
    words = entry.headline if limit is None else shorten(entry.headline, limit)
    others = len(entry.fold.wordings) - 1 if entry.fold is not None else 0
    more = f" (+{count(others, 'other wording')})" if others else ""
    return f"{words or '(no message)'}{more}"


def _whose(entry: Entry) -> str:
    if entry.loss is not None:
        return f"{entry.loss.host} (node {entry.loss.node})"
    if entry.fold is None:
        return ""
    return f"{ranks(entry.fold.ranks, limit=40)} on {names(entry.fold.hosts, limit=40)}"


def _breakable(words: str) -> Markup:
    """A list of ranks that may be broken between two of them, and nowhere else."""
    first, *others = words.split(",")
    return join(first, *(join(",", element("wbr"), other) for other in others))


def _first_seen(entry: Entry) -> int:
    if entry.loss is not None:
        return entry.loss.gone_ns
    return entry.fold.first.ended_ns if entry.fold is not None else 0
