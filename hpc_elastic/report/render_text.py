"""The report that stands in the job log: a document on one screen, for a person who opens it at 3 a.m.

The root cause as torch prints it, with the verdict and the end of its traceback; what else failed in that round,
folded; where the ranks stood, if it was a hang; what was done; one line for each attempt and round. ASCII only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpc_elastic.base.text import clean_line, clean_lines, duration, fit, plural, ranks_text, time_text
from hpc_elastic.failures.classify import is_same_failure
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.document import Document, Fold, RoundEntry, build_document, fold_failures, round_entry
from hpc_elastic.report.goodput import Cost, Goodput
from hpc_elastic.report.history import AttemptHistory, RankStatus, RoundHistory, RunHistory, StackGroup
from hpc_elastic.report.subject import Subject
from hpc_elastic.report.verdict import Verdict
from hpc_elastic.report.wording import FAILURE_WORDS, describe_outcome, describe_restarts, describe_silence

DEFAULT_LINES = 40
DEFAULT_WIDTH = 120
_NARROWEST = 60
_RULE = 60
_OTHERS = 5
_HISTORY = 9
_BAD_NODES = 3
_TRACEBACK_MOST = 20
_TRACEBACK_LEAST = 4
_STACK_WANTED = 12
"""Lines of the stack that a message of many lines leaves room for, and so many of the message are shown in any case."""
_MESSAGE_LEAST = 3
_REPEATS = 3
_WRAPPED = ("", "verdict", "kind", "reason", "last step")
"""Fields whose text goes on in the next lines; paths, times and places are never cut."""
_SHOW_ALL = "(--all shows them)"


def render_text(
    history: RunHistory,
    *,
    attempt: int | None = None,
    max_lines: int | None = DEFAULT_LINES,
    width: int = DEFAULT_WIDTH,
    goodput: Goodput | None = None,
) -> str:
    """Render the report.

    Args:
        history: The run.
        attempt: The attempt that it is about; None: the last one in which something failed.
        max_lines: At most so many lines; None: everything.
        width: Longer lines are cut, but for paths.
        goodput: Of the run, where it has been measured before.

    Returns:
        Text that ends with a line break.
    """
    document = build_document(history, attempt=attempt, goodput=goodput)
    width = max(_NARROWEST, width)
    everything = max_lines is None
    head = _head(document, width)
    done = [*_done(document, width), *_bad_nodes(history, width, cap=None if everything else _BAD_NODES)]
    past = _past(document, width, cap=None if everything else _HISTORY)
    others: list[str] = []
    if (part := document.subject.round) is not None:
        others = _others(part, document.subject.verdict, width, cap=None if everything else _OTHERS)
        others += _stacks(part, width, cap=None if everything else _OTHERS)
    fixed = len(head) + len(done) + len(past) + len(others) + 4
    cause = _cause(document, width, lines=None if max_lines is None else max_lines - fixed)
    if max_lines is not None and (excess := fixed + len(cause) - max_lines) > 0:
        past = _past(document, width, cap=max(1, _HISTORY - excess))
    rule, line = "=" * _RULE, "-" * _RULE
    parts = [rule, *head, line, "Root Cause (first observed failure):", *cause]
    if document.is_fine:
        parts = [rule, *head, line, "No worker failed by itself."]
    return "\n".join(map(clean_line, [*parts, *others, *done, *past, rule])) + "\n"


def text_field(name: str, value: str) -> str:
    """A field as torch prints it."""
    return f"  {name:<10}: {value}"


def _head(document: Document, width: int) -> list[str]:
    shown, history = document.shown, document.history
    status = document.status.upper() if shown is not None and shown.outcome else document.status
    where = ""
    if shown is not None:
        job = f", job {shown.job_id}" if shown.job_id else ""
        code = f" (exit code {shown.exit_code})" if shown.exit_code is not None else ""
        where = f"{code} - attempt {shown.number}{job}"
    lines = [fit(f"{history.name} {status}{where}", width), f"  run directory: {history.run_dir}"]
    lines += [f"  {document.survived}"] if document.survived else []
    for name, text in document.notes:
        if name == "did without":
            lines += _split_words(f"  {name:<13}: {clean_line(text)}", width)
        elif name:
            lines.append(fit(f"  {name:<13}: {clean_line(text)}", width))
        else:
            lines.append(f"{'':17}{clean_line(text)}")
    return lines


def _cause(document: Document, width: int, *, lines: int | None) -> list[str]:
    """The lines below `Root Cause`; at most so many where `lines` says it, but for the fields themselves."""
    found = (
        headline_lines(document.headline, width) if _is_known(document.subject.verdict) else [f"  {document.headline}"]
    )
    for name, text in document.facts:
        if name in _WRAPPED:
            found += _wrapped(name, text, width)
        elif name == "caused by":
            found.append(fit(text_field(name, clean_line(text)), width))
        else:
            found.append(text_field(name, clean_line(text)))
    found += [fit(f"  {clean_line(agent)}", width) for agent in document.agents]
    failure = document.subject.verdict.failure
    if failure is None or document.subject.verdict.lost_node is not None:
        return found
    left = None if lines is None else max(_TRACEBACK_LEAST, min(_TRACEBACK_MOST, lines - len(found)))
    return found + _traceback(failure, width, left, lost=_lost_stderr(document.subject.attempt, failure))


def _is_known(verdict: Verdict) -> bool:
    known = verdict.failure or verdict.lost_node or verdict.what or verdict.headline
    return bool(known)


def _lost_stderr(attempt: AttemptHistory | None, failure: WorkerFailure) -> str:
    """Why its stderr is not in its file; empty where it is."""
    for loss in attempt.output_lost if attempt is not None else ():
        for stream in loss.streams:
            if (stream.round, stream.rank, stream.stream) == (failure.round, failure.global_rank, "stderr"):
                where = "" if stream.not_in_job_log else "; the job log has it"
                return f"what it printed is not in its file: {loss.reason}{where}" if stream.not_in_file else ""
    return ""


def _traceback(failure: WorkerFailure, width: int, lines: int | None, *, lost: str) -> list[str]:
    """The field ``traceback``, and as many of its last lines as there is room for: the cause stands at its end."""
    title = ""
    if failure.traceback:
        body = clean_lines(failure.traceback)
        if body and body[0].startswith("Traceback ("):
            title, body = body[0], body[1:]
    elif failure.stderr_tail:
        title, body = "none was printed; the end of its stderr:", clean_lines(failure.stderr_tail)
    else:
        if lost:
            return [fit(text_field("traceback", clean_line(lost)), width)]
        hint = " (closed or redirected by the script?)" if failure.exitcode == 1 else ""
        return [text_field("traceback", f"none was printed, and nothing else on stderr{hint}")]
    body = fold_repeats(body)
    if lines is not None and len(body) > lines - 1:
        body = _cut(body, max(1, lines - 2), message=_message_lines(failure))
    return [text_field("traceback", title).rstrip(), *(fit_traceback(f"    {line}", width).rstrip() for line in body)]


def _message_lines(failure: WorkerFailure) -> int:
    """How many lines at the traceback's end are the exception's message; 0 where it quotes another's traceback."""
    body, message = failure.traceback.rstrip("\n"), failure.message.rstrip("\n")
    if not body or "Traceback (most recent call last):" in message:
        return 0
    lines = message.count("\n")
    first = body.split("\n")[-lines - 1 :][0]
    return lines + 1 if message and first.rstrip().endswith(message.split("\n", 1)[0].rstrip()[-60:]) else 0


