"""The text report's part on the root cause: torch's fields, the verdict, and the end of the traceback.

The text report's part on what else failed in the round of the root cause, and where its ranks stood: folded.

The text report's part on bad nodes.

The report that stands in the job log: on one screen, for whoever opens it at 3 a.m.
"""

from __future__ import annotations

from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks, whose_clock
from hpc_elastic.report.fold import Fold, fold_failures, kind_of, rank_ranges
from hpc_elastic.report.goodput import Goodput, goodput_of
from hpc_elastic.report.history import (
    AgentEnd,
    AttemptHistory,
    NodeLoss,
    RankStatus,
    RoundHistory,
    RunHistory,
    StackGroup,
)
from hpc_elastic.report.incidents import Outage, OutageKind, describe_losses, describe_outages
from hpc_elastic.report.render_text_past import describe_outcome, done_lines, past_lines
from hpc_elastic.report.render_text_words import (
    brief,
    clean_line,
    clean_lines,
    clock_text,
    fit,
    fit_traceback,
    fold_repeats,
    headline,
    plural,
    shorten,
    split_words,
    text_field,
    time_text,
    wrapped,
)
from hpc_elastic.report.subject import Subject, choose_subject, failure_count, nodes_done_without
from hpc_elastic.report.verdict import Cause, Verdict
from hpc_elastic.run.node_score import NodeScore

_TRACEBACK_MOST = 20
_TRACEBACK_LEAST = 4
_STACK_WANTED = 12
"""Lines of the stack that a message of many lines leaves room for, and so many of the message are shown in any case."""
_MESSAGE_LEAST = 3
_OTHERS_DOING = (FailureClass.STOPPED_BY_US, FailureClass.SYMPTOM)
_WHOSE = {
    Category.INPUT: "input: the call or the environment",
    Category.WORKER: "worker: the script",
    Category.PLATFORM: "platform: hpc-elastic",
    Category.INFRASTRUCTURE: "infrastructure: the node or the cluster",
}


def cause_lines(subject: Subject, shown: AttemptHistory | None, width: int, *, lines: int | None) -> list[str]:
    """The lines below `Root Cause`; at most so many where `lines` says it, but for the fields themselves."""
    verdict, where = subject.verdict, _where(subject)
    if verdict.lost_node is not None:
        loss = verdict.lost_node
        return [
            *headline(loss.summary, width),
            text_field("time", f"{time_text(loss.gone_ns)} ({clean_line(loss.whose_clock)})"),
            text_field("host", f"{clean_line(loss.host)} (node {loss.node}){where}"),
            *_last_words(subject.round, loss.node, width),
            *wrapped("verdict", verdict.evidence, width),
        ]
    failure = verdict.failure
    if verdict.what:
        since = min((one.since_ns for one in _refusals(subject.attempt)), default=None)
        when = [text_field("time", f"{time_text(since)} (since then)")] if since is not None else []
        return [*headline(verdict.what, width), *when, *wrapped("verdict", verdict.evidence, width)]
    if failure is None:
        if verdict.headline:
            return [*headline(verdict.headline, width), *wrapped("verdict", verdict.evidence, width)]
        reason = shown.reason if shown is not None and shown.reason else describe_end(shown)
        found = [f"  none of the workers: {verdict.evidence}", *wrapped("reason", reason, width)]
        ends = [end for end in shown.agent_ends if end.code != 0] if shown is not None else []
        found += [fit(f"  the agent on {clean_line(end.name)} ended{_with_code(end)}", width) for end in ends[:3]]
        return found
    fields = [
        *headline(failure.headline, width),
        text_field("time", f"{time_text(failure.ended_ns, fine=True)} ({_whose_clock(subject, failure)})"),
        text_field("host", f"{clean_line(failure.host)} (node {failure.node}){where}"),
        text_field("rank", f"{failure.global_rank} (local_rank: {failure.local_rank})" + _also(verdict)),
        text_field(
            "exitcode", f"{failure.exitcode} (pid: {failure.pid})" + (f" ({failure.signal})" if failure.signal else "")
        ),
        text_field("error_file", clean_line(failure.error_file) or "<N/A>"),
    ]
    if failure.problem:
        fields += wrapped("", f"({failure.problem})", width)
    fields += wrapped("verdict", verdict.evidence, width)
    fields += wrapped("kind", describe_class(failure), width)
    if failure.last_step is not None:
        fields.append(text_field("last step", str(failure.last_step)))
    found_text = find_python_traceback(failure.traceback) if failure.traceback else None
    if found_text is not None and found_text.causes:
        fields += [fit(text_field("caused by", clean_line(cause)), width) for cause in found_text.causes[:2]]
    left = None if lines is None else max(_TRACEBACK_LEAST, min(_TRACEBACK_MOST, lines - len(fields)))
    return fields + _traceback(failure, width, left, lost=_lost_stderr(subject.attempt, failure))


