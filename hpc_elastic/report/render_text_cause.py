"""The text report's part on the root cause: torch's fields, the verdict, and the end of the traceback."""

from __future__ import annotations

from hpc_elastic.failures.classify import Category, FailureClass
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clock_text import whose_clock
from hpc_elastic.report.clocks import NO_CLOCKS
from hpc_elastic.report.fold import rank_ranges
from hpc_elastic.report.history import AgentEnd, AttemptHistory, RoundHistory
from hpc_elastic.report.outages import Outage, OutageKind
from hpc_elastic.report.render_text_words import (
    clean_line,
    clean_lines,
    clock_text,
    fit,
    fit_traceback,
    fold_repeats,
    headline,
    shorten,
    text_field,
    time_text,
    wrapped,
)
from hpc_elastic.report.subject import Subject
from hpc_elastic.report.verdict import Verdict

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
