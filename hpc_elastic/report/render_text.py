"""The report that stands in the job log: one screen, ASCII, for a person who opens it at 3 a.m."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import TextWrapper

from msgspec.structs import replace

from hpc_elastic.base.files import read_bytes
from hpc_elastic.base.text import clean_line, clean_lines, duration, fit, plural, ranks_text, time_text
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.failures.failure_text import summary_line
from hpc_elastic.failures.worker_failure import WorkerFailure, fold_repeats, make_excerpt
from hpc_elastic.report import wording
from hpc_elastic.report.blocks import AttemptEntry, Block, RoundEntry
from hpc_elastic.report.document import Document, Fact, Finding, choose_subject
from hpc_elastic.report.goodput import Cost, Goodput, cost_text, describe_progress, goodput_text, is_worth_showing
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.verdict import Confidence
from hpc_elastic.run.paths import Outcome, RunPaths

DEFAULT_LINES = 40
DEFAULT_WIDTH = 120
_NARROWEST = 60
_RULE = 60
_WHOLE = 1 << 30
_OTHERS = 5
_HISTORY = 9
_JOB_LOG_HISTORY = 5
_JOB_LOG_LINES = 24
_BAD_NODES = 3
_TRACEBACK_MOST = 20
_TRACEBACK_LEAST = 4
_CONSEQUENCE_MOST = 12
_HEADLINE_LINES = 5
_WRAPPED = ("", "verdict", "kind", "reason", "last step")
"""Fields whose text goes on in the next lines; paths, times and places are never cut."""
_SHOW_ALL = "(--all shows them)"


def render_job_log(document: Document, *, width: int = DEFAULT_WIDTH) -> str:
    """Render the end of a job log: a traceback that the log has is not repeated, consequences are counted."""
    finding, part, stacks = document.finding, document.subject.round, document.stacks
    names = {"kind", "reason", "caused by"}
    is_sure = document.subject.verdict.confidence is Confidence.HIGH and finding.evidence is not None
    names |= set() if is_sure else {"verdict"}
    finding = replace(finding, facts=tuple(fact for fact in finding.facts if fact.name in names))
    failure = finding.evidence
    cause = _cause(document, replace(finding, evidence=None, details=()), width, lines=None, most=2)
    rest = _block(document.others(is_counted=True), width, cap=3)
    rest += [line for block in stacks[:1] for line in _block(block, width, cap=_OTHERS)]
    rest += [*_done(document, width), *_bad_nodes(document, width, cap=_BAD_NODES)]
    rest += _past(document, width, cap=_JOB_LOG_HISTORY)
    alike = [f for f in part.failures if f.fingerprint == failure.fingerprint] if part and failure else []
    if failure and not any(one.is_shown for one in (failure, *alike)) and not stacks:
        room = _JOB_LOG_LINES - len(cause) - len(rest) - len(document.notes)
        cause += _traceback(failure, width, max(_TRACEBACK_LEAST, min(_CONSEQUENCE_MOST, room)), lost="")
    return _framed(_head(document, width), [*cause, *rest])


def _framed(head: Sequence[str], lines: Sequence[str]) -> str:
    rule = "=" * _RULE
    return "\n".join(map(clean_line, [rule, *head, "-" * _RULE, *lines, rule])) + "\n"


def render_text(
    document: Document, *, max_lines: int | None = DEFAULT_LINES, width: int = DEFAULT_WIDTH, is_file: bool = False
) -> str:
    """Render at most `max_lines`, or everything; longer lines than `width` are cut, but for paths.

    `is_file`: it is not shown, but kept: the root cause is not cut.
    """
    everything = max_lines is None
    width = _WHOLE if everything else max(_NARROWEST, width)
    head = _head(document, width)
    done = [*_done(document, width), *_bad_nodes(document, width, cap=None if everything else _BAD_NODES)]
    past = _past(document, width, cap=None if everything else _HISTORY)
    blocks = (document.others(), *document.stacks)
    others = [line for block in blocks for line in _block(block, width, cap=None if everything else _OTHERS)]
    fixed = len(head) + len(done) + len(past) + len(others) + 4
    left = None if max_lines is None else max_lines - fixed
    most = None if everything or is_file else _HEADLINE_LINES
    cause = _cause(document, document.finding, width, lines=left, most=most)
    if max_lines is not None and (excess := fixed + len(cause) - max_lines) > 0:
        past = _past(document, width, cap=max(1, _HISTORY - excess))
    return _framed(head, [*cause, *others, *done, *past])


def text_field(name: str, value: str) -> str:
    return f"  {name:<10}: {value}"


def _head(document: Document, width: int) -> list[str]:
    shown, history = document.shown, document.history
    where = ""
    if shown is not None:
        job = f", job {shown.job_id}" if shown.job_id else ""
        code = f" (exit code {shown.exit_code})" if shown.exit_code is not None else ""
        where = f"{code} - attempt {shown.number}{job}"
    lines = [fit(f"{history.name} {document.status}{where}", width), f"  run directory: {history.run_dir}"]
    lines += [f"  {document.survived}"] if document.survived else []
    for name, text in document.notes:
        if name in ("did without", "hang watch", "seemed to hang", "slow rank", "slow run"):
            lines += _split_words(f"  {name:<13}: {clean_line(text)}", width)
        elif name:
            lines.append(fit(f"  {name:<13}: {clean_line(text)}", width))
        else:
            lines.append(f"{'':17}{clean_line(text)}")
    return lines


def _cause(document: Document, finding: Finding, width: int, *, lines: int | None, most: int | None) -> list[str]:
    """The root cause in at most so many `lines`, but for the fields themselves; its headline in at most `most`."""
    title = finding.title if document.is_fine or not finding.headline else f"{finding.title}:"
    found = _split_words(clean_line(title), width, most=most or len(title))
    if finding.headline:
        headline = finding.headline
        if width == _WHOLE and finding.evidence is not None:
            headline = summary_line(finding.evidence.message, limit=_WHOLE) or headline
        found += headline_lines(headline, width, most=most)
    if finding.place:
        found += _split_words(f"  {clean_line(finding.place)}", width)
    found += _fields(finding.facts, width)
    found += [fit(f"  {clean_line(agent)}", width) for agent in document.agents]
    details = _fields(finding.details, width)
    if finding.evidence is None:
        return found + details
    left = None
    if lines is not None:
        left = max(_TRACEBACK_LEAST, min(_TRACEBACK_MOST, lines - len(found) - len(details)))
    return found + _traceback(finding.evidence, width, left, lost=finding.lost) + details


def _fields(facts: Sequence[Fact], width: int) -> list[str]:
    lines = []
    for name, text in facts:
        if name in _WRAPPED:
            lines += _fill(text_field(name, "") if name else f"{'':14}", clean_line(text), width, indent=14)[:4]
        elif name in ("caused by", "began with"):
            lines.append(fit(text_field(name, clean_line(text)), width))
        else:
            lines.append(text_field(name, clean_line(text)))
    return lines


def _traceback(failure: WorkerFailure, width: int, lines: int | None, *, lost: str) -> list[str]:
    excerpt = make_excerpt(failure, lost=lost, most=lines)
    if excerpt is None:
        return []
    field = fit(text_field(excerpt.name, clean_line(excerpt.title)), width).rstrip()
    return [field, *(fit_traceback(f"    {line}", width).rstrip() for line in excerpt.lines)]


def _block(block: Block | None, width: int, *, cap: int | None) -> list[str]:
    if block is None:
        return []
    if cap is not None and block.short:
        return [fit(block.short, width)]
    shown = block.lines if cap is None or len(block.lines) <= cap else block.lines[: cap - 1]
    lines = [block.title] if block.title else []
    for ranks, text, details, _ in shown:
        whose = ranks_text(ranks, limit=None if cap is None else block.most_ranks) if ranks else ""
        lines.append(f"  {whose}{text}")
        lines += [f"    {ranks_text(ranks)}{text}" for ranks, text, *_ in details if cap is None]
    if more := block.left_out(len(shown)):
        lines.append(f"  {more} {_SHOW_ALL}")
    lines = [fit(line, width) for line in (*lines, block.foot) if line]
    if block.evidence is not None:
        lines += _traceback(block.evidence, width, None if cap is None else _CONSEQUENCE_MOST, lost="")
    return lines


def _done(document: Document, width: int) -> list[str]:
    shown, lines = document.shown, [wording.brief(line) for line in document.done]
    if not lines and document.subject.round is None:
        return []
    if not lines:
        return [f"Recovery: nothing is recorded{' yet' if shown is not None and not shown.outcome else ''}"]
    joined = f"Recovery: {'; '.join(lines)}"
    if len(joined) <= width:
        return [joined]
    return ["Recovery:", *(part for line in lines for part in _split_words(f"  {line}", width))]


def _bad_nodes(document: Document, width: int, *, cap: int | None) -> list[str]:
    lines = []
    for index, (score, is_excluded) in enumerate(document.bad_nodes[:cap]):
        done = ": left out of later attempts" if is_excluded else ""
        head = "Bad nodes:" if index == 0 else "          "
        lines += _split_words(f"{head} {score.node} ({clean_line(score.why)}){done}", width)
    if cap is not None and (more := len(document.bad_nodes) - cap) > 0:
        lines.append(f"           and {plural(more, 'more')} {_SHOW_ALL}")
    return lines


def _past(document: Document, width: int, *, cap: int | None) -> list[str]:
    """The last rounds are kept where `cap` leaves no room; an attempt without rounds names its last failure."""
    if not document.attempts:
        return []
    only = document.attempts[0].attempt
    has_restarts = any(part.in_process or part.fresh_starts for part in only.rounds)
    if len(document.attempts) == 1 and len(only.rounds) < 2 and not has_restarts:
        return _split_words(_only_attempt(document, only), width)
    blocks = [(entry, _round_lines(entry, document.goodput, everything=cap is None)) for entry in document.attempts]
    hidden = 0
    if cap is not None and sum(1 + len(rounds) for _, rounds in blocks) > cap:
        hidden = max(0, len(blocks) - (cap + 1) // 2)
        blocks = _cut_to(blocks[hidden:], cap - (1 if hidden else 0))
    lines = [f"  ... {plural(hidden, 'earlier attempt')} {_SHOW_ALL}"] if hidden else []
    for entry, rounds in blocks:
        lines.append(_attempt_line(entry, is_alone=not rounds))
        lines += rounds
    return ["Attempts and rounds:", *(fit(line, width) for line in lines), *_goodput(document, width)]


def _only_attempt(document: Document, attempt: AttemptHistory) -> str:
    part = attempt.rounds[0] if attempt.rounds else None
    size = wording.describe_size(part) if part is not None and part.nodes else plural(len(attempt.nodes), "node")
    when = f"from {time_text(attempt.started_ns)}" if attempt.started_ns else "at an unknown time"
    lasted = f" for {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    rounds = f"one round; progress: {document.goodput.progress.value}" if attempt.rounds else "no round"
    if goodput := _goodput_text(document):
        rounds = f"one round. {goodput}. {describe_progress(document.goodput)}"
    return f"Ran {when}{lasted}: {size}, {rounds}"


def _cut_to(blocks: list[tuple[AttemptEntry, list[str]]], lines: int) -> list[tuple[AttemptEntry, list[str]]]:
    room, kept = lines - len(blocks), []
    for attempt, rounds in reversed(blocks):
        shown = rounds
        if len(rounds) > room:
            more = f"    ... {plural(len(rounds) - room + 1, 'line')} {_SHOW_ALL}"
            shown = [more, *rounds[len(rounds) - room + 1 :]] if room > 1 else []
        kept.append((attempt, shown))
        room -= len(shown)
    return kept[::-1]


def _attempt_line(entry: AttemptEntry, *, is_alone: bool) -> str:
    attempt = entry.attempt
    job = f" (job {attempt.job_id})" if attempt.job_id else ""
    when = f" {time_text(attempt.started_ns)}" if attempt.started_ns else ""
    lasted = f", {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    nodes = f", {plural(len(attempt.nodes), 'node')}" if attempt.nodes else ""
    code = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
    last = next((one for one in reversed(entry.rounds) if is_alone and one.failure), None)
    if last is not None:
        code = f", at last in round {last.part.index}: {wording.brief(last.failure)}"
    elif attempt.outcome not in ("", Outcome.SUCCEEDED.value, Outcome.FAILED.value) and attempt.reason:
        code += f": {wording.brief(attempt.reason)}"
    return f"  attempt {attempt.number}{job}{when}{nodes}{lasted}: {entry.end}{code}"


def _round_lines(attempt: AttemptEntry, goodput: Goodput, *, everything: bool) -> list[str]:
    costs: dict[int, list[Cost]] = {}
    for cost in goodput.costs:
        if cost.attempt == attempt.attempt.number:
            costs.setdefault(cost.round, []).append(cost)
    groups: list[list[RoundEntry]] = []
    for entry in attempt.rounds:
        if groups and groups[-1][0].alike == entry.alike and entry.alike:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    lines = []
    for first, *more in groups:
        parts = [first.part, *(entry.part for entry in more)]
        name = f"rounds {parts[0].index}-{parts[-1].index}, alike" if more else f"round {parts[0].index}"
        lasted = f", {duration(parts[0].seconds)}" if parts[0].seconds is not None else ""
        lost = [cost for part in parts for cost in costs.get(part.index, ())]
        spent = cost_text(lost, steps_known=goodput.steps_known)
        since = f", since {time_text(first.since_ns)}" if first.since_ns else ""
        lines.append(f"    {name}: {first.size}{lasted}{spent}: {wording.brief(first.how)}{since}")
        restarts = wording.describe_fresh_starts(parts[0].fresh_starts)
        restarts += wording.describe_restarts(parts[0].in_process, everything=everything)
        lines += [f"      {clean_line(line)}" for line in restarts]
    return lines


def _goodput(document: Document, width: int) -> list[str]:
    text = _goodput_text(document)
    if not text and not document.goodput.costs:
        return []
    lines = [*(_split_words(text, width) if text else ()), *_split_words(describe_progress(document.goodput), width)]
    for one in document.advice:
        lines += _split_words(f"Advice: {one.text}", width)
    return lines


def _goodput_text(document: Document) -> str:
    goodput = document.goodput
    if not is_worth_showing(goodput):
        return ""
    until = time_text(goodput.until_ns, date=False, fine=True)
    so_far = "" if document.history.attempts[-1].outcome else f" until {until}, the last that is known"
    return goodput_text(goodput, so_far=so_far)


def _fill(lead: str, text: str, width: int, *, indent: int) -> list[str]:
    wrapper = TextWrapper(width, lead, " " * indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [lead]


def _split_words(text: str, width: int, *, most: int = 3) -> list[str]:
    words = text.lstrip(" ")
    lines = _fill(text[: len(text) - len(words)], words, width, indent=6)
    return lines if len(lines) < most else [*lines[: most - 1], fit(" ".join(lines[most - 1 :]), width)]


def headline_lines(text: str, width: int, *, most: int | None = _HEADLINE_LINES) -> list[str]:
    wrapper = TextWrapper(width, "  ", "  ", break_on_hyphens=False, max_lines=most, placeholder=" ...")
    return wrapper.wrap(wording.brief(text)) or ["  (no message)"]


_FRAME = re.compile(r'(\s*(?:\| )*\s*File ")([^"]+)(", line \d+.*)')


def fit_traceback(line: str, width: int) -> str:
    """A line of a traceback that is cut at `width`: of a frame, the beginning of the path, not the function."""
    match = _FRAME.fullmatch(line) if len(line) > width else None
    if match is None:
        return fit(line, width)
    room = width - len(match[1]) - len(match[3]) - 3
    cut = match[2][-room:] if room > 0 else ""
    start = cut.find("/")
    return f"{match[1]}...{cut[start:]}{match[3]}" if start >= 0 else fit(line, width)


def world_size(history: RunHistory, *, attempt: int | None) -> int:
    rounds = [part for item in history.attempts if attempt in (None, item.number) for part in item.rounds]
    known = [part.world_size or 0 for part in rounds]
    seen = [1 + failure.global_rank for part in rounds for failure in part.failures]
    return max([0, *known, *seen])


def render_ranks(
    history: RunHistory,
    ranks: Sequence[int],
    *,
    attempt: int | None = None,
    everywhere: bool = False,
) -> str:
    """`everywhere`: of all rounds, not of the one that the report is about, or the newest where nothing failed."""
    rounds = [(item, part) for item in history.attempts if attempt in (None, item.number) for part in item.rounds]
    rounds = [(item, part) for item, part in rounds if part.nodes] or rounds
    subject = choose_subject(history, attempt=attempt)
    chosen = rounds
    if not everywhere:
        chosen = [(item, part) for item, part in rounds if item is subject.attempt and part is subject.round]
        chosen = chosen or rounds[-1:]
    if not chosen:
        return "no round has begun: nothing is known of any rank\n"
    lines = [line for item, part in chosen for line in _ranks_of_round(history, item, part, ranks)]
    others = [part for _, part in rounds if not any(part is other for _, other in chosen)]
    elsewhere = [failure for part in others for failure in part.failures if failure.global_rank in ranks]
    if elsewhere:
        lines.append(f"... and {plural(len(elsewhere), 'failure')} of theirs in other rounds (--all shows them)")
    return "\n".join(map(clean_line, lines)) + "\n"


def _ranks_of_round(
    history: RunHistory, attempt: AttemptHistory, part: RoundHistory, ranks: Sequence[int]
) -> list[str]:
    lines = ["=" * _RULE, f"Attempt {attempt.number}, round {part.index}"]
    failures = {failure.global_rank: failure for failure in part.failures}
    paths = RunPaths(Path(history.run_dir)).attempt(attempt.number)
    shown: dict[str, int] = {}
    for rank in ranks:
        place = paths.rank(part.index, rank)
        lines.append("-" * _RULE)
        failure = failures.get(rank)
        lines += _failed(failure, shown) if failure is not None else _well(part, rank)
        output = paths.output if paths.records.exists() and not place.root.is_dir() else place.root
        lines.append(text_field("output", clean_line(str(output))))
        try:
            text = read_bytes(place.stacks, limit=256 << 10).decode("utf-8", "backslashreplace")
        except (OSError, UnsafePathError):
            text = ""
        if text.strip():
            lines += [text_field("stacks", "of all its threads:"), *(f"    {line}" for line in clean_lines(text))]
    return lines


def _failed(failure: WorkerFailure, shown: dict[str, int]) -> list[str]:
    local = f" (local_rank: {failure.local_rank})" if failure.local_rank >= 0 else ""
    fields = [
        ("time", f"{time_text(failure.ended_ns, fine=True)} ({failure.host}'s clock)"),
        ("exitcode", wording.describe_exit(failure)),
        ("kind", wording.describe_class(failure)),
        ("error_file", failure.error_file or wording.NOT_AVAILABLE),
        *([("", failure.problem)] if failure.problem else []),
        *([("last step", str(failure.last_step))] if failure.last_step is not None else []),
    ]
    lines = [f"Rank {failure.global_rank}{local} on {clean_line(failure.host)}: {clean_line(failure.headline)}"]
    lines += [text_field(name, clean_line(text)) for name, text in fields]
    message = clean_lines(failure.message)
    if len(message) > 1:
        lines += [text_field("message", "").rstrip(), *(f"    {line}" for line in message)]
    for name, text in (("traceback", failure.traceback), ("stderr", failure.stderr_tail)):
        if not text or (name == "stderr" and failure.traceback and failure.traceback.strip() in text):
            continue
        before = shown.setdefault(text, failure.global_rank)
        if before != failure.global_rank:
            lines.append(text_field(name, f"the same as that of rank {before} above"))
        else:
            lines += [text_field(name, "").rstrip(), *(f"    {line}" for line in fold_repeats(clean_lines(text)))]
    if not failure.traceback and not failure.stderr_tail:
        lines.append(text_field("stderr", "empty, so there is no traceback"))
    return lines


def _well(part: RoundHistory, rank: int) -> list[str]:
    node = next((node for node in part.nodes if rank in node.ranks), None)
    where = f" on {clean_line(node.host)}" if node is not None else ""
    if node is None and part.nodes:
        return [f"Rank {rank}: was not in this round, or its node reported nothing"]
    status = next((status for status in part.rank_statuses if status.rank == rank), None)
    loss = next((loss for loss in part.lost_nodes if node is not None and loss.node == node.node), None)
    lost = f"; {clean_line(loss.summary)}" if loss is not None else ""
    lines = [f"Rank {rank}{where}: no failure of it is recorded{lost}"]
    if status is not None:
        section = f" in {clean_line(status.section)}" if status.section else ""
        sign = f"{status.at}{section}, {status.age:.1f} s old at {time_text(status.reported_ns)}"
        lines.append(text_field("last sign", sign))
    group = next((group for group in part.stacks if rank in group.ranks and group.stack), None)
    if group is not None:
        lines += [text_field("stack", "of its main thread:"), *(f"    {clean_line(line)}" for line in group.stack)]
    return lines