def _refusals(attempt: AttemptHistory | None) -> list[Outage]:
    return [one for one in attempt.outages if one.kind is OutageKind.FILESYSTEM] if attempt is not None else []


def _with_code(end: AgentEnd) -> str:
    return f" with code {end.code}" if end.code is not None else f": {clean_line(end.detail)}"


def _whose_clock(subject: Subject, failure: WorkerFailure) -> str:
    clocks = subject.attempt.clocks if subject.attempt is not None else NO_CLOCKS
    return clean_line(whose_clock(failure.host, failure.node, clocks))


def _last_words(part: RoundHistory | None, node: int, width: int) -> list[str]:
    """Where a lost node's workers were."""
    statuses = (
        [status for status in part.rank_statuses if status.node == node and status.step is not None]
        if part is not None
        else []
    )
    if not statuses:
        return []
    steps = [status.step for status in statuses if status.step is not None]
    at = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    ranks = rank_ranges([status.rank for status in statuses])
    return wrapped("last step", f"{at} of its ranks {ranks}, told at {clock_text(statuses[0].told_ns)}", width)


def describe_end(attempt: AttemptHistory | None) -> str:
    """Why an attempt ended where no failure tells."""
    if attempt is None or not attempt.outcome:
        return "no end is recorded"
    notices = f" (notice: {', '.join(attempt.notices)})" if attempt.notices else ""
    return f"{attempt.outcome.replace('_', ' ')}{notices}"


def _where(subject: Subject) -> str:
    if subject.attempt is None:
        return ""
    if subject.round is None:
        return f", in attempt {subject.attempt.number}"
    return f", in round {subject.round.index} of attempt {subject.attempt.number}"


def _also(verdict: Verdict) -> str:
    count = len(verdict.same_failure)
    return f"; the same on {count} ranks: {shorten(rank_ranges(verdict.same_failure), 40)}" if count > 1 else ""


def describe_class(failure: WorkerFailure) -> str:
    """Why a failure is of its class, whether its node is suspect, and whether another try may help."""
    retry = f"; {failure.host} is suspect" if failure.node_suspect else ""
    retry += "" if failure.retryable else "; not worth another try"
    # Who was killed or stopped from outside may have done nothing wrong, nor who felt that somebody else was gone.
    blameless = failure.failure_class in _OTHERS_DOING or "from outside" in failure.reason
    whose = failure.category.value if blameless else _WHOSE[failure.category]
    return f"{failure.reason} ({whose}){retry}" if failure.reason else f"{whose}{retry}"


def _lost_stderr(attempt: AttemptHistory | None, failure: WorkerFailure) -> str:
    """Why its stderr is not in its file, in words; empty where it is."""
    for loss in attempt.output_lost if attempt is not None else ():
        for stream in loss.streams:
            if (stream.round, stream.rank, stream.stream) == (failure.round, failure.global_rank, "stderr"):
                where = "" if stream.not_in_job_log else "; the job log has it"
                return f"what it printed is not in its file: {loss.reason}{where}" if stream.not_in_file else ""
    return ""


