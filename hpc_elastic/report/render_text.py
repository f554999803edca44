"""The report that stands in the job log: on one screen, for whoever opens it at 3 a.m.

ASCII only, so that no terminal and no log chokes on it; what workers printed is cleaned of control characters.
"""

from __future__ import annotations

import re
from datetime import datetime

from hpc_elastic.failures.classify import FailureClass
from hpc_elastic.failures.traceback_text import clean_text, find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.fold import Fold, fold_failures, rank_ranges
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.output_losses import describe_losses
from hpc_elastic.report.subject import Subject, choose_subject, verdict_of
from hpc_elastic.report.verdict import Cause, Verdict

DEFAULT_LINES = 40
DEFAULT_WIDTH = 120
_NARROWEST = 60
_RULE = 60
_OTHERS = 5
_HISTORY = 9
_TRACEBACK_MOST = 20
_TRACEBACK_LEAST = 4
_CLASS_WORDS = {
    FailureClass.ROOT: "",
    FailureClass.SYMPTOM: "consequence",
    FailureClass.STOPPED_BY_US: "ended by this job",
    FailureClass.INFRASTRUCTURE: "infrastructure",
    FailureClass.HANG: "hang",
}


def render_text(
    history: RunHistory,
    *,
    attempt: int | None = None,
    max_lines: int | None = DEFAULT_LINES,
    width: int = DEFAULT_WIDTH,
) -> str:
    """Render the report.

    Args:
        history: The run.
        attempt: The attempt that it is about; None: the last one in which something failed.
        max_lines: At most so many lines; None: everything.
        width: Longer lines are cut, but for paths.

    Returns:
        Text that ends with a line break.
    """
    subject = choose_subject(history, attempt=attempt)
    width = max(_NARROWEST, width)
    everything = max_lines is None
    shown = _attempt_shown(history, attempt)
    survived = _broken_rounds(history, attempt) if shown is not None and shown.outcome == "succeeded" else 0
    head = _head(history, shown, width, survived=survived)
    done = _done(history, subject, shown, width)
    past = _past(history, width, cap=None if everything else _HISTORY)
    others: list[str] = []
    if subject.round is not None:
        others = _others(subject.round, subject.verdict, width, cap=None if everything else _OTHERS)
        others += _stacks(subject.round, width, cap=None if everything else _OTHERS)
    fixed = len(head) + len(done) + len(past) + len(others) + 4
    root = _root(subject, shown, width, lines=None if max_lines is None else max_lines - fixed)
    rule, line = "=" * _RULE, "-" * _RULE
    parts = [rule, *head, line, "Root Cause (first observed failure):", *root]
    if subject.verdict.cause is Cause.NONE and _is_fine(shown):
        parts = [rule, *head, line, "No worker failed by itself."]
    parts += [*others, *done, *past, rule]
    return "\n".join(parts) + "\n"


def _attempt_shown(history: RunHistory, attempt: int | None) -> AttemptHistory | None:
    if attempt is None:
        return history.attempts[-1] if history.attempts else None
    return next((part for part in history.attempts if part.number == attempt), None)


def _broken_rounds(history: RunHistory, attempt: int | None) -> int:
    parts = [part for part in history.attempts if attempt is None or part.number == attempt]
    return sum(1 for part in parts for item in part.rounds if verdict_of(item).cause is not Cause.NONE)


def _is_fine(attempt: AttemptHistory | None) -> bool:
    return attempt is None or attempt.outcome in ("", "succeeded")


def _head(history: RunHistory, attempt: AttemptHistory | None, width: int, *, survived: int) -> list[str]:
    status = describe_outcome(history, attempt)
    if attempt is not None and attempt.outcome:
        status = status.upper()
    where = ""
    if attempt is not None:
        job = f", job {attempt.job_id}" if attempt.job_id else ""
        code = f" (exit code {attempt.exit_code})" if attempt.exit_code is not None else ""
        where = f"{code} - attempt {attempt.number}{job}"
    lines = [_fit(f"{history.name} {status}{where}", width), f"  run directory: {history.run_dir}"]
    if survived == 1:
        lines.append("  One failure was survived; the run went on and succeeded.")
    elif survived:
        lines.append(f"  {survived} failures were survived, of which the last is told here; the run succeeded.")
    if attempt is not None:
        lines += [_fit(f"  output lost  : {_clean(line)}", width) for line in describe_losses(attempt.output_lost)]
    problems = [*history.problems, *(attempt.problems if attempt is not None else ())]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        lines.append(_fit(f"  incomplete   : {problems[0]}{more}", width))
    return lines


