"""The text report's part on what was done about a failure.

The text report's last part: one line per attempt and round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpc_elastic.report.fold import kind_of
from hpc_elastic.report.goodput import Cost, Goodput
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.incidents import in_process_lines
from hpc_elastic.report.render_text_words import (
    brief,
    clean_line,
    clock_text,
    duration_text,
    fit,
    plural,
    split_words,
    time_text,
)
from hpc_elastic.report.subject import Subject, verdict_of
from hpc_elastic.report.verdict import Cause

_SPARES = 3


def done_lines(history: RunHistory, subject: Subject, shown: AttemptHistory | None, width: int) -> list[str]:
    """What the coordinator and the supervisor decided, and what the next round looks like."""
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
    told = [_without_cause(_without_repeat(line, lines[0]), subject) for line in dict.fromkeys(lines)]
    return [title, *(part for line in told for part in split_words(f"  {brief(line)}", width))]


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
        lines += _membership(part, after)
    back = [name for name in attempt.relaunched if name]
    if back:
        lines.append(f"agent started again on {', '.join(dict.fromkeys(back))}")
    return lines


def _membership(part: RoundHistory, after: RoundHistory) -> list[str]:
    """Who took over from whom, and how many there are now."""
    took = {item.node: item for item in after.replaced}
    lines = [f"spare {item.host} took over from {item.replaces_host}" for item in after.replaced[:_SPARES]]
    if len(after.replaced) > _SPARES:
        lines.append(f"{len(after.replaced) - _SPARES} more spares took over")
    before_nodes = {node.node: node.host for node in part.nodes}
    after_nodes = {node.node: node.host for node in after.nodes}
    taken = {item.replaces_node for item in after.replaced}
    gone = [host for node, host in before_nodes.items() if node not in after_nodes and node not in taken]
    came = [host for node, host in after_nodes.items() if node not in before_nodes and node not in took]
    if not before_nodes or not after_nodes or not (gone or came):
        return lines
    now, then = len(after_nodes), len(before_nodes)
    size = f"shrunk to {plural(now, 'node')}" if now < then else f"grown to {plural(now, 'node')}"
    if now == then:
        size = f"{plural(now, 'node')} as before"
    change = "; ".join([*([f"without {_names(gone)}"] if gone else []), *([f"with {_names(came)}"] if came else [])])
    return [*lines, f"round {after.index}: {size}{'' if now == then else f' from {then}'}, {change}"]


def _names(hosts: list[str]) -> str:
    return ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")


def past_lines(history: RunHistory, goodput: Goodput, width: int, *, cap: int | None) -> list[str]:
    """One line per attempt and round; rounds that went alike share one.

    Args:
        history: The run.
        goodput: What each of its failures cost.
        width: Of a line.
        cap: At most so many lines, without the titles. The last rounds are kept then, and of an attempt whose rounds
            are not shown its last failure is told in its own line.
    """
    if not history.attempts:
        return []
    costs = {(cost.attempt, cost.round): cost for cost in goodput.costs}
    blocks = [(attempt, _round_lines(history, attempt, costs, everything=cap is None)) for attempt in history.attempts]
    hidden = 0
    if cap is not None and sum(1 + len(rounds) for _, rounds in blocks) > cap:
        hidden = max(0, len(blocks) - (cap + 1) // 2)
        blocks = _cut_to(blocks[hidden:], cap - (1 if hidden else 0))
    lines = [f"  ... {plural(hidden, 'earlier attempt')} (--all shows them)"] if hidden else []
    for attempt, rounds in blocks:
        lines.append(_attempt_line(history, attempt, is_alone=not rounds))
        lines += rounds
    return ["Attempts and rounds:", *(fit(line, width) for line in lines), *_goodput_lines(history, goodput, width)]


def _cut_to(blocks: list[tuple[AttemptHistory, list[str]]], lines: int) -> list[tuple[AttemptHistory, list[str]]]:
    """Every attempt, and of the last ones as many rounds as there is room for."""
    room, kept = lines - len(blocks), []
    for attempt, rounds in reversed(blocks):
        shown = rounds
        if len(rounds) > room:
            more = f"    ... {plural(len(rounds) - room + 1, 'line')} (--all shows them)"
            shown = [more, *rounds[len(rounds) - room + 1 :]] if room > 1 else []
        kept.append((attempt, shown))
        room -= len(shown)
    return kept[::-1]


def _goodput_lines(history: RunHistory, goodput: Goodput, width: int) -> list[str]:
    """How much of the time was training, and where the rest went."""
    share = goodput.share
    if share is None:
        return []
    so_far = "" if history.attempts[-1].outcome else f" until {clock_text(goodput.until_ns)}, the last that is known"
    failures = sum(1 for cost in goodput.costs if cost.is_failure)
    changes = len(goodput.costs) - failures
    after = [*([plural(failures, "failure")] if failures else []), *([plural(changes, "change")] if changes else [])]
    parts = [
        (goodput.starting, "to start"),
        (goodput.interrupted, f"for {' and '.join(after)}"),
        (goodput.queued, "queued"),
        (goodput.ending, "to end"),
    ]
    rest = [f"{duration_text(seconds)} {words}" for seconds, words in parts if seconds >= 0.05]
    text = f"Goodput: {100 * share:.1f} % of {duration_text(goodput.wall)}{so_far}"
    return split_words(f"{text} ({', '.join(rest)})" if rest else text, width)


def _attempt_line(history: RunHistory, attempt: AttemptHistory, *, is_alone: bool) -> str:
    job = f" (job {attempt.job_id})" if attempt.job_id else ""
    when = f" {time_text(attempt.started_ns)}" if attempt.started_ns else ""
    lasted = ""
    if attempt.started_ns and attempt.ended_ns:
        lasted = f", {duration_text((attempt.ended_ns - attempt.started_ns) / 1e9)}"
    nodes = f", {plural(len(attempt.nodes), 'node')}" if attempt.nodes else ""
    code = f", exit code {attempt.exit_code}" if attempt.exit_code is not None else ""
    end = f"{describe_outcome(history, attempt)}{code}"
    if is_alone and (last := _last_failure(attempt)):
        end = f"{describe_outcome(history, attempt)}, at last {last}"
    return f"  attempt {attempt.number}{job}{when}{nodes}{lasted}: {end}"


def _last_failure(attempt: AttemptHistory) -> str:
    for part in reversed(attempt.rounds):
        verdict = verdict_of(part)
        if verdict.cause is not Cause.NONE:
            return f"in round {part.index}: {brief(verdict.summary)}"
    return ""


def _round_lines(
    history: RunHistory, attempt: AttemptHistory, costs: Mapping[tuple[int, int], Cost], *, everything: bool
) -> list[str]:
    groups: list[tuple[str, str, str, list[RoundHistory]]] = []
    for part in attempt.rounds:
        kind, who, text = _round_text(history, attempt, part)
        kind = "" if part.in_process else kind
        if groups and groups[-1][0] == kind and kind:
            groups[-1][3].append(part)
        else:
            groups.append((kind, who, text, [part]))
    lines = []
    for _, who, text, parts in groups:
        name = f"round {parts[0].index}" if len(parts) == 1 else f"rounds {parts[0].index}-{parts[-1].index}, alike"
        lost = [costs[attempt.number, part.index] for part in parts if (attempt.number, part.index) in costs]
        lines.append(f"    {name}: {who}{_cost(lost)}: {text}")
        lines += [f"      {clean_line(line)}" for line in in_process_lines(parts[0].in_process, everything=everything)]
    return lines


def _cost(costs: Sequence[Cost]) -> str:
    if not costs:
        return ""
    queued = sum(cost.queued for cost in costs)
    more = " in all" if len(costs) > 1 else ""
    more += f" ({duration_text(queued)} queued)" if queued >= 0.05 else ""
    return f", cost {duration_text(sum(cost.seconds for cost in costs))}{more}"


def _round_text(history: RunHistory, attempt: AttemptHistory, part: RoundHistory) -> tuple[str, str, str]:
    """What makes rounds alike (empty: nothing does), who was in it, and how it ended."""
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
        text = f"{brief(verdict.summary)}{more}"
        where = (
            verdict.failure.global_rank if verdict.failure is not None else verdict.lost_node and verdict.lost_node.node
        )
        unknown = verdict.failure if verdict.cause is Cause.UNKNOWN else None
        same = kind_of(unknown)[0] if unknown is not None else verdict.fingerprint
        return f"{size}|{same}|{where}|{others}", f"{size}{lasted}", text
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
    return "", f"{size}{lasted}", end


def describe_outcome(history: RunHistory, attempt: AttemptHistory | None) -> str:
    """How an attempt ended, in words."""
    if attempt is None:
        return "has no attempt yet"
    if attempt.outcome:
        return attempt.outcome.replace("_", " ")
    if attempt.number < history.attempts[-1].number:
        return "ended without a word"
    return "is still running (or its supervisor died)"