def _cut(body: list[str], room: int, *, message: int) -> list[str]:
    """The end of it, where the cause stands. Of a long message only the beginning: the stack is worth more."""
    kept = min(message, max(_MESSAGE_LEAST, room - _STACK_WANTED))
    if message - kept > 1 and room > _MESSAGE_LEAST:
        body = [*body[: len(body) - message + kept], f"... {message - kept} more lines {_SHOW_ALL}"]
    if len(body) <= room + 1:
        return body
    return [f"... {len(body) - room} lines above {_SHOW_ALL}", *body[-room:]]


def _others(part: RoundHistory, verdict: Verdict, width: int, *, cap: int | None) -> list[str]:
    """Failures besides the verdict's, folded, in at most `cap` lines; None: all."""
    root = verdict.failure
    rest = [failure for failure in part.failures if failure is not root]
    lost = [loss for loss in part.lost_nodes if loss is not verdict.lost_node]
    if not rest and not lost:
        return []
    order = list(FAILURE_WORDS)
    folds = sorted(fold_failures(rest, part.clocks), key=lambda fold: order.index(fold.first.failure_class))
    lines = [f"  {clean_line(describe_silence(loss))}" for loss in lost]
    for fold in folds:
        lines.append(_fold_line(fold, root, part.clocks))
        if cap is None and len(fold.wordings) > 1:
            lines += [f"    {ranks_text(w.ranks, limit=40)}: {brief(w.first.headline)}" for w in fold.wordings]
    if cap is not None and len(lines) > cap:
        hidden = sum(len(fold.members) for fold in folds[cap - 1 - len(lost) :]) if len(lost) < cap else len(rest)
        lines = [*lines[: cap - 1], f"  ... {hidden} failures of {len(lines) - cap + 1} more kinds {_SHOW_ALL}"]
    return [f"Other failures in that round: {len(rest) + len(lost)}", *(fit(line, width) for line in lines)]


