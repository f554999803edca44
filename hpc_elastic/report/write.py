"""The report's files, written beside the attempt that they are about, and what they say of nodes.

report.json is the whole report for programs: docs/reference/json.md has its schema. The evidence against nodes is for
`hpc_elastic.run.node_score`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from hpc_elastic.base.files import json_text, write_private
from hpc_elastic.base.text import ranges
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure, user_frame
from hpc_elastic.report.blocks import Fold, fold_failures
from hpc_elastic.report.clocks import NO_CLOCKS, SUPERVISOR, Clocks
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document, with_end
from hpc_elastic.report.history import START_REFUSED, AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.render_html import CHEAP_NODE_ROUNDS, render_html
from hpc_elastic.report.render_text import render_job_log, render_text
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Cause, Confidence, Verdict
from hpc_elastic.run.node_score import Evidence, EvidenceKind, NodeScore, is_everywhere
from hpc_elastic.run.paths import GivenUp, RunPaths
from hpc_elastic.run.progress import SLOW_RANK


class ReportResult(Struct, frozen=True, kw_only=True):
    verdict: Verdict
    text: str
    """The job log's: at most 25 lines for a failure."""
    history: RunHistory | None = None
    problems: tuple[str, ...] = ()
    """Files that could not be read or written; the report is there all the same."""


def write_report(
    run_dir: Path | str,
    *,
    attempt: int,
    outcome: str,
    exit_code: int | None,
    decision: str = "",
    history: RunHistory | None = None,
) -> ReportResult:
    """Build an attempt's report from the run directory and write report.txt, report.json and report.html. Never raises.

    The page of a run of many nodes and rounds takes seconds and is not made here: ``hpc-elastic report --format html``.

    Args:
        run_dir: The run.
        attempt: The attempt that has ended.
        outcome: A value of `hpc_elastic.run.paths.Outcome`, as the caller knows it (the events may not say it yet).
        exit_code: With which the job will end; None: not known yet.
        decision: What is done about the job: ``requeue: …`` or ``end: …``.
        history: The run's, where it has been read before.
    """
    try:
        history = with_end(
            history or collect_run(run_dir), attempt=attempt, outcome=outcome, exit_code=exit_code, decision=decision
        )
        document = Document(history, attempt=attempt)
        text = render_job_log(document)
    except Exception as error:  # the job's end must not fail for want of a report
        why = f"no report could be made: {error!r}"
        text = f"the report of {os.fspath(run_dir)} could not be made: {error!r}\n"
        return ReportResult(verdict=Verdict(confidence=Confidence.NONE, evidence=why), text=text, problems=(why,))
    problems: list[str] = []
    paths = RunPaths(Path(os.path.abspath(run_dir))).attempt(attempt)
    files: list[tuple[Path, Callable[[], str]]] = [
        (paths.report_text, lambda: render_text(document, is_file=True)),
        (paths.report_json, lambda: json_report(document)),
    ]
    if sum(len(item.nodes) for part in history.attempts for item in part.rounds) <= CHEAP_NODE_ROUNDS:
        files.append((paths.report_html, lambda: render_html(document)))
    for path, render in files:
        try:
            write_private(path, render())
        except Exception as error:
            problems.append(f"could not write {path}: {error}")
    return ReportResult(verdict=document.subject.verdict, text=text, history=history, problems=tuple(problems))


_WORDS = 400


def node_evidence(history: RunHistory, *, attempt: int) -> tuple[Evidence, ...]:
    found: dict[tuple[str, EvidenceKind, int], Evidence] = {}
    for part in (part for part in history.attempts if part.number == attempt):
        for item in (*_unstarted(part), *_of_rounds(part)):
            found.setdefault((item.node, item.kind, item.round), item)
    return tuple(found.values())


def _unstarted(attempt: AttemptHistory) -> Iterator[Evidence]:
    """Nodes without an agent. Where that is so on every node, it is not the nodes."""
    named = {name: f"no agent could be started there: {why}" for name, why in attempt.unstarted}
    refused = sum(1 for node in attempt.given_up if node.cause == START_REFUSED)
    if refused and refused == len(attempt.nodes):
        return
    could_not = refused + sum(1 for node in attempt.given_up if node.cause == GivenUp.COULD_NOT_RUN.value)
    if not is_everywhere(could_not, nodes=len(attempt.nodes)):
        named |= {loss.host: loss.unable for loss in attempt.unable if loss.host not in named}
    named = {name: why for name, why in named.items() if name in attempt.nodes}
    is_known_of_all = len(attempt.nodes) > 1 or bool(attempt.unstarted)
    if len(named) == len(attempt.nodes) and is_known_of_all:
        return
    for name, why in named.items():
        yield _evidence(attempt, name, EvidenceKind.LOST, 0, why)


