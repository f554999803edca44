"""The text report's part on what was done about a failure."""

from __future__ import annotations

from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.render_text_words import brief, split_words
from hpc_elastic.report.subject import Subject


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
    return line.replace(reason, "").rstrip(" :") if line is not first and len(reason) > 20 else line


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
