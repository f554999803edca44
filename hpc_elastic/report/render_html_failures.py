"""The page's parts on failures: a window for each with its evidence, and where hung ranks stood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from hpc_elastic.base.text import plural
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.document import NOT_AVAILABLE
from hpc_elastic.report.history import AttemptHistory, RoundHistory
from hpc_elastic.report.render_html_text import clock_time, duration, names, ranks, shorten
from hpc_elastic.report.timeline import Entry
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


class Text(Struct, frozen=True, kw_only=True):
    """Lines that unfold below a title; without lines the title says why there are none."""

    title: str
    text: str = ""
    is_open: bool = False
    label: str = ""
    """A screen reader's; empty: the title."""


def make_window(entry: Entry, room: TextRoom) -> dict[str, Any]:
    facts: list[tuple[str, str]] = [
        ("kind", entry.kind.value),
        ("where", f"{describe_whose(entry)}, round {entry.round} of attempt {entry.attempt}"),
    ]
    if (loss := entry.loss) is not None:
        facts.append(("taken out at", clock_time(loss.seen_ns, fine=True)))
        facts += [("without a heartbeat", duration(loss.age))] if loss.age else []
        facts += [("known", loss.detail)] if loss.detail else []
    window: dict[str, Any] = {"entry": entry, "facts": facts}
    if entry.fold is not None:
        first = entry.fold.first
        facts.append(("first at", f"{clock_time(first.ended_ns, fine=True)} ({first.host}'s clock)"))
        facts.append(("exitcode", describe_exit(first)))
        facts.append(("class", describe_class(first)))
        facts += [("last step", str(first.last_step))] if first.last_step is not None else []
        facts.append(("error_file", first.error_file or NOT_AVAILABLE))
        facts += [("note", first.problem)] if first.problem else []
        window["texts"] = evidence_texts(first, room, is_open=True)
        window["other_texts"] = [
            text
            for same in entry.fold.wordings[:WORDINGS]
            if same.first is not first
            for text in evidence_texts(same.first, room, is_open=False, whose=ranks(same.ranks, limit=40))
        ]
    return window


def evidence_texts(failure: WorkerFailure, room: TextRoom, *, is_open: bool, whose: str = "") -> list[Text]:
    """A failure's traceback, and the end of its stderr where that is not the same."""
    tail = failure.stderr_tail.rstrip("\n")
    text = failure.traceback.rstrip("\n") or tail
    if not text:
        return [Text(title="Its stderr is empty, so there is no traceback.")]
    kept = room.take(text)
    if kept is None:
        return [Text(title="The traceback is left out here for the page's size: see the error file.")]
    title = "Traceback" if failure.traceback else "The end of its stderr"
    shown = [Text(title=f"{title} ({whose})" if whose else title, text=kept, is_open=is_open)]
    if failure.traceback and tail and tail != text and not whose and (rest := room.take(tail)) is not None:
        shown.append(Text(title="The end of its stderr", text=rest))
    return shown


def files_of(failure: WorkerFailure) -> tuple[Path, ...]:
    paths = RunPaths(Path()).attempt(failure.attempt).rank(failure.round, failure.global_rank)
    return (paths.stdout, paths.stderr, paths.error_file)


def stacks_of(attempt: AttemptHistory | None, part: RoundHistory | None) -> dict[str, Any] | None:
    """Each rank's place when a round was ended because of a hang, the odd one out first."""
    stacks = known_stacks(part) if part is not None else []
    if part is None or attempt is None or not stacks:
        return None
    steps = {status.rank: status for status in part.rank_statuses}
    items = []
    for number, group in enumerate(stacks[:STACKS]):
        at = sorted({status.step for rank in group.ranks if (status := steps.get(rank)) and status.step is not None})
        step = "" if not at else f", step {at[0]}" if len(at) == 1 else f", steps {at[0]} to {at[-1]}"
        inner = group.stack[-1] if group.stack else f"no Python stack; {group.state}".rstrip("; ")
        title = f"{ranks(group.ranks)} ({plural(len(group.ranks), 'rank')}{step}): {shorten(inner, 120)}"
        lines = "\n".join(reversed(group.stack)) or group.state or "none could be had"
        items.append(Text(title=title, text=lines, is_open=number < 3, label=f"Stack of {ranks(group.ranks)}"))
    hidden = sum(len(group.ranks) for group in stacks[STACKS:])
    more = f"and {plural(hidden, 'rank')} more, in report.json" if hidden else ""
    return {"place": (part.index, attempt.number), "main": items, "more": more, "others": _other_threads(part)}


def _other_threads(part: RoundHistory) -> list[Text]:
    if not part.threads:
        return []
    lines = []
    for group in part.threads[:STACKS]:
        name = f", {group.name}" if group.name else ""
        lines += [f"{ranks(group.ranks)} ({plural(len(group.ranks), 'rank')}{name})"]
        lines += [*(f"    {frame}" for frame in reversed(group.stack)), ""]
    if len(part.threads) > STACKS:
        lines.append(f"and {plural(len(part.threads) - STACKS, 'place')} more, in report.json")
    title = f"The other threads: {plural(len(part.threads), 'place')}"
    return [Text(title=title, text="\n".join(lines), label="Stacks of the other threads")]


def describe_entry(entry: Entry, limit: int | None = None) -> str:
    """The most frequent headline, cut at `limit` characters, and the number of other wordings."""
    text = entry.headline if limit is None else shorten(entry.headline, limit)
    others = len(entry.fold.wordings) - 1 if entry.fold is not None else 0
    more = f" (+{plural(others, 'other wording')})" if others else ""
    return f"{text or '(no message)'}{more}"


def describe_whose(entry: Entry) -> str:
    if entry.loss is not None:
        return f"{entry.loss.host} (node {entry.loss.node})"
    if entry.fold is None:
        return ""
    return f"{ranks(entry.fold.ranks, limit=40)} on {names(entry.fold.hosts, limit=40)}"
