"""A report's subject: which attempt, which of its rounds, and the verdict on it."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.outcome import Outcome
from hpc_elastic.base.text import duration, plural
from hpc_elastic.failures.classify import NOT_OURS
from hpc_elastic.failures.contrast import apart_in_round, wrong_input
from hpc_elastic.failures.origin import gave_up_waiting
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import AttemptHistory, RoundHistory, RunHistory
from hpc_elastic.report.incidents import OutageKind, refused_hosts
from hpc_elastic.report.root_cause import decide_start_verdict, decide_verdict
from hpc_elastic.report.verdict import ONLY_FAILURE, Cause, Verdict
from hpc_elastic.run.attempt import WITHOUT_VERDICT

_WITHOUT = 3


class Subject(Struct, frozen=True, kw_only=True):
    attempt: AttemptHistory | None
    round: RoundHistory | None
    verdict: Verdict


def choose_subject(history: RunHistory, *, attempt: int | None = None) -> Subject:
    """The last round that something broke, of one attempt or, going back, of any; or the nodes it began without."""
    candidates = [part for part in history.attempts if attempt is None or part.number == attempt]
    for part in reversed(candidates):
        if part.filesystem_failed and part.outcome != "succeeded":
            return _filesystem_subject(part)
        for item in reversed(part.rounds):
            verdict = verdict_of(item)
            if verdict.cause is not Cause.NONE:
                return Subject(attempt=part, round=item, verdict=_by_slurms_end(part, verdict))
        if _had_too_few_nodes(part):
            start = decide_start_verdict(part.unable, nodes=len(part.nodes))
            return Subject(attempt=part, round=None, verdict=start)
    last = candidates[-1] if candidates else None
    return Subject(attempt=last, round=None, verdict=decide_start_verdict((), nodes=0))


def _by_slurms_end(attempt: AttemptHistory, verdict: Verdict) -> Verdict:
    """Slurm's SIGTERM to the workers is a consequence where Slurm alone knows how the attempt ended."""
    action, _, end = attempt.decision.partition(WITHOUT_VERDICT)
    failure = verdict.failure
    is_slurms = failure is not None and failure.signal == "SIGTERM" and NOT_OURS in failure.reason
    if action != "end: " or "(Slurm:" not in end or not is_slurms:
        return verdict
    return Verdict(
        headline=end,
        evidence="Slurm's own record; it ended the workers by SIGTERM after that",
        category=Category.INFRASTRUCTURE,
        fingerprint="ended_by_slurm",
    )


def _filesystem_subject(attempt: AttemptHistory) -> Subject:
    """The filesystem ended the attempt: whatever else failed in it, the nodes could not go on from that."""
    refused = [one for one in attempt.outages if one.kind is OutageKind.FILESYSTEM]
    longest = max(refused, key=lambda one: one.seconds, default=None)
    gone = sorted(attempt.nodes[node] for node in attempt.without_files if 0 <= node < len(attempt.nodes))
    parts = [f"given up after the patience of a health check by the agents on {', '.join(gone)}"]
    how = "refused its nodes, or did not answer"
    if longest is not None:
        how = f"refused its nodes: {longest.error}{f' ({longest.path})' if longest.path else ''}"
        lasts = f"for {longest.seconds:.0f} s{'' if longest.over else ', to the end'}"
        hosts = ", ".join(dict.fromkeys([*gone, *refused_hosts(attempt.outages)]))
        parts.insert(0, f"seen on {hosts}, {lasts}")
    broken = next((item for item in reversed(attempt.rounds) if item.failures), None)
    if broken is not None:
        parts.append(f"a failure that the nodes could not go on from: {verdict_of(broken).summary}")
    verdict = Verdict(
        cause=Cause.FILESYSTEM,
        headline=f"the filesystem of the run directory {how}",
        evidence="; ".join(parts),
        category=Category.INFRASTRUCTURE,
        fingerprint="filesystem_refused",
    )
    return Subject(attempt=attempt, round=broken or (attempt.rounds[-1] if attempt.rounds else None), verdict=verdict)


def verdict_of(part: RoundHistory) -> Verdict:
    """The verdict on one round. Text, goodput and JSON ask for it several times: it is found once."""
    kept = vars(part)
    if "verdict" not in kept:
        kept["verdict"] = _find_verdict(part)
    verdict: Verdict = kept["verdict"]
    return verdict