def _fold_line(fold: Fold, root: WorkerFailure | None, clocks: Clocks) -> str:
    first = fold.first
    hosts = clean_line(fold.hosts[0]) if len(fold.hosts) == 1 else f"{len(fold.hosts)} hosts"
    what = FAILURE_WORDS[first.failure_class] if first.failure_class is not FailureClass.ROOT else ""
    if root is not None and is_same_failure(first, root):
        what = "the same failure"
    label = ", ".join(filter(None, (what, f"in {len(fold.wordings)} wordings" if len(fold.wordings) > 1 else "")))
    at = time_text(clocks.of_failure(first).at_ns, date=False, fine=True)
    whose = f"{ranks_text(fold.ranks, limit=30)} on {hosts}, from {at}"
    return f"  {whose}{f' [{label}]' if label else ''}: {brief(fold.headline)}"


def _stacks(part: RoundHistory, width: int, *, cap: int | None) -> list[str]:
    """Where all ranks stood, the odd one out first, and their last heartbeats."""
    if not part.stacks:
        return []
    lines = [f"  {ranks_text(group.ranks, limit=40)}: {_where_stood(group)}" for group in part.stacks]
    if cap is not None and len(lines) > cap:
        hidden = sum(len(group.ranks) for group in part.stacks[cap - 1 :])
        lines = [*lines[: cap - 1], f"  ... {hidden} more ranks {_SHOW_ALL}"]
    title = "Where each rank's main thread was (innermost call first):"
    lines = [title, *lines, *_threads(part, is_short=cap is not None), *_heartbeats(part, cap=cap)]
    return [fit(line, width) for line in lines]


def _where_stood(group: StackGroup) -> str:
    if not group.stack:
        return f"no Python stack; {clean_line(group.state)}" if group.state else "no Python stack"
    return " < ".join(_frame(frame) for frame in reversed(group.stack[-3:]))


def _frame(frame: str) -> str:
    """``/a/b/train.py:44 step`` -> ``step (train.py:44)``."""
    place, _, function = clean_line(frame).partition(" ")
    return f"{function} ({place.rsplit('/', 1)[-1]})"


def _threads(part: RoundHistory, *, is_short: bool) -> list[str]:
    """The other threads: of many ranks with a dozen each, their number will do."""
    if not part.threads:
        return []
    if is_short:
        return [f"  other threads: {plural(len(part.threads), 'more place')} (--all shows them; stacks.txt has all)"]
    lines = []
    for group in part.threads:
        name = f" [{clean_line(group.name)}]" if group.name else ""
        lines.append(f"  {ranks_text(group.ranks, limit=40)}{name}: {_where_stood(group)}")
    return ["Where the other threads were:", *lines]


def _heartbeats(part: RoundHistory, *, cap: int | None) -> list[str]:
    """Each rank's last one, those at the same step and in the same section together; the furthest behind first."""
    groups: dict[tuple[int, str], list[RankStatus]] = {}
    for status in part.rank_statuses:
        groups.setdefault((-1 if status.step is None else status.step, status.section), []).append(status)
    lines = []
    for (step, section), statuses in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])):
        at = f"at step {step}" if step >= 0 else "no step"
        ages = [status.age for status in statuses]
        silent = "-".join(dict.fromkeys((f"{min(ages):.1f}", f"{max(ages):.1f}")))
        whose = ranks_text([status.rank for status in statuses], limit=40)
        lines.append(f"  {whose}: {at}, section {clean_line(section)!r}, silent for {silent} s")
    if cap is not None and len(lines) > cap:
        lines = [*lines[: cap - 1], f"  ... {len(lines) - cap + 1} more steps and sections {_SHOW_ALL}"]
    return ["Last heartbeats:", *lines] if lines else []


def _done(document: Document, width: int) -> list[str]:
    """What was done about it, without what stands above already."""
    subject, shown, lines = document.subject, document.shown, document.done
    if not lines and subject.round is None:
        return []
    title = "What was done about it:"
    if not lines:
        return [f"{title} nothing is recorded{' yet' if shown is not None and not shown.outcome else ''}"]
    kept = [_without_cause(_without_repeat(line, lines[0]), subject) for line in lines]
    return [title, *(part for line in kept for part in _split_words(f"  {brief(line)}", width))]