def describe_outcome(history: RunHistory, attempt: AttemptHistory | None) -> str:
    """How an attempt ended, in words."""
    if attempt is None:
        return "has no attempt yet"
    if attempt.outcome:
        return attempt.outcome.replace("_", " ")
    if attempt.number < history.attempts[-1].number:
        return "ended without a word"
    return "is still running (or its supervisor died)"


def _root(subject: Subject, shown: AttemptHistory | None, width: int, *, lines: int | None) -> list[str]:
    verdict, where = subject.verdict, _where(subject)
    if verdict.lost_node is not None:
        loss = verdict.lost_node
        whose = f"{_clean(loss.host)}'s clock" if loss.left else "last sign of it, by its observer's clock"
        return [
            *_unwrapped(loss.summary, width),
            _field("time", f"{_time(loss.gone_ns)} ({whose})"),
            _field("host", f"{_clean(loss.host)} (node {loss.node}){where}"),
            *_last_words(subject.round, loss.node, width),
            *_wrapped("verdict", verdict.evidence, width),
        ]
    failure = verdict.failure
    if failure is None:
        reason = shown.reason if shown is not None and shown.reason else describe_end(shown)
        found = [f"  none of the workers: {verdict.evidence}", *_wrapped("reason", reason, width)]
        ends = [end for end in shown.agent_ends if end.code != 0] if shown is not None else []
        found += [_fit(f"  the agent on {_clean(end.name)} ended with code {end.code}", width) for end in ends[:3]]
        return found
    fields = [
        *_unwrapped(failure.headline, width),
        _field("time", f"{_time(failure.ended_ns, fine=True)} ({_clean(failure.host)}'s clock)"),
        _field("host", f"{_clean(failure.host)} (node {failure.node}){where}"),
        _field("rank", f"{failure.global_rank} (local_rank: {failure.local_rank})" + _also(verdict)),
        _field(
            "exitcode", f"{failure.exitcode} (pid: {failure.pid})" + (f" ({failure.signal})" if failure.signal else "")
        ),
        _field("error_file", _clean(failure.error_file) or "<N/A>"),
    ]
    if failure.problem:
        fields += _wrapped("", f"({failure.problem})", width)
    fields += _wrapped("verdict", verdict.evidence, width)
    fields += _wrapped("kind", describe_class(failure), width)
    if failure.last_step is not None:
        fields.append(_field("last step", str(failure.last_step)))
    found_text = find_python_traceback(failure.traceback) if failure.traceback else None
    if found_text is not None and found_text.causes:
        fields += [_fit(_field("caused by", _clean(cause)), width) for cause in found_text.causes[:2]]
    left = None if lines is None else max(_TRACEBACK_LEAST, min(_TRACEBACK_MOST, lines - len(fields)))
    return fields + _traceback(failure, width, left)


def _last_words(part: RoundHistory | None, node: int, width: int) -> list[str]:
    """Where a lost node's workers were."""
    words = [word for word in part.words if word.node == node and word.step is not None] if part is not None else []
    if not words:
        return []
    steps = [word.step for word in words if word.step is not None]
    at = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    ranks = rank_ranges([word.rank for word in words])
    return _wrapped("last step", f"{at} of its ranks {ranks}, told at {_clock(words[0].told_ns)}", width)


def _stacks(part: RoundHistory, width: int, *, cap: int | None) -> list[str]:
    """Where all ranks stood, the odd one out first."""
    if not part.stacks:
        return []
    lines = []
    for group in part.stacks:
        ranks = f"rank{'s' if len(group.ranks) > 1 else ''} {_shorten(rank_ranges(group.ranks), 40)}"
        inner = " < ".join(_frame(frame) for frame in reversed(group.stack[-3:])) or "no Python stack"
        lines.append(_fit(f"  {ranks}: {inner}", width))
    if cap is not None and len(lines) > cap:
        hidden = sum(len(group.ranks) for group in part.stacks[cap - 1 :])
        lines = [*lines[: cap - 1], f"  ... {hidden} more ranks (--all shows them)"]
    return ["Where each rank's main thread was (innermost call first):", *lines]


