"""The text report's last part: one line per attempt and round."""

from __future__ import annotations

from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.render_text_words import brief, clean_line, duration_text, fit, plural, time_text
from hpc_elastic.report.subject import verdict_of
from hpc_elastic.report.verdict import Cause


def past_lines(history: RunHistory, width: int, *, cap: int | None) -> list[str]:
    """One line per attempt and round; rounds that went alike share one."""
    if not history.attempts:
        return []
    lines: list[str] = []
    for attempt in history.attempts:
        lines.append(fit(_attempt_line(history, attempt), width))
        lines += [fit(text, width) for text in _round_lines(history, attempt)]
    if cap is not None and len(lines) > cap:
        hidden = len(lines) - cap + 1
        lines = [lines[0], f"    ... {hidden} lines (--all shows them)", *lines[hidden + 1 :]]
    return ["Attempts and rounds:", *lines]


def _attempt_line(history: RunHistory, attempt: AttemptHistory) -> str:
    job = f" (job {attempt.job_id})" if attempt.job_id else ""
    when = f" {time_text(attempt.started_ns)}" if attempt.started_ns else ""
    lasted = ""
    if attempt.started_ns and attempt.ended_ns:
        lasted = f", {duration_text((attempt.ended_ns - attempt.started_ns) / 1e9)}"
    nodes = f", {plural(len(attempt.nodes), 'node')}" if attempt.nodes else ""
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
            *([plural(len(part.nodes), "node")] if part.nodes else []),
            *([plural(part.world_size, "worker")] if part.world_size is not None else []),
        ]
    )
    size = size or "never started"
    lasted = f", {duration_text(part.seconds)}" if part.seconds is not None else ""
    verdict = verdict_of(part)
    if verdict.cause is not Cause.NONE:
        others = len(part.failures) - (1 if verdict.failure is not None else 0)
        more = f" (+{others} more)" if others else ""
        text = f"{size}{lasted}: {brief(verdict.summary)}{more}"
        where = (
            verdict.failure.global_rank if verdict.failure is not None else verdict.lost_node and verdict.lost_node.node
        )
        return f"{size}|{verdict.fingerprint}|{where}|{others}", text
    if part.succeeded:
        end = "all workers ended with 0"
    elif part.stopping_reasons:
        end = f"stopped: {clean_line(part.stopping_reasons[0])}"
    elif part.failures:
        end = "ended by this job"
    elif attempt.outcome or attempt is not history.attempts[-1]:
        end = "no end is recorded"
    else:
        end = f"running since {time_text(part.started_ns)}" if part.started_ns else "running"
    return "", f"{size}{lasted}: {end}"


def describe_outcome(history: RunHistory, attempt: AttemptHistory | None) -> str:
    """How an attempt ended, in words."""
    if attempt is None:
        return "has no attempt yet"
    if attempt.outcome:
        return attempt.outcome.replace("_", " ")
    if attempt.number < history.attempts[-1].number:
        return "ended without a word"
    return "is still running (or its supervisor died)"