def _find_verdict(part: RoundHistory) -> Verdict:
    # Of a thousand nodes this takes longer than all the rest, and only a round without a cause needs it.
    blameless = (FailureClass.SYMPTOM, FailureClass.STOPPED_BY_US)
    has_hang = any(failure.failure_class is FailureClass.HANG for failure in part.failures)
    is_unknown = all(failure.failure_class in blameless or failure.may_follow_stop for failure in part.failures)
    needs_ranks = is_unknown or has_hang or any(gave_up_waiting(failure.headline) for failure in part.failures)
    ranks = {rank: node.host for node in part.nodes for rank in node.ranks} if needs_ranks else None
    verdict = decide_verdict(part, ranks=ranks)
    if verdict.evidence == ONLY_FAILURE and verdict.failure is not None:
        verdict = replace(verdict, evidence=_beside_stopped(verdict.failure, part))
    elif verdict.failure is not None and len(verdict.same_failure) > 1 and verdict.cause is Cause.WORKER:
        same = set(verdict.same_failure)
        stopped = (part.world_size or 0) - len({end.rank for end in part.ends} | same)
        stopped -= sum(1 for one in part.failures if not one.stopped_by_agent and one.global_rank not in same)
        if stopped > 0:
            others = f"{plural(stopped, 'other')} {'was' if stopped == 1 else 'were'} stopped before they could fail"
            verdict = replace(verdict, evidence=f"{verdict.evidence}; {others}")
    return _contrasted(verdict, part)


def _beside_stopped(failure: WorkerFailure, part: RoundHistory) -> str:
    ended = {end.rank for end in part.ends} | {one.global_rank for one in part.failures if not one.stopped_by_agent}
    stopped = (part.world_size or 0) - len(ended)
    if stopped < 1:
        return ONLY_FAILURE
    others = "the other was" if stopped == 1 else "the others were" if len(ended) == 1 else f"{stopped} others were"
    began = next((one.stopping_ns for one in part.times if one.node == failure.node), None) or 0
    if began < failure.ended_ns or not failure.ended_ns:
        they = "it" if stopped == 1 else "they"
        return f"first of {part.world_size}; {others} stopped before {they} could fail"
    return (
        f"first of {part.world_size}; {others} stopped within {duration((began - failure.ended_ns) / 1e9, fine=True)}"
    )


def _contrasted(verdict: Verdict, part: RoundHistory) -> Verdict:
    failure = verdict.failure
    if verdict.cause is not Cause.WORKER or failure is None:
        return verdict
    apart = apart_in_round(part.failures, {node.node: len(node.ranks) for node in part.nodes})
    if failure.node not in apart:
        # Where a node's disk has failed the others write to theirs: this path is a wrong one.
        return replace(verdict, category=Category.INPUT) if wrong_input(failure) else verdict
    hosts = {node.node: node.host for node in part.nodes}
    names = tuple(hosts[node] for node in apart)
    ranks = f"all {plural(sum(len(node.ranks) for node in part.nodes if node.node in apart), 'rank')}"
    evidence = f"the same failure on {ranks} of {', '.join(names)}, and on none elsewhere: the node lacks something"
    return replace(verdict, evidence=evidence, retryable=True, category=Category.INFRASTRUCTURE, apart=names)


def failure_count(history: RunHistory, *, attempt: int | None = None) -> int:
    """How many rounds something broke, and attempts that never had enough nodes; of one attempt, or of all."""
    parts = [part for part in history.attempts if attempt is None or part.number == attempt]
    broken = sum(1 for part in parts for item in part.rounds if verdict_of(item).cause is not Cause.NONE)
    return broken + sum(1 for part in parts if not part.rounds and _had_too_few_nodes(part))


def _had_too_few_nodes(part: AttemptHistory) -> bool:
    is_refused = part.outcome == Outcome.FAILED.value and all(loss.refusal for loss in part.unable)
    return bool(part.unable) and (part.outcome == Outcome.TOO_FEW_NODES.value or is_refused)


def nodes_done_without(subject: Subject, shown: AttemptHistory) -> list[str]:
    """Nodes of which no agent took part in the attempt that is shown, where the verdict does not name them."""
    if subject.round is None and subject.attempt is shown and subject.verdict.category is not None:
        return []
    named = [loss.summary for loss in shown.unable]
    more = len(named) - _WITHOUT
    return named[:_WITHOUT] + ([f"{more} more nodes"] if more > 0 else [])


def with_end(history: RunHistory, *, attempt: int, outcome: str, exit_code: int | None, decision: str) -> RunHistory:
    """The history with an attempt's end as its supervisor knows it, before the events say so."""
    parts = tuple(
        replace(part, outcome=outcome, exit_code=exit_code, decision=decision or part.decision)
        if part.number == attempt
        else part
        for part in history.attempts
    )
    return replace(history, attempts=parts)
