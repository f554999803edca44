"""report.json: the whole report for programs. The schema is in docs/reference/report-json.md."""

from __future__ import annotations

from typing import Any

from hpc_elastic.base.files import json_text
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import NO_CLOCKS, Clocks
from hpc_elastic.report.fold import Fold, SimilarFailures, fold_failures, rank_ranges
from hpc_elastic.report.goodput import Goodput, goodput_of
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RoundNode, RunHistory
from hpc_elastic.report.incidents import in_process_json, losses_json, outages_json
from hpc_elastic.report.subject import Subject, choose_subject, verdict_of
from hpc_elastic.report.verdict import Verdict
from hpc_elastic.run.node_score import NodeScore

VERSION = 1
MOST_EVIDENCE = 20


def render_json(history: RunHistory, *, attempt: int | None = None, goodput: Goodput | None = None) -> dict[str, Any]:
    """The report as JSON values.

    Args:
        history: The run.
        attempt: The attempt that it is about; None: the verdict is on the last failure, the end is the last attempt's.
        goodput: Of the run, where it has been measured before.
    """
    subject = choose_subject(history, attempt=attempt)
    shown = next((part for part in history.attempts if part.number == attempt), None)
    if attempt is None and history.attempts:
        shown = history.attempts[-1]
    return {
        "version": VERSION,
        "run_id": history.run_id,
        "run_dir": history.run_dir,
        "name": history.name,
        "attempt": shown.number if shown is not None else None,
        "outcome": (shown.outcome if shown is not None else "") or None,
        "exit_code": shown.exit_code if shown is not None else None,
        "decision": (shown.decision if shown is not None else "") or None,
        "verdict": _verdict(subject),
        "goodput": _goodput(goodput or goodput_of(history)),
        "bad_nodes": [_bad_node(history, score) for score in history.bad_nodes],
        "problems": list(history.problems),
        "attempts": [_attempt(part) for part in history.attempts],
    }


def json_report(history: RunHistory, *, attempt: int | None = None, goodput: Goodput | None = None) -> str:
    """report.json's text: an object of `render_json`'s, with a line for each round.

    Of a large run the rounds are nearly all of it, and an indented text takes the encoder four times as long.
    """
    value = render_json(history, attempt=attempt, goodput=goodput)
    attempts = value.pop("attempts")
    parts = [f'{json_text(value)[:-1]},\n"attempts": [']
    for number, item in enumerate(attempts):
        rounds = item.pop("rounds")
        parts.append(f'{"," if number else ""}\n {json_text(item)[:-1]},\n "rounds": [')
        parts += [f"{',' if index else ''}\n  {json_text(part)}" for index, part in enumerate(rounds)]
        parts.append("]}")
    parts.append("\n]}\n")
    return "".join(parts)


def _bad_node(history: RunHistory, score: NodeScore) -> dict[str, Any]:
    return {
        "node": score.node,
        "score": score.score,
        "excluded": score.node in history.excluded,
        "until_ns": score.until_ns,
        "evidence": [
            {
                "kind": item.kind.value,
                "why": item.why,
                "at_ns": item.at_ns,
                "run_id": item.run_id,
                "attempt": item.attempt,
                "round": item.round,
            }
            for item in score.evidence[:MOST_EVIDENCE]
        ],
    }


def _goodput(goodput: Goodput) -> dict[str, Any]:
    return {
        "share": goodput.share,
        "wall": goodput.wall,
        "training": goodput.training,
        "starting": goodput.starting,
        "interrupted": goodput.interrupted,
        "queued": goodput.queued,
        "ending": goodput.ending,
        "until_ns": goodput.until_ns,
        "costs": [
            {
                "attempt": cost.attempt,
                "round": cost.round,
                "what": cost.what,
                "seconds": cost.seconds,
                "queued": cost.queued,
                "recovered": cost.recovered,
                "is_failure": cost.is_failure,
            }
            for cost in goodput.costs
        ],
    }


def _verdict(subject: Subject) -> dict[str, Any]:
    verdict = subject.verdict
    return {
        **_verdict_core(verdict),
        "attempt": subject.attempt.number if subject.attempt is not None and subject.round is not None else None,
        "round": subject.round.index if subject.round is not None else None,
        "failure": verdict.failure.to_json() if verdict.failure is not None else None,
        "candidates": [
            _place(failure, subject.attempt.clocks if subject.attempt is not None else NO_CLOCKS)
            for failure in verdict.candidates[:100]
        ],
    }