def _message_lines(failure: WorkerFailure) -> int:
    """How many lines at the traceback's end are the exception's message; 0 where it quotes another's traceback."""
    body, words = failure.traceback.rstrip("\n"), failure.message.rstrip("\n")
    if not body or "Traceback (most recent call last):" in words:
        return 0
    lines = words.count("\n")
    first = body.split("\n")[-lines - 1 :][0]
    return lines + 1 if words and first.rstrip().endswith(words.split("\n", 1)[0].rstrip()[-60:]) else 0


def _cut(body: list[str], room: int, *, message: int) -> list[str]:
    """The end of it, where the cause stands. Of a long message only the beginning: the stack is worth more."""
    kept = min(message, max(_MESSAGE_LEAST, room - _STACK_WANTED))
    if message - kept > 1 and room > _MESSAGE_LEAST:
        body = [*body[: len(body) - message + kept], f"... {message - kept} more lines (--all shows them)"]
    if len(body) <= room + 1:
        return body
    return [f"... {len(body) - room} lines above (--all shows them)", *body[-room:]]


def _traceback(failure: WorkerFailure, width: int, lines: int | None, *, lost: str) -> list[str]:
    """The field ``traceback``, and as many of its last lines as there is room for: the cause stands at its end."""
    if failure.traceback:
        body = clean_lines(failure.traceback)
        title = ""
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


_CLASS_WORDS = {
    FailureClass.ROOT: "",
    FailureClass.SYMPTOM: "consequence",
    FailureClass.STOPPED_BY_US: "ended by this job",
    FailureClass.INFRASTRUCTURE: "infrastructure",
    FailureClass.HANG: "hang",
}
_ORDER = {
    FailureClass.ROOT: 0,
    FailureClass.HANG: 1,
    FailureClass.INFRASTRUCTURE: 2,
    FailureClass.SYMPTOM: 3,
    FailureClass.STOPPED_BY_US: 4,
}


def other_lines(part: RoundHistory, verdict: Verdict, width: int, *, cap: int | None) -> list[str]:
    """Failures besides the verdict's, folded, in at most `cap` lines; None: all."""
    root = verdict.failure
    rest = [failure for failure in part.failures if failure is not root]
    lost = [loss for loss in part.lost_nodes if loss is not verdict.lost_node]
    if not rest and not lost:
        return []
    folds = sorted(fold_failures(rest, part.clocks), key=lambda fold: _ORDER[fold.first.failure_class])
    lines = [fit(f"  {clean_line(loss.summary)}{_silence(loss)}", width) for loss in lost]
    for fold in folds:
        lines.append(fit(_fold_line(fold, root, part.clocks), width))
        lines += [fit(line, width) for line in (_wording_lines(fold) if cap is None else ())]
    if cap is not None and len(lines) > cap:
        hidden = sum(len(fold.members) for fold in folds[cap - 1 - len(lost) :]) if len(lost) < cap else len(rest)
        lines = [*lines[: cap - 1], f"  ... {hidden} failures of {len(lines) - cap + 1} more kinds (--all shows them)"]
    return [f"Other failures in that round: {len(rest) + len(lost)}", *lines]


def _silence(loss: NodeLoss) -> str:
    return f" ({loss.age:.1f} s without a sign)" if loss.age else ""


def _fold_line(fold: Fold, root: WorkerFailure | None, clocks: Clocks) -> str:
    first = fold.first
    count = len(fold.members)
    ranks = f"rank{'s' if count > 1 else ''} {shorten(rank_ranges(fold.ranks), 30)}"
    hosts = clean_line(fold.hosts[0]) if len(fold.hosts) == 1 else f"{len(fold.hosts)} hosts"
    what = _CLASS_WORDS[first.failure_class]
    if root is not None and (first.fingerprint == root.fingerprint or kind_of(first) == kind_of(root)):
        what = "the same failure"
    wordings = f"in {len(fold.wordings)} wordings" if len(fold.wordings) > 1 else ""
    label = ", ".join(filter(None, (what, wordings)))
    at = clock_text(clocks.of_failure(first).at_ns)
    return f"  {ranks} on {hosts}, from {at}{f' [{label}]' if label else ''}: {brief(fold.headline)}"


