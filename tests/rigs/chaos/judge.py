"""What must hold in a chaotic run, whatever was done to it. Pure: from the evidence to complaints.

What a disturbance excuses is written here, one rule each; all else is a defect.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.spec import RendezvousSettings, settings_from_conf
from tests.rigs.chaos.evidence import Evidence, Injection, Work, host_node, told_records
from tests.rigs.chaos.schedule import Kind

DETECTION_SECONDS = 15.0
"""How long after a node was killed, or woke up, the others may still find out that it was away."""
LATE_STOP_SECONDS = 5.0
"""How long after a stopped or cut-off node can act again its workers of an older round may still run."""

GUARDIAN_SECONDS = 1.0
"""Between two looks of a guardian at its agent."""

_MAKES_ABSENT = (Kind.KILL_AGENT, Kind.KILL_NODE, Kind.LOSE_NODE)


def complaints(evidence: Evidence) -> list[str]:
    """All that is wrong, in words; empty where everything held."""
    found: list[str] = []
    for rule in (_log, _rounds, _ranks, _no_two_rounds, _evictions, _finished, _events, _outputs, _agents_ended):
        found += [f"{rule.__name__.strip('_')}: {text}" for text in rule(evidence)]
    return found


def known_gaps(evidence: Evidence) -> list[str]:
    """What is within the bound, and told: workers of an agent that was stopped alone ran on beside a newer round."""
    found = []
    for old, new in _beside(evidence):
        if any(injection.action.kind is Kind.STOP_AGENT for injection in _excuses(evidence, old, new.began)):
            found.append(f"round {old.round} on node {old.node} ran {old.last - new.began:.1f} s beside {new.round}")
    return found


# -- the log --------------------------------------------------------------------------------------------------------


def _log(evidence: Evidence) -> Iterator[str]:
    for before, after in zip(evidence.records, evidence.records[1:], strict=False):
        a, b = before.record, after.record
        pair = told_records([before, after])
        if b.number != a.number + 1:
            yield f"records are missing between:\n{pair}"
        if b.term not in (a.term, a.term + 1) or (b.term == a.term) != (b.leader == a.leader):
            yield f"the term does not follow the coordinator:\n{pair}"
        if b.round not in (a.round, a.round + 1) or a.status is Status.CLOSED:
            yield f"the round does not follow:\n{pair}"
        if b.epoch != a.epoch:
            yield f"another epoch:\n{pair}"


def _rounds(evidence: Evidence) -> Iterator[str]:
    """One member list per round."""
    lists: dict[int, tuple[str, ...]] = {}
    for seen in evidence.records:
        record = seen.record
        if record.status not in (Status.FROZEN, Status.FINAL):
            continue
        members = tuple(member.uid for member in record.members)
        if lists.setdefault(record.round, members) != members:
            yield f"round {record.round} has two member lists: {lists[record.round]} and {members}"
        nodes = [host_node(uid) for uid in members]
        if len(set(nodes)) != len(nodes):
            yield f"round {record.round} has a node twice: {members}"
        plan = evidence.schedule.plan
        if not plan.min_nodes <= len(members) <= plan.nodes:
            yield f"round {record.round} has {len(members)} members"


# -- the workers ----------------------------------------------------------------------------------------------------


def _finals(evidence: Evidence) -> dict[int, RoundRecord]:
    return {s.record.round: s.record for s in evidence.records if s.record.status is Status.FINAL}


def _ranks(evidence: Evidence) -> Iterator[str]:
    """As the workers themselves saw them: contiguous, distinct, in the order of the member list."""
    finals = _finals(evidence)
    by_round: dict[int, list[Work]] = defaultdict(list)
    for work in evidence.works:
        by_round[work.round].append(work)
    for index, works in sorted(by_round.items()):
        final = finals.get(index)
        if final is None:
            yield f"workers ran in round {index}, which never became final"
            continue
        nodes = [host_node(member.uid) for member in final.members]
        for work in works:
            if work.world != len(nodes) or not 0 <= work.rank < len(nodes) or nodes[work.rank] != work.node:
                yield f"round {index} has nodes {nodes}, and a worker took itself for {work}"
        ranks = [work.rank for work in works]
        if len(set(ranks)) != len(ranks):
            yield f"round {index}: a rank ran twice: {sorted(ranks)}"


def _beside(evidence: Evidence) -> Iterator[tuple[Work, Work]]:
    """(older, newer) that ran at the same time; of the newer ones the first."""
    first: dict[int, Work] = {}
    for work in evidence.works:
        if work.round not in first or work.began < first[work.round].began:
            first[work.round] = work
    newer = sorted(first.values(), key=lambda work: work.began)
    for old in evidence.works:
        for new in newer:
            if new.round > old.round and old.last > new.began:
                yield old, new
                break


def _excuses(evidence: Evidence, old: Work, at: float) -> list[Injection]:
    """What kept the older worker's node from acting on the newer round that had begun by `at`."""
    kinds = (Kind.STOP_AGENT, Kind.STOP_NODE, Kind.FREEZE_ONE, Kind.FREEZE_ALL)
    return [
        injection
        for injection in evidence.injections
        if injection.action.kind in kinds
        and old.node in injection.nodes
        and injection.began <= at
        and injection.ended >= old.began
    ]


