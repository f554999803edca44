"""What the supervisor takes from a run's history at the end of every attempt: the report's files, and node evidence.

The report is written beside the attempt that it is about. The evidence against nodes is for
`hpc_elastic.run.node_score`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from hpc_elastic.base.files import write_private
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document, with_end
from hpc_elastic.report.history import START_REFUSED, AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.render_html import CHEAP_NODE_ROUNDS, render_html
from hpc_elastic.report.render_json import json_report
from hpc_elastic.report.render_text import render_job_log, render_text
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Cause, Confidence, Verdict
from hpc_elastic.run.heartbeats import SLOW_RANK
from hpc_elastic.run.node_score import Evidence, EvidenceKind, is_everywhere
from hpc_elastic.run.paths import GivenUp, RunPaths


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