def _wording_lines(fold: Fold) -> list[str]:
    """Who says what, where not all say the same."""
    if len(fold.wordings) == 1:
        return []
    return [
        f"    rank{'s' if len(same.ranks) > 1 else ''} {shorten(rank_ranges(same.ranks), 40)}: "
        f"{brief(same.first.headline)}"
        for same in fold.wordings
    ]


def stack_lines(part: RoundHistory, width: int, *, cap: int | None) -> list[str]:
    """Where all ranks stood, the odd one out first."""
    if not part.stacks:
        return []
    lines = []
    for group in part.stacks:
        ranks = f"rank{'s' if len(group.ranks) > 1 else ''} {shorten(rank_ranges(group.ranks), 40)}"
        lines.append(fit(f"  {ranks}: {_where_stood(group)}", width))
    if cap is not None and len(lines) > cap:
        hidden = sum(len(group.ranks) for group in part.stacks[cap - 1 :])
        lines = [*lines[: cap - 1], f"  ... {hidden} more ranks (--all shows them)"]
    return [
        "Where each rank's main thread was (innermost call first):",
        *lines,
        *_thread_lines(part, width, is_short=cap is not None),
        *_heartbeat_lines(part, width, cap=cap),
    ]


def _where_stood(group: StackGroup) -> str:
    if not group.stack:
        return f"no Python stack; {clean_line(group.state)}" if group.state else "no Python stack"
    return " < ".join(_frame(frame) for frame in reversed(group.stack[-3:]))


def _thread_lines(part: RoundHistory, width: int, *, is_short: bool) -> list[str]:
    """The other threads: of many ranks with a dozen each, their number will do."""
    if not part.threads:
        return []
    if is_short:
        kinds = f"{len(part.threads)} more place{'s' if len(part.threads) > 1 else ''}"
        return [fit(f"  other threads: {kinds} (--all shows them; stacks.txt has all)", width)]
    lines = []
    for group in part.threads:
        ranks = f"rank{'s' if len(group.ranks) > 1 else ''} {shorten(rank_ranges(group.ranks), 40)}"
        name = f" [{clean_line(group.name)}]" if group.name else ""
        lines.append(fit(f"  {ranks}{name}: {_where_stood(group)}", width))
    return ["Where the other threads were:", *lines]


def _heartbeat_lines(part: RoundHistory, width: int, *, cap: int | None) -> list[str]:
    """Each rank's last one, those at the same step and in the same section together; the furthest behind first."""
    groups: dict[tuple[int, str], list[RankStatus]] = {}
    for status in part.rank_statuses:
        groups.setdefault((-1 if status.step is None else status.step, status.section), []).append(status)
    lines = []
    for (step, section), statuses in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]), item[0][1])):
        ranks = (
            f"rank{'s' if len(statuses) > 1 else ''} {shorten(rank_ranges([status.rank for status in statuses]), 40)}"
        )
        at = f"at step {step}" if step >= 0 else "no step"
        least, most = (
            f"{age:.1f}" for age in (min(status.age for status in statuses), max(status.age for status in statuses))
        )
        silent = least if least == most else f"{least}-{most}"
        lines.append(fit(f"  {ranks}: {at}, section {clean_line(section)!r}, silent for {silent} s", width))
    if cap is not None and len(lines) > cap:
        lines = [*lines[: cap - 1], f"  ... {len(lines) - cap + 1} more steps and sections (--all shows them)"]
    return ["Last heartbeats:", *lines] if lines else []


def _frame(frame: str) -> str:
    """``/a/b/train.py:44 step`` -> ``step (train.py:44)``."""
    place, _, function = clean_line(frame).partition(" ")
    return f"{function} ({place.rsplit('/', 1)[-1]})"


def bad_node_lines(history: RunHistory, width: int, *, cap: int | None) -> list[str]:
    """The worst first, each in as many lines as its reason needs, three at most.

    Args:
        history: The run.
        width: Of a line.
        cap: At most so many; None: all.
    """
    shown = history.bad_nodes[:cap]
    lines = []
    for index, score in enumerate(shown):
        head = "Bad nodes:" if index == 0 else "          "
        lines += split_words(f"{head} {describe_bad_node(history, score)}", width)
    if (more := len(history.bad_nodes) - len(shown)) > 0:
        lines.append(f"           and {plural(more, 'more')} (--all shows them)")
    return lines


