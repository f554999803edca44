"""report.json: the whole report for programs. The schema is in docs/reference/json.md.

A record whose fields are the object's keys is written as it is (`_values`); what differs is said here.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, to_builtins

from hpc_elastic.base.files import json_text
from hpc_elastic.base.text import ranges
from hpc_elastic.failures.excerpt import user_frame
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.blocks import Fold, fold_failures
from hpc_elastic.report.clocks import NO_CLOCKS, SUPERVISOR, Clocks
from hpc_elastic.report.document import Document
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RoundNode
from hpc_elastic.report.incidents import InProcessRestart
from hpc_elastic.report.subject import verdict_of
from hpc_elastic.report.verdict import Verdict
from hpc_elastic.run.node_score import NodeScore

VERSION = 1
MOST_EVIDENCE = 20
_MOST_CANDIDATES = 100


def render_json(document: Document) -> dict[str, Any]:
    history, shown, measured = document.history, document.shown, document.goodput
    return {
        "version": VERSION,
        "run_id": history.run_id,
        "run_dir": history.run_dir,
        "name": history.name,
        "attempt": shown.number if shown is not None else None,
        "outcome": (shown.outcome if shown is not None else "") or None,
        "exit_code": shown.exit_code if shown is not None else None,
        "decision": (shown.decision if shown is not None else "") or None,
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
    """report.json's text: an object of `render_json`'s, with a line for each round.

    Of a large run the rounds are nearly all of it, and an indented text takes the encoder four times as long.
    """
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


def _values(record: Struct, *, without: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """A record's fields; those that are `optional` as null where they are empty."""
    value: dict[str, Any] = to_builtins(record)
    for name in without:
        del value[name]
    for name in optional:
        value[name] = value[name] or None
    return value


def _bad_node(score: NodeScore, is_excluded: bool) -> dict[str, Any]:
    names = ("kind", "why", "at_ns", "attempt", "round")
    evidence = [to_builtins(item) for item in score.evidence[:MOST_EVIDENCE]]
    return {
        "node": score.node,
        "score": score.score,
        "excluded": is_excluded,
        "until_ns": score.until_ns,
        "evidence": [{name: item[name] for name in names} for item in evidence],
    }


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
        "cause": verdict.cause.value,
        "summary": verdict.summary,
        "confidence": verdict.confidence.value,
        "suspects": [_values(suspect, optional=("host",)) for suspect in verdict.suspects],
        "evidence": verdict.evidence,
        "resolution_ns": verdict.resolution_ns,
        "category": verdict.category.value if verdict.category is not None else None,
        "retryable": verdict.retryable,
        "fingerprint": verdict.fingerprint or None,
        "same_failure_ranks": ranges(verdict.same_failure),
        "lost_node": _loss(verdict.lost_node) if verdict.lost_node is not None else None,
    }


def _attempt(attempt: AttemptHistory) -> dict[str, Any]:
    nodes: dict[RoundNode, dict[str, Any]] = {}
    return {
        "number": attempt.number,
        "job_id": attempt.job_id or None,
        "nodes": list(attempt.nodes),
        "started_ns": attempt.started_ns,
        "ended_ns": attempt.ended_ns,
        "outcome": attempt.outcome or None,
        "reason": attempt.reason or None,
        "exit_code": attempt.exit_code,
        "decision": attempt.decision or None,
        "notices": list(attempt.notices),
        "outages": [
            {
                **_values(one, without=("observer",), optional=("error", "path")),
                "node": one.node if one.node != SUPERVISOR else None,
            }
            for one in attempt.outages
        ],
        "output_lost": [_values(loss) for loss in attempt.output_lost],
        "commands": [
            {**_values(one, optional=("about", "log")), "node": one.node if one.node != SUPERVISOR else None}
            for one in attempt.commands
        ],
        **(
            {
                "checkpoint": {
                    name: None if event is None else _values(event, without=("event",))
                    for name, event in (("committed", attempt.committed), ("not_committed", attempt.not_committed))
                }
            }
            if attempt.committed or attempt.not_committed
            else {}
        ),
        "agents_ended": [_values(end, without=("why",), optional=("detail",)) for end in attempt.agent_ends],
        "agents_relaunched": list(attempt.relaunched),
        "nodes_given_up": [_values(one) for one in attempt.given_up],
        "problems": list(attempt.problems),
        "clocks": _clocks(attempt.clocks),
        "rounds": [_round(part, nodes) for part in attempt.rounds],
    }


