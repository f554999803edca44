"""An attempt's evidence against nodes, from its history, for `hpc_elastic.run.node_score`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.report.history import START_REFUSED, AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Cause, Confidence
from hpc_elastic.run.heartbeats import SLOW_RANK
from hpc_elastic.run.node_score import Evidence, EvidenceKind, is_everywhere
from hpc_elastic.run.paths import GivenUp

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
