"""The failure that was the cause: a pure decision over one round's failures, with its evidence and its confidence.

Classes come first (what is not a symptom), then each agent's own time of the failure, taken to one clock as far as the
hosts' clocks were compared. Two times that are closer than the clocks can tell apart are a tie, and reported as one; so
are times of hosts whose clocks nobody compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from hpc_elastic.base.text import duration, first_of, milliseconds_text, plural, ranges, ranks_text, seconds_text
from hpc_elastic.failures.classify import (
    NOT_RETRYABLE_EXIT_CODE,
    apart_in_round,
    is_same_failure,
    may_be_of_node,
    wrong_input,
)
from hpc_elastic.failures.collectives import RankComparison, compare_ranks
from hpc_elastic.failures.origin import OWN_WATCHDOG, gave_up_waiting, is_raised_by_script
from hpc_elastic.failures.peers import chain_ends, describe_peers, resolve_peers, with_peers
from hpc_elastic.failures.ranking import (
    SAME_NODE_NS,
    Category,
    FailureClass,
    Moment,
    Order,
    Ranking,
    Standing,
    Suspect,
    clock_bound_ns,
    gap_ns,
    order_of,
    resolution_ns,
)
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.history import START_REFUSED, NodeLoss, RoundHistory
from hpc_elastic.report.verdict import (
    ONLY_FAILURE,
    Cause,
    Confidence,
    RanksKnown,
    Verdict,
    decide_hang,
    in_order,
    look_at,
    of_worker,
)
from hpc_elastic.run.agent_events import RanksObserved
from hpc_elastic.run.node_score import is_everywhere

_HOSTS = 3
_SILENT_SECONDS = 3.0
"""A node whose last heartbeat is younger was not lost because of its silence."""
_SIGN_NS = 1_000_000_000
"""A lost node lived for so long after the last heartbeat, at most: then the next one was due."""


def decide_verdict(part: RoundHistory, *, ranks: Mapping[int, str] | None = None) -> Verdict:
    """Each lost node is a candidate at the time of its last sign. `ranks`: rank → host, where it is known."""
    failures, clocks = part.failures, part.clocks
    ranking, when = _rank(failures, clocks)
    causes, symptoms, first = _lost_peer_last(ranking.causes, when), ranking.symptoms, ranking.first
    first = causes[0] if causes and first is not None and first.failure_class is not FailureClass.HANG else first
    # One that was printed after the stop may be the stop's: it is no evidence, and a consequence all the same.
    consequences = [failure for failure in ranking.all if failure.failure_class is FailureClass.SYMPTOM]
    retryable = all(failure.exitcode != NOT_RETRYABLE_EXIT_CODE for failure in failures)
    hosts = ranks or {}
    known = RanksKnown([failure.global_rank for failure in ranking.all], part.ends, part.activities, hosts, clocks)
    lost = [(clocks.of_loss(loss), loss) for loss in (*part.lost_nodes, *part.own_failures)]
    losses = sorted(lost, key=lambda at: (at[0].at_ns, at[1].node))
    if losses and (not causes or losses[0][0].at_ns <= when[id(causes[0])].at_ns):
        order = Order.KNOWN
        if causes:  # the node may have lived on after the last heartbeat
            order = order_of(losses[0][0], when[id(causes[0])], slack_ns=_SIGN_NS if losses[0][1].age else 0)
        return _node_verdict([loss for _, loss in losses], causes, consequences, order, retryable=retryable)
    if first is None:
        evidence = f"all {len(failures)} were ended by this job itself" if failures else "there is no failure"
        return Verdict(evidence=evidence)
    if not causes:
        seen = when[id(symptoms[0] if symptoms else first)]
        verdict = _symptoms_verdict(ranking, seen, compare_ranks(part.activities, hosts=ranks), known, part.sockets)
    elif first.failure_class is FailureClass.HANG:
        compared = compare_ranks(part.activities, hosts=ranks)
        early = known.ends_before_hang(first)
        verdict = decide_hang(first, causes, consequences, part.rank_statuses, early, compared, len(hosts))
    else:
        verdict = _worker_verdict(causes, ranking.all, len(consequences), losses, [when[id(one)] for one in causes])
        missing = sorted(set(hosts) - {failure.global_rank for failure in (*causes, *consequences)})
        found = find_python_traceback(first.traceback)
        is_by_script = found is not None and bool(found.chain) and is_raised_by_script(found.chain[0])
        gave_up = is_by_script and gave_up_waiting(first.headline)
        if missing and gave_up and verdict.confidence is Confidence.HIGH:
            waited = f"{verdict.evidence}; it gave up waiting"
            if len(missing) < len(verdict.same_failure):
                waited += f", and {ranks_text(missing)} did not fail: look there, too"
            verdict = replace(verdict, confidence=Confidence.LOW, evidence=waited)
        same = verdict.same_failure
        early = known._replace(failed=same).early_ends(when[id(first)])
        if early and len(same) == len(causes) > len(early) and verdict.confidence is not Confidence.TIE:
            # The script may have made another exception of the connection that it lost.
            verdict = replace(verdict, confidence=Confidence.LOW, evidence=f"{verdict.evidence}. {look_at(early)}")
    return verdict if retryable else replace(verdict, retryable=False)


def _rank(failures: Sequence[WorkerFailure], clocks: Clocks) -> tuple[Ranking[WorkerFailure], dict[int, Moment]]:
    ended = {id(failure): clocks.of_failure(failure) for failure in failures}
    printed = {id(failure): clocks.of_printed(failure) for failure in failures}

    def standing(failure: WorkerFailure) -> Standing:
        begun = printed[id(failure)]
        return failure.standing(ended[id(failure)].at_ns, begun.at_ns if begun is not None else 0)

    ranking = Ranking(failures, standing)
    if not ranking.by_printed:
        return ranking, ended
    return ranking, {key: printed[key] or moment for key, moment in ended.items()}


def _lost_peer_last(causes: list[WorkerFailure], when: Mapping[int, Moment]) -> list[WorkerFailure]:
    """The causes in order, what may have closed a connection before the failure that reports the closed one."""
    if not causes or not causes[0].standing().lost_connection:
        return causes
    lost = when[id(causes[0])]
    closed = (
        one
        for one in causes[1:]
        if not one.standing().lost_connection and order_of(lost, when[id(one)]) is not Order.KNOWN
    )
    before = next(closed, None)
    return causes if before is None else [before, *(one for one in causes if one is not before)]


def decide_start_verdict(unable: Sequence[NodeLoss], *, nodes: int) -> Verdict:
    """`unable`: nodes of which no agent ever took part."""
    if not unable:
        return Verdict(evidence="no failures")
    refused = unable[0].refusal
    if refused and len(unable) == nodes and all(loss.refusal for loss in unable):
        whose = "the agent" if nodes == 1 else f"each of the {nodes} agents"
        return Verdict(
            evidence=f"{whose} refused to start the workers; no node is to blame",
            headline=refused,
            category=Category.INPUT,
            fingerprint=START_REFUSED,
            retryable=False,
        )
    if is_everywhere(len(unable), nodes=nodes):
        here = "any node" if len(unable) == nodes else "any node but the batch host"
        what = f"no agent ran on {here}: {unable[0].summary}"
        whose = f"all {nodes} nodes" if len(unable) == nodes else f"all {nodes} nodes but the batch host"
        evidence = (
            f"{whose} failed, so it is no single node: look at what they share (the interpreter, "
            "the run directory's mount, a TaskProlog, options for srun)"
        )
        return Verdict(evidence=evidence, headline=what, category=Category.INPUT, fingerprint="node_unable")
    first, *others = unable
    parts = ["no agent of it ever took part"]
    if len(unable) < nodes:
        parts.append(f"{plural(nodes - len(unable), 'other node')} could")
    parts += [loss.summary for loss in others[:_HOSTS]]
    if len(others) > _HOSTS:
        parts.append(f"{plural(len(others) - _HOSTS, 'more node')} could not either")
    return Verdict(
        cause=Cause.NODE,
        evidence="; ".join(parts),
        lost_node=first,
        category=Category.INFRASTRUCTURE,
        fingerprint="node_unable",
    )


def _symptoms_verdict(
    ranking: Ranking[WorkerFailure],
    seen: Moment,
    compared: RankComparison,
    known: RanksKnown,
    sockets: Sequence[RanksObserved],
) -> Verdict:
    """`seen`: the first of the symptoms."""
    symptoms, hosts = ranking.symptoms, known.hosts
    early = known.early_ends(seen)
    watchdog = next((failure for failure in symptoms if failure.reason == OWN_WATCHDOG.says), None)
    if watchdog is not None and not (early or any(s.rank != watchdog.global_rank for s in compared.suspects)):
        evidence = "likely: its own watchdog ended it, and no other rank stands out"
        return of_worker(watchdog, Confidence.LOW, evidence, same=_same(watchdog, ranking.all))
    if ranking.late and ranking.first is not None and not (early and symptoms):
        return _late_verdict(ranking.first, len(symptoms))
    suspects: tuple[Suspect, ...] = ()
    peers = resolve_peers(known.activities, sockets, hosts=hosts)
    if not compared.is_of_all:  # what all ranks have in common is no single rank's fault
        late = known.late_ends(seen)
        odd = with_peers(in_order(compared.suspects, late), chain_ends(peers, failed=known.failed), hosts=hosts)
        printed = [
            Suspect(rank=one.global_rank, host=one.host, why=f"it had printed {one.headline}") for one in ranking.late
        ]
        suspects = known.left_behind() or in_order(early, odd, printed) or known.silent()
    says = "; ".join(filter(None, (compared.says, describe_peers(peers, hosts=hosts))))
    return _unknown_verdict(symptoms, suspects, says, same=_same(symptoms[0], ranking.all))


def _unknown_verdict(
    symptoms: Sequence[WorkerFailure], suspects: tuple[Suspect, ...], says: str, *, same: tuple[int, ...]
) -> Verdict:
    is_only = len(symptoms) == 1
    what = "the only failure" if is_only else f"{len(symptoms)} failures, and each"
    reads, more = f"not known: {what} reads like the consequence of another", f": {says}" if says else ""
    evidence = f"{reads}{more or ', which left no trace'}. Shown is the first one seen"
    if suspects:
        evidence = f"{reads}{more}. {look_at(suspects)}{'' if is_only else '. Shown is the first one seen'}"
    return of_worker(symptoms[0], Confidence.NONE, evidence, cause=Cause.UNKNOWN, same=same, suspects=suspects)


def _worker_verdict(
    causes: list[WorkerFailure],
    failures: list[WorkerFailure],
    symptoms: int,
    losses: list[tuple[Moment, NodeLoss]],
    when: list[Moment],
) -> Verdict:
    root, first = causes[0], when[0]
    moments = zip(causes, when, strict=True)
    others = [(failure, moment) for failure, moment in moments if failure.fingerprint != root.fingerprint]
    # By exit code alone a symptom has the same name.
    same = _same(root, [failure for failure in failures if failure.failure_class is not FailureClass.SYMPTOM])
    confidence = Confidence.HIGH
    if others:
        confidence, evidence = _among(root, first, others)
    elif len(same) > 1:
        evidence = f"the same failure on {len(same)} ranks ({ranges(same)}); this one was seen first"
    elif symptoms:
        evidence = "the only failure that is not a consequence of another one"
    else:
        evidence = ONLY_FAILURE
    if root.is_of_logged and confidence is Confidence.HIGH:
        confidence, evidence = Confidence.LOW, f"likely, by what was logged just before; {evidence}"
    if root.is_stopped and (others or len(same) < 2):  # of one failure on several ranks the cause is certain
        confidence = Confidence.LOW if confidence is Confidence.HIGH else confidence
        evidence = f"likely: it had printed this before this job ended it; {evidence}"
    if symptoms:
        evidence += f"; {plural(symptoms, 'other')} {'is a consequence' if symptoms == 1 else 'are consequences'}"
    if losses:
        gone, loss = losses[0]
        order = order_of(first, gone)
        confidence = confidence if order is Order.KNOWN else Confidence.TIE
        evidence += f"; {_after(loss)}" if order is Order.KNOWN else f"; not certain: {_about_then(loss, order)}"
    return of_worker(
        root,
        confidence,
        evidence,
        same=same,
        candidates=(failure for failure, _ in others),
        resolution_ns=resolution_ns(first, others[0][1]) if others else None,
    )


def _among(
    root: WorkerFailure, first: Moment, others: Sequence[tuple[WorkerFailure, Moment]]
) -> tuple[Confidence, str]:
    orders = [(failure, moment, order_of(first, moment)) for failure, moment in others]
    unknown = [(failure, moment) for failure, moment, order in orders if order is Order.UNKNOWN]
    near = [(failure, moment) for failure, moment, order in orders if order is Order.TIE]
    parts = []
    if near:
        parts.append(f"{_names(near)} failed too, in another way, {_within(first, [moment for _, moment in near])}")
    if unknown:
        gap = max(0, gap_ns(first, unknown[0][1]))
        hosts = "its clock was" if len({failure.host for failure, _ in unknown}) == 1 else "those clocks were"
        parts.append(
            f"{_names(unknown)} failed too, in another way, and {hosts} not compared with {root.host}'s "
            f"(by the clocks as they are, {seconds_text(gap / 1e9)} later)"
        )
    if parts:
        return Confidence.TIE, f"not certain: {'; '.join(parts)}"
    failure, moment = others[0]
    gap = gap_ns(first, moment)
    bound = clock_bound_ns(first, moment) if moment.node != first.node else None
    known = f"; clocks known to within {milliseconds_text(bound)}" if bound is not None else ""
    return Confidence.HIGH, (
        f"first of {len(others) + 1} different failures, {seconds_text(gap / 1e9)} before the next "
        f"(rank {failure.global_rank} on {failure.host}{known})"
    )


def _within(first: Moment, near: Sequence[Moment]) -> str:
    if all(moment.node == first.node for moment in near):
        return f"within the clocks' resolution ({milliseconds_text(SAME_NODE_NS)} on one host)"
    resolution = max(resolution_ns(first, moment) or 0 for moment in near)
    gap = max(abs(gap_ns(first, moment)) for moment in near)
    if gap < 1_000_000_000:
        return f"within the clocks' resolution ({milliseconds_text(resolution)} between hosts)"
    # A clock was set between two comparisons.
    return f"{seconds_text(gap / 1e9)} apart by clocks that are known to within {seconds_text(resolution / 1e9)} only"


def _names(failures: Sequence[tuple[WorkerFailure, Moment]]) -> str:
    return first_of([f"rank {failure.global_rank} on {failure.host}" for failure, _ in failures], 3)


def _about_then(loss: NodeLoss, order: Order) -> str:
    what = loss.broke or f"{loss.host} {'left' if loss.left else 'was lost'}"
    if order is Order.UNKNOWN:
        return f"{what} too; the clocks were not compared, so which came first is not known"
    return f"{what} at about the same time"


def _after(loss: NodeLoss) -> str:
    if loss.broke:
        return f"after it, {loss.broke}"
    return f"{loss.host} left after it" if loss.left else f"node {loss.host} was lost after it"


def _node_verdict(
    lost: list[NodeLoss], causes: list[WorkerFailure], symptoms: list[WorkerFailure], order: Order, *, retryable: bool
) -> Verdict:
    first = lost[0]
    fingerprint = "agent_died" if first.agent_only else "node_left" if first.left else "node_lost"
    silent = [f"no heartbeat for {seconds_text(first.age)}"] if first.age >= _SILENT_SECONDS else []
    parts = [", ".join([*silent, *([first.detail] if first.detail else [])]) or "its agent left the run"]
    if first.broke:
        fingerprint = "platform_failure"
        parts = ["the script did not cause this: a process of hpc-elastic's own did"]
    elif first.left:
        parts = ["it found itself unfit for another round, and took itself out"]
    confidence = Confidence.HIGH
    if len(lost) > 1:
        parts.append(f"lost too: {', '.join(loss.host for loss in lost[1:4])}" + (" ..." if len(lost) > 4 else ""))
    if causes and order is not Order.KNOWN:
        confidence = Confidence.TIE
        how = "at about the same time" if order is Order.TIE else "too, by a clock that was not compared"
        parts.append(f"not certain: rank {causes[0].global_rank} on {causes[0].host} failed {how}")
    if symptoms:
        parts.append(
            f"{plural(len(symptoms), 'failure')} elsewhere {'is' if len(symptoms) == 1 else 'are'} its consequence"
        )
    return Verdict(
        cause=Cause.NODE,
        confidence=confidence,
        evidence="; ".join(parts),
        lost_node=first,
        category=Category.PLATFORM if first.agent_only or first.broke else Category.INFRASTRUCTURE,
        fingerprint=fingerprint,
        retryable=retryable,
        candidates=tuple(causes),
    )


def _late_verdict(failure: WorkerFailure, symptoms: int) -> Verdict:
    what = "it had printed this, and had not ended when this job ended it"
    if 0 < failure.stopped_ns < failure.printed_ns:
        what = (
            f"it printed this {seconds_text((failure.printed_ns - failure.stopped_ns) / 1e9)} after this job ended it"
        )
    elif failure.is_caught:
        what = "it had caught and printed this, and had not ended when this job ended it"
    if symptoms:
        what += f"; {plural(symptoms, 'other failure')} {'is a consequence' if symptoms == 1 else 'are consequences'}"
    return of_worker(failure, Confidence.LOW, f"likely: {what}")


def _same(root: WorkerFailure, failures: Sequence[WorkerFailure]) -> tuple[int, ...]:
    return tuple(sorted(failure.global_rank for failure in failures if is_same_failure(failure, root)))


def verdict_of(part: RoundHistory) -> Verdict:
    """The verdict on one round. Text, goodput and JSON ask for it several times: it is found once."""
    verdict: Verdict = vars(part).get("verdict") or vars(part).setdefault("verdict", _find_verdict(part))
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
    may_be = any(may_be_of_node(one) for one in part.failures)
    apart = apart_in_round(part.failures, {node.node: len(node.ranks) for node in part.nodes}) if may_be else ()
    if failure.node not in apart:
        # Where a node's disk has failed the others write to theirs: this path is a wrong one.
        return replace(verdict, category=Category.INPUT) if wrong_input(failure) else verdict
    hosts = {node.node: node.host for node in part.nodes}
    names = tuple(hosts[node] for node in apart)
    ranks = f"all {plural(sum(len(node.ranks) for node in part.nodes if node.node in apart), 'rank')}"
    evidence = f"the same failure on {ranks} of {', '.join(names)}, and on none elsewhere: the node lacks something"
    return replace(verdict, evidence=evidence, retryable=True, category=Category.INFRASTRUCTURE, apart=names)