def _verdict_core(verdict: Verdict) -> dict[str, Any]:
    return {
        "cause": verdict.cause.value,
        "summary": verdict.summary,
        "confidence": verdict.confidence.value,
        "evidence": verdict.evidence,
        "resolution_ns": verdict.resolution_ns,
        "category": verdict.category.value if verdict.category is not None else None,
        "retryable": verdict.retryable,
        "fingerprint": verdict.fingerprint or None,
        "same_failure_ranks": rank_ranges(verdict.same_failure),
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
        "outages": outages_json(attempt.outages),
        "output_lost": losses_json(attempt.output_lost),
        "agents_ended": [
            {"node": end.node, "name": end.name, "code": end.code, "detail": end.detail or None, "seen_ns": end.seen_ns}
            for end in attempt.agent_ends
        ],
        "agents_relaunched": list(attempt.relaunched),
        "nodes_given_up": [
            {"node": one.node, "name": one.name, "cause": one.cause, "reason": one.reason, "seen_ns": one.seen_ns}
            for one in attempt.given_up
        ],
        "problems": list(attempt.problems),
        "clocks": _clocks(attempt),
        "rounds": [_round(part, nodes) for part in attempt.rounds],
    }


def _round(part: RoundHistory, nodes: dict[RoundNode, dict[str, Any]]) -> dict[str, Any]:
    decision = part.decision
    return {
        "index": part.index,
        "reason": part.reason or None,
        "started_ns": part.started_ns,
        "seconds": part.seconds,
        "world_size": part.world_size,
        "nodes": [nodes.get(node) or nodes.setdefault(node, _node(node)) for node in part.nodes],
        "replaced": [
            {
                "node": item.node,
                "host": item.host,
                "group_rank": item.group_rank,
                "replaces_node": item.replaces_node,
                "replaces_host": item.replaces_host,
            }
            for item in part.replaced
        ],
        "in_process": in_process_json(part.in_process),
        "succeeded": part.succeeded,
        "stopping_reasons": list(part.stopping_reasons),
        "decision": None
        if decision is None
        else {
            "action": decision.action,
            "reason": decision.reason,
            "restarts_used": decision.restarts_used,
            "max_restarts": decision.max_restarts,
        },
        "lost_nodes": [_loss(loss) for loss in part.lost_nodes],
        "verdict": _verdict_core(verdict_of(part)) if part.broken else None,
        "failures": [_fold(fold, part.clocks) for fold in fold_failures(part.failures, part.clocks)],
        "heartbeats": [
            {
                "rank": status.rank,
                "node": status.node,
                "step": status.step,
                "section": status.section,
                "age": status.age,
                "told_ns": status.told_ns,
            }
            for status in part.rank_statuses
        ],
        "stacks": [
            {"ranks": rank_ranges(group.ranks), "stack": list(group.stack), "state": group.state}
            for group in part.stacks
        ],
        "threads": [
            {"ranks": rank_ranges(group.ranks), "name": group.name, "stack": list(group.stack)}
            for group in part.threads
        ],
    }


def _node(node: RoundNode) -> dict[str, Any]:
    return {"node": node.node, "host": node.host, "group_rank": node.group_rank, "ranks": rank_ranges(node.ranks)}


def _fold(fold: Fold, clocks: Clocks) -> dict[str, Any]:
    return {
        "ranks": rank_ranges(fold.ranks),
        "count": len(fold.members),
        "hosts": list(fold.hosts),
        "first": fold.first.to_json(),
        "wordings": [_wording(same) for same in fold.wordings] if len(fold.wordings) > 1 else [],
        "members": [_place(failure, clocks) for failure in fold.members],
    }


def _wording(same: SimilarFailures) -> dict[str, Any]:
    return {"ranks": rank_ranges(same.ranks), "count": len(same.members), "first": same.first.to_json()}


def _clocks(attempt: AttemptHistory) -> dict[str, Any] | None:
    clocks = attempt.clocks
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
    return {
        "global_rank": failure.global_rank,
        "local_rank": failure.local_rank,
        "host": failure.host,
        "node": failure.node,
        "pid": failure.pid,
        "exitcode": failure.exitcode,
        "ended_ns": failure.ended_ns,
        "at_ns": moment.at_ns if moment.bound_ns is not None else None,
        "at_bound_ns": moment.bound_ns,
        "error_file": failure.error_file,
    }


def _loss(loss: NodeLoss) -> dict[str, Any]:
    return {
        "node": loss.node,
        "host": loss.host,
        "round": loss.round if loss.round >= 0 else None,
        "seen_ns": loss.seen_ns,
        "silent_seconds": loss.age,
        "detail": loss.detail or None,
        "agent_only": loss.agent_only,
        "left": loss.left or None,
        "broke": loss.broke or None,
        "unable": loss.unable or None,
    }