def _without_repeat(line: str, first: str) -> str:
    """The supervisor's reason quotes the coordinator's, which stands above it already."""
    reason = first.partition(": ")[2]
    if line is first or len(reason) <= 20:
        return line
    return line.replace(f": {reason}", "").replace(reason, "").rstrip(" :")


def _without_cause(line: str, subject: Subject) -> str:
    """The coordinator's reason quotes the failure: where that is the root cause, it stands above it already."""
    failure = subject.verdict.failure
    if failure is None:
        return line
    before, quote, rest = line.partition(f": rank {failure.global_rank}: ")
    said, arrow, after = rest.rpartition(" -> round ")
    said = said if arrow else rest
    if not quote or not failure.headline.startswith(said.removesuffix("...").rstrip()):
        return line
    return f"{before.removesuffix(' after')}{arrow}{after if arrow else ''}"


def _bad_nodes(history: RunHistory, width: int, *, cap: int | None) -> list[str]:
    """The worst first, each in as many lines as its reason needs, three at most."""
    lines = []
    for index, score in enumerate(history.bad_nodes[:cap]):
        done = ": left out of later attempts" if score.node in history.excluded else ""
        head = "Bad nodes:" if index == 0 else "          "
        lines += _split_words(f"{head} {score.node} ({clean_line(score.why)}){done}", width)
    if cap is not None and (more := len(history.bad_nodes) - cap) > 0:
        lines.append(f"           and {plural(more, 'more')} {_SHOW_ALL}")
    return lines