def _frame(frame: str) -> str:
    """``/a/b/train.py:44 step`` -> ``step (train.py:44)``."""
    place, _, function = _clean(frame).partition(" ")
    return f"{function} ({place.rsplit('/', 1)[-1]})"


def describe_end(attempt: AttemptHistory | None) -> str:
    """Why an attempt ended where no failure tells."""
    if attempt is None or not attempt.outcome:
        return "no end is recorded"
    notices = f" (notice: {', '.join(attempt.notices)})" if attempt.notices else ""
    return f"{attempt.outcome.replace('_', ' ')}{notices}"


def _where(subject: Subject) -> str:
    if subject.round is None or subject.attempt is None:
        return ""
    return f", in round {subject.round.index} of attempt {subject.attempt.number}"


def _also(verdict: Verdict) -> str:
    count = len(verdict.same_failure)
    return f"; the same on {count} ranks: {_shorten(rank_ranges(verdict.same_failure), 40)}" if count > 1 else ""


def describe_class(failure: WorkerFailure) -> str:
    """Why a failure is of its class, and whether another try may help."""
    retry = "" if failure.retryable else "; not worth another try"
    return (
        f"{failure.reason} ({failure.category.value}){retry}" if failure.reason else f"{failure.category.value}{retry}"
    )


def _traceback(failure: WorkerFailure, width: int, lines: int | None) -> list[str]:
    """The field ``traceback``, and as many of its last lines as there is room for: the cause stands at its end."""
    if failure.traceback:
        body = _clean_lines(failure.traceback)
        title = ""
        if body and body[0].startswith("Traceback ("):
            title, body = body[0], body[1:]
    elif failure.stderr_tail:
        title, body = "none was printed; the end of its stderr:", _clean_lines(failure.stderr_tail)
    else:
        return [_field("traceback", "none was printed, and nothing else on stderr")]
    if lines is not None and len(body) > lines - 1:
        keep = max(1, lines - 2)
        body = [f"... {len(body) - keep} lines above (--all shows them)", *body[-keep:]]
    return [_field("traceback", title).rstrip(), *(_fit(f"    {line}", width) for line in body)]


def _others(part: RoundHistory, verdict: Verdict, width: int, *, cap: int | None) -> list[str]:
    root = verdict.failure
    rest = [failure for failure in part.failures if failure is not root]
    lost = [loss for loss in part.lost_nodes if loss is not verdict.lost_node]
    if not rest and not lost:
        return []
    folds = sorted(fold_failures(rest), key=lambda fold: _ORDER[fold.first.failure_class])
    lines = [_fit(f"  {_clean(loss.summary)}{_silence(loss)}", width) for loss in lost]
    lines += [_fit(_fold_line(fold, root), width) for fold in folds]
    if cap is not None and len(lines) > cap:
        hidden = sum(len(fold.members) for fold in folds[cap - 1 - len(lost) :]) if len(lost) < cap else len(rest)
        lines = [*lines[: cap - 1], f"  ... {hidden} failures of {len(lines) - cap + 1} more kinds (--all shows them)"]
    return [f"Other failures in that round: {len(rest) + len(lost)}", *lines]


def _silence(loss: NodeLoss) -> str:
    return f" ({loss.age:.1f} s without a sign)" if loss.age else ""


_ORDER = {
    FailureClass.ROOT: 0,
    FailureClass.HANG: 1,
    FailureClass.INFRASTRUCTURE: 2,
    FailureClass.SYMPTOM: 3,
    FailureClass.STOPPED_BY_US: 4,
}


def _fold_line(fold: Fold, root: WorkerFailure | None) -> str:
    first = fold.first
    count = len(fold.members)
    ranks = f"rank{'s' if count > 1 else ''} {_shorten(rank_ranges(fold.ranks), 30)}"
    hosts = _clean(fold.hosts[0]) if len(fold.hosts) == 1 else f"{len(fold.hosts)} hosts"
    what = _CLASS_WORDS[first.failure_class]
    if root is not None and first.fingerprint == root.fingerprint:
        what = "the same failure"
    label = f" [{what}]" if what else ""
    return f"  {ranks} on {hosts}, from {_clock(first.ended_ns)}{label}: {_brief(first.headline)}"