def _can_act_from(evidence: Evidence, injection: Injection) -> float:
    """When the node can end its workers again: with its agent stopped alone, its guardian does it.

    A guardian that did not get to run itself begins anew to see the agent stopped.
    """
    if injection.action.kind is not Kind.STOP_AGENT:
        return injection.ended
    plan = evidence.schedule.plan
    settings = settings_from_conf({"heartbeat_ttl": f"{plan.ttl:g}"}, RendezvousSettings(doorbell=plan.doorbell))
    until = injection.began + settings.silence_until_lost + GUARDIAN_SECONDS
    for began, ended in sorted(evidence.stalls):
        if injection.began <= ended and began <= until:
            until = max(until, ended + settings.silence_until_lost + GUARDIAN_SECONDS)
    return min(injection.ended, until)


def _no_two_rounds(evidence: Evidence) -> Iterator[str]:
    for old, new in _beside(evidence):
        until = max(
            (_can_act_from(evidence, injection) for injection in _excuses(evidence, old, new.began)), default=None
        )
        if until is None:
            yield (
                f"the worker of round {old.round} on node {old.node} was alive {old.last - new.began:.3f} s after "
                f"round {new.round} had begun on node {new.node}, and nothing kept its node from ending it"
            )
        elif old.last > until + LATE_STOP_SECONDS:
            yield (
                f"the worker of round {old.round} on node {old.node} ran {old.last - until:.1f} s on after its node "
                f"could act again, beside round {new.round}"
            )


def _finished(evidence: Evidence) -> Iterator[str]:
    """All workers of the last round came to their end, where the run was to succeed."""
    if evidence.schedule.too_few or not evidence.works or evidence.finish_said == float("inf"):
        return
    last = max(work.round for work in evidence.works)
    for work in evidence.works:
        if work.round == last and not work.finished:
            yield f"the run is over, and rank {work.rank} of its last round ({last}) has not finished"


# -- who was taken for lost -----------------------------------------------------------------------------------------


def _evictions(evidence: Evidence) -> Iterator[str]:
    hosts: dict[int, int] = {}
    """Node index of the log → node of the rig."""
    for before, after in zip(evidence.records, evidence.records[1:], strict=False):
        for member in after.record.members:
            hosts[member.node] = host_node(member.uid)
        for index in sorted(set(after.record.lost) - set(before.record.lost)):
            node = hosts.get(index, index)
            if not _may_be_lost(evidence, node, after.at):
                yield (
                    f"node {node} was taken for lost, and nothing was wrong with it but "
                    f"{[str(d) for d in evidence.injections if node in d.nodes and d.began < after.at][-4:]}:\n"
                    f"{told_records([before, after])}"
                )


def _may_be_lost(evidence: Evidence, node: int, at: float) -> bool:
    plan = evidence.schedule.plan
    for injection in evidence.injections:
        if node not in injection.nodes or not injection.began <= at <= injection.ended + DETECTION_SECONDS:
            continue
        kind, seconds = injection.action.kind, injection.action.seconds
        if kind in _MAKES_ABSENT:
            return True
        if kind in (Kind.STOP_AGENT, Kind.STOP_NODE) and seconds >= min(plan.ttl, 3.0 if plan.doorbell else plan.ttl):
            return True
    # A lost node stays lost, whenever the records say so again.
    return any(d.action.kind is Kind.LOSE_NODE and node in d.nodes and d.began <= at for d in evidence.injections)


# -- what was written -----------------------------------------------------------------------------------------------


def _events(evidence: Evidence) -> Iterator[str]:
    """Every event log is whole: no gap, and nothing torn but the last line of an agent that was killed."""
    if not evidence.ended:
        return
    for name, lines in evidence.events.items():
        for position, line in enumerate(lines):
            is_last = position == len(lines) - 1
            if "torn" in line:
                if not is_last:
                    yield f"{name}: line {position} is torn: {line['torn']!r}"
            elif line.get("n") != position:
                yield f"{name}: line {position} has number {line.get('n')}"
                break


def _outputs(evidence: Evidence) -> Iterator[str]:
    """What a worker had finished is in its log, unless its agent died or the disk took nothing."""
    if not evidence.events or not evidence.ended:
        return
    for work in evidence.works:
        if _output_may_be_lost(evidence, work):
            continue
        text = evidence.outputs.get((work.round, work.rank), b"")
        if b"bytes lost here" in text:
            yield f"round {work.round} rank {work.rank}: output was given up: {text[-300:]!r}"
            continue
        kept = len(re.findall(rb"^unit \d+$", text, re.MULTILINE))
        if kept < work.units:
            yield f"round {work.round} rank {work.rank} on node {work.node}: {work.units} units done, {kept} in its log"


def _output_may_be_lost(evidence: Evidence, work: Work) -> bool:
    kinds = (*_MAKES_ABSENT, Kind.FULL, Kind.FAULTS, Kind.FREEZE_ALL, Kind.FREEZE_ONE, Kind.STOP_AGENT)
    return any(
        injection.action.kind in kinds
        and work.node in injection.nodes
        and injection.began <= work.last + 5.0
        and injection.ended >= work.began
        for injection in evidence.injections
    )


def _agents_ended(evidence: Evidence) -> Iterator[str]:
    """No agent ended but by our hand, or with the run."""
    is_over = any(seen.record.status is Status.CLOSED for seen in evidence.records)
    for name, lines in evidence.events.items():
        if not name.startswith("supervisor"):
            continue
        for position, line in enumerate(lines):
            if line.get("event") != "agent_ended" or line.get("code") in (None, -9):
                continue
            node = line.get("node")
            went_on = any(x.get("event") == "agent_relaunched" and x.get("node") == node for x in lines[position:])
            if went_on or not is_over or line.get("code") not in (0, 1):
                yield f"the agent on node {node} ended by itself: {line.get('detail')}"
