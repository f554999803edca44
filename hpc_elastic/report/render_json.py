"""report.json: the whole report for programs. The schema is in docs/reference/json.md."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from hpc_elastic.base.files import json_text
from hpc_elastic.base.text import ranges
from hpc_elastic.failures.worker_failure import WorkerFailure, user_frame
from hpc_elastic.report.blocks import Fold, fold_failures
from hpc_elastic.report.clocks import NO_CLOCKS, SUPERVISOR, Clocks
from hpc_elastic.report.document import Document
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RoundNode
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Verdict
from hpc_elastic.run.node_score import NodeScore

VERSION = 1
MOST_EVIDENCE = 20
_MOST_CANDIDATES = 100
_NULLABLE = (
    "about", "broke", "decision", "detail", "error", "fingerprint", "gave_up", "job_id", "left", "log", "outcome",
    "path", "refusal", "unable",
)  # fmt: skip


def render_json(document: Document) -> dict[str, Any]:
    history, measured = document.history, document.goodput
    shown = document.shown or AttemptHistory(number=-1)
    return {
        "version": VERSION,
        **_values(history, "run_id", "run_dir", "name"),
        "attempt": shown.number if shown.number >= 0 else None,
        **_values(shown, "outcome", "exit_code", "decision"),
        "title": document.finding.title,
        "place": document.finding.place or None,
        "recovery": list(document.done),
        "lines": [{"part": part, "name": fact.name or None, "text": fact.text} for part, fact in document.lines],
        "verdict": _verdict(document),
        "goodput": {"share": measured.share, **_values(measured)},
        "advice": [_values(one) for one in document.advice],
        "bad_nodes": [_bad_node(*one) for one in document.bad_nodes],
        "problems": list(history.problems),
        "attempts": [_attempt(part) for part in history.attempts],
    }


def json_report(document: Document) -> str:
    """A line for each round: an indented text takes the encoder four times as long."""
    value = render_json(document)
    attempts = value.pop("attempts")
    parts = [f'{json_text(value)[:-1]},\n"attempts": [']
    for number, item in enumerate(attempts):
        rounds = item.pop("rounds")
        parts.append(f'{"," if number else ""}\n {json_text(item)[:-1]},\n "rounds": [')
        parts += [f"{',' if index else ''}\n  {json_text(part)}" for index, part in enumerate(rounds)]
        parts.append("]}")
    parts.append("\n]}\n")
    return "".join(parts)


def _values(record: object, *names: str, null: tuple[str, ...] = (), **other: Any) -> dict[str, Any]:
    """`null`: further texts that are null where they are empty. `other`: written beside fields, or in their place."""
    value: dict[str, Any] = to_builtins({name: getattr(record, name) for name in names} if names else record)
    value |= {name: list(item) for name, item in value.items() if type(item) is tuple}
    value |= {name: None for name in (*_NULLABLE, *null) if value.get(name) == ""}
    return {**value, **other}


def _bad_node(score: NodeScore, is_excluded: bool) -> dict[str, Any]:
    evidence = [_values(item, "kind", "why", "at_ns", "attempt", "round") for item in score.evidence[:MOST_EVIDENCE]]
    return _values(score, "node", "score", excluded=is_excluded, until_ns=score.until_ns, evidence=evidence)


def _verdict(document: Document) -> dict[str, Any]:
    subject, verdict, attempt = document.subject, document.subject.verdict, document.subject.attempt
    frame = user_frame(verdict.failure) if verdict.failure is not None else None
    clocks = attempt.clocks if attempt is not None else NO_CLOCKS
    return {
        **_verdict_core(verdict),
        "attempt": attempt.number if attempt is not None and subject.round is not None else None,
        "round": subject.round.index if subject.round is not None else None,
        "failure": verdict.failure.to_json() if verdict.failure is not None else None,
        "nodes_apart": list(verdict.apart),
        "user_frame": to_builtins(frame) if frame is not None else None,
        "candidates": [_place(failure, clocks) for failure in verdict.candidates[:_MOST_CANDIDATES]],
    }


def _verdict_core(verdict: Verdict) -> dict[str, Any]:
    return {
        **_values(verdict, "cause", "summary", "confidence"),
        "suspects": [_values(suspect, null=("host",)) for suspect in verdict.suspects],
        **_values(verdict, "evidence", "resolution_ns", "category", "retryable", "fingerprint"),
        "same_failure_ranks": ranges(verdict.same_failure),
        "lost_node": _loss(verdict.lost_node) if verdict.lost_node is not None else None,
    }


def _attempt(attempt: AttemptHistory) -> dict[str, Any]:
    nodes: dict[RoundNode, dict[str, Any]] = {}
    head = ("number", "job_id", "nodes", "started_ns", "ended_ns", "outcome", "reason", "exit_code", "decision")
    checkpoints = {"committed": attempt.committed, "not_committed": attempt.not_committed}
    saved = {name: event and _without(_values(event), "event") for name, event in checkpoints.items()}
    return {
        **_values(attempt, *head, "notices", null=("reason",)),
        "outages": [_without(_values(one, node=_node_of(one.node)), "observer") for one in attempt.outages],
        "output_lost": [_values(loss) for loss in attempt.output_lost],
        "commands": [_values(one, node=_node_of(one.node)) for one in attempt.commands],
        **({"checkpoint": saved} if any(saved.values()) else {}),
        "agents_ended": [_without(_values(end), "why") for end in attempt.agent_ends],
        "agents_relaunched": list(attempt.relaunched),
        "nodes_given_up": [
            _values(one, "node", "cause", "reason", "seen_ns", name=one.host) for one in attempt.given_up
        ],
        "problems": list(attempt.problems),
        "clocks": _clocks(attempt.clocks),
        "rounds": [_round(part, nodes) for part in attempt.rounds],
    }


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    del value[name]
    return value


def _node_of(node: int) -> int | None:
    return node if node != SUPERVISOR else None


def _round(part: RoundHistory, nodes: dict[RoundNode, dict[str, Any]]) -> dict[str, Any]:
    return {
        **_values(part, "index", "reason", "started_ns", "seconds", "world_size", null=("reason",)),
        "nodes": [
            nodes.get(node)
            or nodes.setdefault(node, _values(node, "node", "host", "group_rank", ranks=ranges(node.ranks)))
            for node in part.nodes
        ],
        "replaced": [_values(item) for item in part.replaced],
        "in_process": [
            _values(one, interruptions=[{"rank": rank, "interruption": kind} for rank, kind in one.interruptions])
            for one in part.in_process
        ],
        "fresh_starts": [{"host": host, "reason": why} for host, why in part.fresh_starts],
        **_values(part, "succeeded", "stopping_reasons", "decision"),
        "lost_nodes": [_loss(loss) for loss in part.lost_nodes],
        "verdict": _verdict_core(verdict_of(part)) if part.broken else None,
        "failures": [_fold(fold, part.clocks) for fold in fold_failures(part.failures, part.clocks)],
        "heartbeats": [_values(status) for status in part.rank_statuses],
        "stacks": [{"ranks": ranges(group.ranks), **_values(group, "stack", "state")} for group in part.stacks],
        "threads": [{"ranks": ranges(group.ranks), **_values(group, "name", "stack")} for group in part.threads],
    }


def _fold(fold: Fold, clocks: Clocks) -> dict[str, Any]:
    wordings = [
        {"ranks": ranges(same.ranks), "count": len(same.members), "first": same.first.to_json()}
        for same in (fold.wordings if len(fold.wordings) > 1 else ())
    ]
    return {
        "ranks": ranges(fold.ranks),
        "count": len(fold.members),
        "hosts": list(fold.hosts),
        "first": fold.first.to_json(),
        "wordings": wordings,
        "members": [_place(failure, clocks) for failure in fold.members],
    }


def _clocks(clocks: Clocks) -> dict[str, Any] | None:
    if clocks.reference is None and not clocks.contradicted:
        return None
    offsets = [{"node": node, **_values(one, "offset_ns", "bound_ns")} for node, one in clocks.offsets.items()]
    return {
        "reference_node": clocks.reference,
        "reference_host": clocks.host or None,
        "offsets": offsets,
        "contradicted": list(clocks.contradicted),
    }


def _place(failure: WorkerFailure, clocks: Clocks) -> dict[str, Any]:
    moment = clocks.of_failure(failure)
    return _values(
        failure,
        *("global_rank", "local_rank", "host", "node", "pid", "exitcode", "ended_ns"),
        at_ns=moment.at_ns if moment.bound_ns is not None else None,
        at_bound_ns=moment.bound_ns,
        error_file=failure.error_file,
    )


def _loss(loss: NodeLoss) -> dict[str, Any]:
    fields = ("node", "host", "seen_ns", "detail", "agent_only", "left", "broke", "unable", "refusal")
    return {"round": loss.round if loss.round >= 0 else None, **_values(loss, *fields, silent_seconds=loss.age)}