def _done(history: RunHistory, subject: Subject, shown: AttemptHistory | None, width: int) -> list[str]:
    lines: list[str] = []
    if subject.round is not None and subject.attempt is not None:
        lines += describe_after_round(subject.attempt, subject.round)
        if subject.attempt is not shown and subject.attempt.decision:
            lines.append(describe_decision(subject.attempt.decision))
    if shown is not None and shown.decision and shown.outcome != "succeeded":
        lines.append(describe_decision(shown.decision))
    if not lines and subject.round is None:
        return []
    title = "What was done about it:"
    if not lines:
        return [f"{title} nothing is recorded{' yet' if shown is not None and not shown.outcome else ''}"]
    return [title, *(part for line in dict.fromkeys(lines) for part in _item(_without_repeat(line, lines[0]), width))]


def _without_repeat(line: str, first: str) -> str:
    """The supervisor's reason quotes the coordinator's, which stands above it already."""
    reason = first.partition(": ")[2]
    return line.replace(reason, "").rstrip(" :") if line is not first and len(reason) > 20 else line


def _item(text: str, width: int) -> list[str]:
    """An entry in at most three lines."""
    words, lines = _clean(text).split(" "), ["  "]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > width and lines[-1].strip():
            lines.append("     ")
        lines[-1] += word if lines[-1] == "  " else f" {word}"
    return [*lines[:2], _fit(" ".join([lines[2], *lines[3:]]), width)] if len(lines) > 2 else lines


def describe_decision(text: str) -> str:
    """``requeue: requeue 1 of 3: …`` → the reason alone; ``end: …`` → that it was not requeued."""
    action, separator, reason = text.partition(": ")
    if not separator:
        return text
    if action == "end":
        return f"not requeued: {reason}"
    return reason if reason.startswith(action) else text


def describe_after_round(attempt: AttemptHistory, part: RoundHistory) -> list[str]:
    """What was done about a round's failure, and what the next round looks like."""
    lines: list[str] = []
    after = next((item for item in attempt.rounds if item.index > part.index), None)
    decision = part.decision
    if decision is not None:
        text = decision.reason
        if decision.action == "close":
            text = f"given up: {text}"
        elif decision.action == "continue":
            text = f"a new round, which costs no restart: {text}"
        elif not text.startswith(decision.action):
            text = f"{decision.action}: {text}"
        if after is not None and decision.action != "close":
            text += f" -> round {after.index}"
        lines.append(text)
    if after is not None:
        before_nodes = {node.node: node.host for node in part.nodes}
        after_nodes = {node.node: node.host for node in after.nodes}
        gone = [host for node, host in before_nodes.items() if node not in after_nodes]
        came = [host for node, host in after_nodes.items() if node not in before_nodes]
        if before_nodes and (gone or came):
            change = "; ".join(
                [
                    *([f"without {', '.join(gone[:5])}"] if gone else []),
                    *([f"with {', '.join(came[:5])}"] if came else []),
                ]
            )
            lines.append(f"round {after.index} has {len(after_nodes)} nodes instead of {len(before_nodes)}: {change}")
    back = [name for name in attempt.relaunched if name]
    if back:
        lines.append(f"agent started again on {', '.join(dict.fromkeys(back))}")
    return lines


def _past(history: RunHistory, width: int, *, cap: int | None) -> list[str]:
    """One line per attempt and round; rounds that went alike share one."""
    if not history.attempts:
        return []
    lines: list[str] = []
    for attempt in history.attempts:
        lines.append(_fit(_attempt_line(history, attempt), width))
        lines += [_fit(text, width) for text in _round_lines(history, attempt)]
    if cap is not None and len(lines) > cap:
        hidden = len(lines) - cap + 1
        lines = [lines[0], f"    ... {hidden} lines (--all shows them)", *lines[hidden + 1 :]]
    return ["Attempts and rounds:", *lines]