def _of_rounds(attempt: AttemptHistory) -> Iterator[Evidence]:
    for part in attempt.rounds:
        evidence = partial(_evidence, attempt, round=part.index)
        for loss in part.lost_nodes:
            kind = _kind_of_loss(attempt, loss)
            name = _name(attempt, loss.node, loss.host)
            if kind is not None and name:
                yield evidence(name, kind, loss.seen_ns, loss.left or loss.summary)
        yield from _of_failures(attempt, part)
        for one in part.slow_ranks:
            if not one.recovered and (name := _name(attempt, one.slow.node, one.slow.host)):
                why, mark = f"{SLOW_RANK}: {one.slow}", f"{SLOW_RANK} {one.slow.rank}"
                yield evidence(name, EvidenceKind.SLOW, one.slow.since_ns, why, fingerprint=mark)


def _of_failures(attempt: AttemptHistory, part: RoundHistory) -> Iterator[Evidence]:
    evidence = partial(_evidence, attempt, round=part.index)
    suspects = {
        node.node: {one.reason for one in part.failures if one.node == node.node and one.node_suspect}
        for node in part.nodes
    }
    # What all nodes show alike is no single one's.
    shared = set.intersection(*suspects.values()) if len(suspects) > 1 else set()
    for failure in part.failures:
        name = _name(attempt, failure.node, failure.host)
        if failure.node_suspect and failure.reason not in shared and name:
            why = failure.reason or failure.headline
            yield evidence(name, EvidenceKind.HARDWARE, failure.ended_ns, why)
    if not part.failures:
        return
    verdict = verdict_of(part)
    first = verdict.failure
    if first is None or verdict.cause is not Cause.WORKER or verdict.confidence is not Confidence.HIGH:
        return
    if verdict.apart:
        for host in verdict.apart:
            node = next((one.node for one in part.nodes if one.host == host), -1)
            if apart := _name(attempt, node, host):
                why = f"all its workers failed alike, and none elsewhere: {first.headline}"
                yield evidence(apart, EvidenceKind.APART, first.ended_ns, why, fingerprint=first.fingerprint)
        return
    hosts = {failure.host for failure in part.failures if failure.global_rank in verdict.same_failure}
    name = _name(attempt, first.node, first.host)
    is_the_scripts = bool(first.oom_kills) or not first.retryable or first.category is Category.INPUT
    if not name or len(hosts) > 1 or is_the_scripts or first.node_suspect:
        return
    infrastructure = first.failure_class in (FailureClass.INFRASTRUCTURE, FailureClass.HANG)
    is_exception = bool(first.exception_type) and not (infrastructure or first.signal)
    kind = EvidenceKind.FIRST_EXCEPTION if is_exception else EvidenceKind.FIRST_FAILURE
    what = f"rank {first.global_rank} failed first: {first.headline}"
    yield evidence(name, kind, first.ended_ns, what, fingerprint=first.fingerprint)


def _kind_of_loss(attempt: AttemptHistory, loss: NodeLoss) -> EvidenceKind | None:
    """An agent that was killed and started again shows nothing about its node; nor does a failed filesystem."""
    if loss.node in attempt.without_files:
        return None if attempt.filesystem_failed else EvidenceKind.UNHEALTHY
    if loss.agent_only or loss.broke:
        return None
    if loss.left:
        return EvidenceKind.UNHEALTHY if "health check" in loss.left else None
    return EvidenceKind.LOST


def _name(attempt: AttemptHistory, node: int, host: str) -> str:
    """Slurm's name of it, which a host's own may differ from; empty where it is not known."""
    if 0 <= node < len(attempt.nodes):
        return attempt.nodes[node]
    return host if host in attempt.nodes else ""


def _evidence(attempt: AttemptHistory, node: str, kind: EvidenceKind, at_ns: int, why: str, **more: Any) -> Evidence:
    return Evidence(
        node=node,
        kind=kind,
        at_ns=at_ns or attempt.ended_ns or attempt.started_ns or 0,
        why=" ".join(why.split())[:_WORDS],
        attempt=attempt.number,
        **more,
    )


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
    nodes: dict[int, dict[str, Any]] = {}  # by identity: rounds share them
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


def _round(part: RoundHistory, nodes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {
        **_values(part, "index", "reason", "started_ns", "seconds", "world_size", null=("reason",)),
        "nodes": [
            nodes.get(id(node))
            or nodes.setdefault(id(node), _values(node, "node", "host", "group_rank", ranks=ranges(node.ranks)))
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
    fields = ("node", "host", "seen_ns", "detail", "agent_only", "left", "broke", "unable", "refusal")
    return {"round": loss.round if loss.round >= 0 else None, **_values(loss, *fields, silent_seconds=loss.age)}