def describe_bad_node(history: RunHistory, score: NodeScore) -> str:
    """``n3 (node n3 was lost): left out of later attempts``."""
    done = ": left out of later attempts" if score.node in history.excluded else ""
    return f"{score.node} ({clean_line(score.why)}){done}"


DEFAULT_LINES = 40
DEFAULT_WIDTH = 120
_NARROWEST = 60
_RULE = 60
_OTHERS = 5
_HISTORY = 9
_BAD_NODES = 3


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
    subject = choose_subject(history, attempt=attempt)
    width = max(_NARROWEST, width)
    everything = max_lines is None
    shown = _attempt_shown(history, attempt)
    survived = failure_count(history, attempt=attempt) if shown is not None and shown.outcome == "succeeded" else 0
    head = _head(history, subject, shown, width, survived=survived)
    done = done_lines(history, subject, shown, width)
    measured = goodput or goodput_of(history)
    done += bad_node_lines(history, width, cap=None if everything else _BAD_NODES)
    past = past_lines(history, measured, width, cap=None if everything else _HISTORY)
    others: list[str] = []
    if subject.round is not None:
        others = other_lines(subject.round, subject.verdict, width, cap=None if everything else _OTHERS)
        others += stack_lines(subject.round, width, cap=None if everything else _OTHERS)
    fixed = len(head) + len(done) + len(past) + len(others) + 4
    root = cause_lines(subject, shown, width, lines=None if max_lines is None else max_lines - fixed)
    if max_lines is not None and (excess := fixed + len(root) - max_lines) > 0:
        past = past_lines(history, measured, width, cap=max(1, _HISTORY - excess))
    rule, line = "=" * _RULE, "-" * _RULE
    parts = [rule, *head, line, "Root Cause (first observed failure):", *root]
    if subject.verdict.cause is Cause.NONE and _is_fine(shown):
        parts = [rule, *head, line, "No worker failed by itself."]
    parts += [*others, *done, *past, rule]
    return "\n".join(map(clean_line, parts)) + "\n"


def _attempt_shown(history: RunHistory, attempt: int | None) -> AttemptHistory | None:
    if attempt is None:
        return history.attempts[-1] if history.attempts else None
    return next((part for part in history.attempts if part.number == attempt), None)


def _is_fine(attempt: AttemptHistory | None) -> bool:
    return attempt is None or attempt.outcome in ("", "succeeded")


def _head(
    history: RunHistory, subject: Subject, attempt: AttemptHistory | None, width: int, *, survived: int
) -> list[str]:
    status = describe_outcome(history, attempt)
    if attempt is not None and attempt.outcome:
        status = status.upper()
    where = ""
    if attempt is not None:
        job = f", job {attempt.job_id}" if attempt.job_id else ""
        code = f" (exit code {attempt.exit_code})" if attempt.exit_code is not None else ""
        where = f"{code} - attempt {attempt.number}{job}"
    lines = [fit(f"{history.name} {status}{where}", width), f"  run directory: {history.run_dir}"]
    if survived == 1:
        lines.append("  One failure was survived; the run went on and succeeded.")
    elif survived:
        lines.append(f"  {survived} failures were survived, of which the last is told here; the run succeeded.")
    if attempt is not None:
        for line in nodes_done_without(subject, attempt):
            lines += split_words(f"  did without  : {clean_line(line)}", width)
        told = describe_outages(attempt.outages, clock_text)
        lines += [
            fit(f"  {name:<13}: {clean_line(line)}", width) if name else f"{'':17}{clean_line(line)}"
            for name, line in told
        ]
        lines += [fit(f"  output lost  : {clean_line(line)}", width) for line in describe_losses(attempt.output_lost)]
    problems = [*history.problems, *(attempt.problems if attempt is not None else ())]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        lines.append(fit(f"  incomplete   : {problems[0]}{more}", width))
    return lines
