"""The text report's part on what was done about a failure."""

from __future__ import annotations

from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.render_text_words import brief, plural, split_words
from hpc_elastic.report.subject import Subject

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