def _round(part: RoundHistory, nodes: dict[RoundNode, dict[str, Any]]) -> dict[str, Any]:
    return {
        "index": part.index,
        "reason": part.reason or None,
        "started_ns": part.started_ns,
        "seconds": part.seconds,
        "world_size": part.world_size,
        "nodes": [nodes.get(node) or nodes.setdefault(node, _node(node)) for node in part.nodes],
        "replaced": [_values(item) for item in part.replaced],
        "in_process": [_restart(one) for one in part.in_process],
        "fresh_starts": [{"host": host, "reason": why} for host, why in part.fresh_starts],
        "succeeded": part.succeeded,
        "stopping_reasons": list(part.stopping_reasons),
        "decision": None if part.decision is None else _values(part.decision),
        "lost_nodes": [_loss(loss) for loss in part.lost_nodes],
        "verdict": _verdict_core(verdict_of(part)) if part.broken else None,
        "failures": [_fold(fold, part.clocks) for fold in fold_failures(part.failures, part.clocks)],
        "heartbeats": [_values(status) for status in part.rank_statuses],
        "stacks": [
            {"ranks": ranges(group.ranks), "stack": list(group.stack), "state": group.state} for group in part.stacks
        ],
        "threads": [
            {"ranks": ranges(group.ranks), "name": group.name, "stack": list(group.stack)} for group in part.threads
        ],
    }


def _node(node: RoundNode) -> dict[str, Any]:
    return {"node": node.node, "host": node.host, "group_rank": node.group_rank, "ranks": ranges(node.ranks)}


def _restart(one: InProcessRestart) -> dict[str, Any]:
    interruptions = [{"rank": rank, "interruption": kind} for rank, kind in one.interruptions]
    return {**_values(one, optional=("gave_up",)), "interruptions": interruptions}


def _fold(fold: Fold, clocks: Clocks) -> dict[str, Any]:
    wordings = fold.wordings if len(fold.wordings) > 1 else ()
    return {
        "ranks": ranges(fold.ranks),
        "count": len(fold.members),
        "hosts": list(fold.hosts),
        "first": fold.first.to_json(),
        "wordings": [
            {"ranks": ranges(same.ranks), "count": len(same.members), "first": same.first.to_json()}
            for same in wordings
        ],
        "members": [_place(failure, clocks) for failure in fold.members],
    }


def _clocks(clocks: Clocks) -> dict[str, Any] | None:
    if clocks.reference is None and not clocks.contradicted:
        return None
    return {
        "reference_node": clocks.reference,
        "reference_host": clocks.host or None,
        "offsets": [
            {"node": node, "offset_ns": offset.offset_ns, "bound_ns": offset.bound_ns}
            for node, offset in clocks.offsets.items()
        ],
        "contradicted": list(clocks.contradicted),
    }


def _place(failure: WorkerFailure, clocks: Clocks) -> dict[str, Any]:
    moment = clocks.of_failure(failure)
    names = ("global_rank", "local_rank", "host", "node", "pid", "exitcode", "ended_ns")
    return {
        **{name: getattr(failure, name) for name in names},
        "at_ns": moment.at_ns if moment.bound_ns is not None else None,
        "at_bound_ns": moment.bound_ns,
        "error_file": failure.error_file,
    }


def _loss(loss: NodeLoss) -> dict[str, Any]:
    value = _values(loss, without=("age", "observer"), optional=("detail", "left", "broke", "unable", "refusal"))
    return {**value, "round": loss.round if loss.round >= 0 else None, "silent_seconds": loss.age}