def _attempt_line(history: RunHistory, attempt: AttemptHistory) -> str:
    job = f" (job {attempt.job_id})" if attempt.job_id else ""
    when = f" {_time(attempt.started_ns)}" if attempt.started_ns else ""
    lasted = ""
    if attempt.started_ns and attempt.ended_ns:
        lasted = f", {_duration((attempt.ended_ns - attempt.started_ns) / 1e9)}"
    nodes = f", {_plural(len(attempt.nodes), 'node')}" if attempt.nodes else ""
    code = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
    return f"  attempt {attempt.number}{job}{when}{nodes}{lasted}: {describe_outcome(history, attempt)}{code}"


def _round_lines(history: RunHistory, attempt: AttemptHistory) -> list[str]:
    groups: list[tuple[str, str, list[RoundHistory]]] = []
    for part in attempt.rounds:
        kind, text = _round_text(history, attempt, part)
        if groups and groups[-1][0] == kind and kind:
            groups[-1][2].append(part)
        else:
            groups.append((kind, text, [part]))
    lines = []
    for _, text, parts in groups:
        name = f"round {parts[0].index}" if len(parts) == 1 else f"rounds {parts[0].index}-{parts[-1].index}"
        times = f", the same {len(parts)} times" if len(parts) > 1 else ""
        lines.append(f"    {name}: {text}{times}")
    return lines


def _round_text(history: RunHistory, attempt: AttemptHistory, part: RoundHistory) -> tuple[str, str]:
    """What makes rounds alike (empty: nothing does), and the line."""
    size = ", ".join(
        [
            *([_plural(len(part.nodes), "node")] if part.nodes else []),
            *([_plural(part.world_size, "worker")] if part.world_size is not None else []),
        ]
    )
    size = size or "never started"
    lasted = f", {_duration(part.seconds)}" if part.seconds is not None else ""
    verdict = verdict_of(part)
    if verdict.cause is not Cause.NONE:
        others = len(part.failures) - (1 if verdict.failure is not None else 0)
        more = f" (+{others} more)" if others else ""
        text = f"{size}{lasted}: {_brief(verdict.summary)}{more}"
        rank = verdict.failure.global_rank if verdict.failure is not None else None
        return f"{size}|{verdict.fingerprint}|{rank}|{others}", text
    if part.succeeded:
        end = "all workers ended with 0"
    elif part.stopping_reasons:
        end = f"stopped: {_clean(part.stopping_reasons[0])}"
    elif part.failures:
        end = "ended by this job"
    elif attempt.outcome or attempt is not history.attempts[-1]:
        end = "no end is recorded"
    else:
        end = f"running since {_time(part.started_ns)}" if part.started_ns else "running"
    return "", f"{size}{lasted}: {end}"


def _field(name: str, value: str) -> str:
    return f"  {name:<10}: {value}"


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """A field whose text goes on in as many lines as it needs."""
    words, lines, room = _clean(text).split(" "), [""], width - 14
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    first = _field(name, lines[0]) if name else f"{'':14}{lines[0]}"
    return [first, *(f"{'':14}{line}" for line in lines[1:4])]


def _clean(text: str) -> str:
    """One line without control characters."""
    return clean_text(text).replace("\n", " ").replace("\t", " ")


def _clean_lines(text: str) -> list[str]:
    return [line.replace("\t", "    ") for line in clean_text(text).rstrip("\n").split("\n")]


def _unwrapped(text: str, width: int) -> list[str]:
    """A headline in at most three lines."""
    text, room = _clean(text), width - 2
    return [f"  {text[at : at + room]}" for at in range(0, min(len(text), 3 * room), room)] or ["  (no message)"]


_CPP_PLACE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|hpp|h|cu):\d+\] ")


def _brief(text: str) -> str:
    """One line, without the place in some library's C++ source that stands before what is meant."""
    return _CPP_PLACE.sub("", _clean(text))


def _fit(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3].rpartition(",")[0] + ",..."


def _time(when: int | None, *, fine: bool = False) -> str:
    """Local time, as torch prints it; milliseconds where asked for."""
    if not when:
        return "<N/A>"
    try:
        text = datetime.fromtimestamp(when // 1_000_000_000).isoformat(sep="_")
    except (OverflowError, OSError, ValueError):
        return "<N/A>"
    return f"{text}.{when // 1_000_000 % 1000:03d}" if fine else text


def _clock(when: int) -> str:
    return _time(when, fine=True).partition("_")[2] or "an unknown time"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