def _past(document: Document, width: int, *, cap: int | None) -> list[str]:
    """One line per attempt and round; rounds that went alike share one.

    Args:
        document: The report.
        width: Of a line.
        cap: At most so many lines, without the titles. The last rounds are kept then, and of an attempt whose rounds
            are not shown its last failure stands in its own line.
    """
    history = document.history
    if not history.attempts:
        return []
    costs = {(cost.attempt, cost.round): cost for cost in document.goodput.costs}
    blocks = [(attempt, _round_lines(history, attempt, costs, everything=cap is None)) for attempt in history.attempts]
    hidden = 0
    if cap is not None and sum(1 + len(rounds) for _, rounds in blocks) > cap:
        hidden = max(0, len(blocks) - (cap + 1) // 2)
        blocks = _cut_to(blocks[hidden:], cap - (1 if hidden else 0))
    lines = [f"  ... {plural(hidden, 'earlier attempt')} {_SHOW_ALL}"] if hidden else []
    for attempt, rounds in blocks:
        lines.append(_attempt_line(history, attempt, is_alone=not rounds))
        lines += rounds
    return ["Attempts and rounds:", *(fit(line, width) for line in lines), *_goodput(document, width)]


def _cut_to(blocks: list[tuple[AttemptHistory, list[str]]], lines: int) -> list[tuple[AttemptHistory, list[str]]]:
    """Every attempt, and of the last ones as many rounds as there is room for."""
    room, kept = lines - len(blocks), []
    for attempt, rounds in reversed(blocks):
        shown = rounds
        if len(rounds) > room:
            more = f"    ... {plural(len(rounds) - room + 1, 'line')} {_SHOW_ALL}"
            shown = [more, *rounds[len(rounds) - room + 1 :]] if room > 1 else []
        kept.append((attempt, shown))
        room -= len(shown)
    return kept[::-1]


def _attempt_line(history: RunHistory, attempt: AttemptHistory, *, is_alone: bool) -> str:
    job = f" (job {attempt.job_id})" if attempt.job_id else ""
    when = f" {time_text(attempt.started_ns)}" if attempt.started_ns else ""
    lasted = f", {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    nodes = f", {plural(len(attempt.nodes), 'node')}" if attempt.nodes else ""
    code = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
    end = describe_outcome(history, attempt)
    broken = (round_entry(history, attempt, part) for part in reversed(attempt.rounds)) if is_alone else ()
    last = next((entry for entry in broken if entry.failure), None)
    if last is not None:
        code = f", at last in round {last.part.index}: {brief(last.failure)}"
    return f"  attempt {attempt.number}{job}{when}{nodes}{lasted}: {end}{code}"


def _round_lines(
    history: RunHistory, attempt: AttemptHistory, costs: Mapping[tuple[int, int], Cost], *, everything: bool
) -> list[str]:
    groups: list[list[RoundEntry]] = []
    for part in attempt.rounds:
        entry = round_entry(history, attempt, part)
        if groups and groups[-1][0].alike == entry.alike and entry.alike:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    lines = []
    for first, *more in groups:
        parts = [first.part, *(entry.part for entry in more)]
        name = f"rounds {parts[0].index}-{parts[-1].index}, alike" if more else f"round {parts[0].index}"
        lasted = f", {duration(parts[0].seconds)}" if parts[0].seconds is not None else ""
        lost = [costs[attempt.number, part.index] for part in parts if (attempt.number, part.index) in costs]
        lines.append(f"    {name}: {first.size}{lasted}{_cost(lost)}: {brief(first.how)}")
        restarts = describe_restarts(parts[0].in_process, everything=everything)
        lines += [f"      {clean_line(line)}" for line in restarts]
    return lines


def _cost(costs: Sequence[Cost]) -> str:
    if not costs:
        return ""
    queued = sum(cost.queued for cost in costs)
    more = " in all" if len(costs) > 1 else ""
    more += f" ({duration(queued)} queued)" if queued >= 0.05 else ""
    return f", cost {duration(sum(cost.seconds for cost in costs))}{more}"


def _goodput(document: Document, width: int) -> list[str]:
    """How much of the time was training, and where the rest went."""
    goodput = document.goodput
    if goodput.share is None:
        return []
    until = time_text(goodput.until_ns, date=False, fine=True)
    so_far = "" if document.history.attempts[-1].outcome else f" until {until}, the last that is known"
    failures = sum(1 for cost in goodput.costs if cost.is_failure)
    changes = len(goodput.costs) - failures
    after = [*([plural(failures, "failure")] if failures else []), *([plural(changes, "change")] if changes else [])]
    parts = [
        (goodput.starting, "to start"),
        (goodput.interrupted, f"for {' and '.join(after)}"),
        (goodput.queued, "queued"),
        (goodput.ending, "to end"),
    ]
    rest = [f"{duration(seconds)} {what}" for seconds, what in parts if seconds >= 0.05]
    text = f"Goodput: {100 * goodput.share:.1f} % of {duration(goodput.wall)}{so_far}"
    return _split_words(f"{text} ({', '.join(rest)})" if rest else text, width)


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """A field whose text goes on in as many lines as it needs, four at most."""
    lines, room = [""], width - 14
    for word in clean_line(text).split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    first = text_field(name, lines[0]) if name else f"{'':14}{lines[0]}"
    return [first, *(f"{'':14}{line}" for line in lines[1:4])]


def _split_words(text: str, width: int) -> list[str]:
    """An entry in at most three lines, indented from the second on."""
    words = text.lstrip(" ")
    lines = [text[: len(text) - len(words)]]
    for word in words.split(" "):
        if len(lines[-1]) + len(word) + 1 > width and lines[-1].strip():
            lines.append("     ")
        lines[-1] += f" {word}" if lines[-1].strip() or len(lines) > 1 else word
    return [*lines[:2], fit(" ".join([lines[2], *lines[3:]]), width)] if len(lines) > 2 else lines


def headline_lines(text: str, width: int) -> list[str]:
    """What happened, in at most three lines, broken between words where there are any."""
    lines: list[str] = []
    text, room = brief(text).strip(), width - 2
    while text and len(lines) < 3:
        line = text[:room]
        if len(text) > room and (blank := text.rfind(" ", room // 2, room + 1)) > 0:
            line = text[:blank]
        lines.append(line)
        text = text[len(line) :].lstrip()
    if text:
        lines[-1] = f"{lines[-1][: room - 4].rstrip()} ..."
    return [f"  {line}" for line in lines] or ["  (no message)"]


_CPP_PLACE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|hpp|h|cu):\d+\] ")


def brief(text: str) -> str:
    """One line, without the place in some library's C++ source that stands before what is meant."""
    return _CPP_PLACE.sub("", clean_line(text))


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


def fold_repeats(lines: list[str]) -> list[str]:
    """Runs of the same line in a stack, as Python's own tracebacks fold them."""
    folded: list[str] = []
    at = 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and lines[end] == lines[at]:
            end += 1
        if end - at > _REPEATS + 1 and lines[at].lstrip().startswith("File "):
            indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
            folded += [*lines[at : at + _REPEATS], f"{indent}[Previous line repeated {end - at - _REPEATS} more times]"]
        else:
            folded += lines[at:end]
        at = end
    return folded
