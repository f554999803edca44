"""The report that stands in the job log: on one screen, for whoever opens it at 3 a.m."""

from __future__ import annotations

from hpc_elastic.report.bad_node_text import bad_node_lines
from hpc_elastic.report.history import AttemptHistory, RunHistory
from hpc_elastic.report.outages import describe_outages
from hpc_elastic.report.output_losses import describe_losses
from hpc_elastic.report.render_text_cause import cause_lines
from hpc_elastic.report.render_text_done import done_lines
from hpc_elastic.report.render_text_others import other_lines, stack_lines
from hpc_elastic.report.render_text_past import describe_outcome, past_lines
from hpc_elastic.report.render_text_words import clean_line, clock_text, fit, split_words
from hpc_elastic.report.subject import Subject, choose_subject, failure_count, nodes_done_without
from hpc_elastic.report.timeline_goodput import Goodput, goodput_of
from hpc_elastic.report.verdict import Cause

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
