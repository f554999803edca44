"""The judge of chaotic runs: what it must complain about, one defect each, and what a disturbance excuses."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_elastic.rendezvous.state import Member, RoundRecord, Status
from tests.rigs.chaos.evidence import Evidence, Injection, SeenRecord, Work
from tests.rigs.chaos.judge import complaints, known_gaps
from tests.rigs.chaos.schedule import Action, Kind, Plan, make_schedule

PLAN = Plan(nodes=2, min_nodes=1, bursts=1)


def uid(node: int) -> str:
    return f"{node:05d}-n{node}-0001000000000000-abcd"


def members(*nodes: int) -> tuple[Member, ...]:
    return tuple(Member(uid(node), node, 1) for node in nodes)


def record(number: int, status: Status, *, round_index: int = 0, **more: object) -> SeenRecord:
    values: dict[str, object] = {"members": members(0, 1), "term": 1, "leader": uid(0), **more}
    made = RoundRecord(number=number, epoch="e", round=round_index, status=status, **values)  # type: ignore[arg-type]
    return SeenRecord(at=100.0 + number, record=made)


def work(node: int, *, round_index: int = 0, rank: int | None = None, began: float, last: float) -> Work:
    facts = {"node": node, "agent": uid(node), "round": round_index, "rank": node if rank is None else rank}
    return Work(**facts, pid=1, world=2, began=began, last=last, finished=True)  # type: ignore[arg-type]


def good() -> Evidence:
    """Two rounds of two nodes, one after the other."""
    schedule = make_schedule(1, PLAN)
    evidence = Evidence(schedule=dataclasses.replace(schedule, too_few=False), finish_said=119.0, ended=True)
    evidence.records = [
        record(1, Status.JOINABLE, members=()),
        record(2, Status.FROZEN),
        record(3, Status.FINAL),
        record(4, Status.JOINABLE, round_index=1),
        record(5, Status.FROZEN, round_index=1),
        record(6, Status.FINAL, round_index=1),
        record(7, Status.CLOSED, round_index=1),
    ]
    evidence.works = [
        *[work(node, began=103.5, last=104.5) for node in (0, 1)],
        *[work(node, round_index=1, began=106.5, last=120.0) for node in (0, 1)],
    ]
    return evidence


def injection(kind: Kind, node: int, began: float, ended: float) -> Injection:
    action = Action(after=0, kind=kind, node=node, seconds=ended - began)
    return Injection(action=action, nodes=(node,), began=began, ended=ended)


def only(evidence: Evidence, rule: str) -> str:
    """The one complaint that there is."""
    found = complaints(evidence)
    assert len(found) == 1, found
    assert found[0].startswith(f"{rule}: ")
    return found[0]


def test_nothing_is_wrong_with_a_good_run() -> None:
    assert complaints(good()) == []


@pytest.mark.parametrize(
    ("place", "records", "says"),
    [
        pytest.param(3, [], "log: records are missing between", id="a missing record"),
        pytest.param(
            6,
            [record(7, Status.CLOSED, round_index=1, term=2)],
            "log: the term does not follow the coordinator",
            id="a term without a change of coordinator",
        ),
        pytest.param(
            2,
            [record(3, Status.FINAL, members=members(1, 0))],
            "rounds: round 0 has two member lists",
            id="two member lists",
        ),
    ],
)
def test_a_defect_of_the_log(place: int, records: list[SeenRecord], says: str) -> None:
    evidence = good()
    evidence.records[place : place + 1] = records
    assert says in "".join(complaints(evidence))


def test_a_rank_that_two_workers_had_or_that_another_had() -> None:
    evidence = good()
    evidence.works.append(work(1, round_index=1, rank=1, began=106.6, last=107.0))
    assert "ran twice" in only(evidence, "ranks")
    evidence.works[2:] = [work(node, round_index=1, rank=1 - node, began=106.5, last=120.0) for node in (0, 1)]
    assert ["took itself for" in text for text in complaints(evidence)] == [True, True]


def test_an_older_round_beside_a_newer_one() -> None:
    evidence = good()
    evidence.works[1].last = 106.6
    assert "nothing kept its node" in only(evidence, "no_two_rounds")
    evidence.injections = [injection(Kind.STOP_NODE, 1, 104.0, 106.0)]
    assert complaints(evidence) == []
    evidence.works[1].last = 119.0
    assert "after its node could act again" in only(evidence, "no_two_rounds")


def test_a_stopped_agent_s_workers_have_to_end_before_it_goes_on() -> None:
    evidence = good()
    evidence.injections = [injection(Kind.STOP_AGENT, 1, 104.0, 130.0)]
    evidence.works[1].last = 107.5
    assert complaints(evidence) == []
    assert known_gaps(evidence)
    evidence.works[1].last = 115.0
    assert "no_two_rounds" in only(evidence, "no_two_rounds")
    evidence.stalls = [(90.0, 92.0), (120.0, 121.0)]
    assert "no_two_rounds" in only(evidence, "no_two_rounds"), "the machine stood still before, or after"
    evidence.stalls = [(105.0, 110.0)]
    assert complaints(evidence) == [], "its guardian could not see the agent stopped for long enough"


def test_a_node_that_was_taken_for_lost() -> None:
    evidence = good()
    lost = [record(4, Status.JOINABLE, round_index=1, lost=(1,))]
    lost += [record(5, Status.FROZEN, round_index=1), record(6, Status.FINAL, round_index=1)]
    evidence.records[3:6] = lost
    assert "taken for lost" in only(evidence, "evictions")
    for kind, began, ended in (
        (Kind.FREEZE_ALL, 90.0, 103.9),  # never excuses
        (Kind.STOP_NODE, 102.0, 103.0),  # too short
        (Kind.KILL_AGENT, 80.0, 80.0),  # too long ago
    ):
        evidence.injections = [injection(kind, 1, began, ended)]
        assert "taken for lost" in only(evidence, "evictions"), kind
    for kind, began, ended in ((Kind.KILL_NODE, 101.0, 101.0), (Kind.STOP_AGENT, 99.0, 110.0)):
        evidence.injections = [injection(kind, 1, began, ended)]
        assert complaints(evidence) == [], kind


def test_a_worker_that_did_not_come_to_its_end() -> None:
    evidence = good()
    evidence.works[-1].finished = False
    assert "has not finished" in only(evidence, "finished")


def test_an_event_log_with_a_hole() -> None:
    evidence = good()
    evidence.events = {"agent-0.jsonl": [{"n": 0, "event": "a"}, {"torn": "\0\0"}, {"n": 2, "event": "c"}]}
    assert "is torn" in only(evidence, "events")
    evidence.events = {"agent-0.jsonl": [{"n": 0, "event": "a"}, {"n": 2, "event": "c"}]}
    assert "has number 2" in only(evidence, "events")
    evidence.events = {"agent-0.jsonl": [{"n": 0, "event": "a"}, {"torn": '{"n": 1'}]}
    assert complaints(evidence) == [], "it was killed in mid-line"


def test_output_that_is_not_in_the_log() -> None:
    evidence = good()
    evidence.events = {"agent-0.jsonl": [{"n": 0, "event": "a"}]}
    for one in evidence.works:
        one.units = 2
        evidence.outputs[one.round, one.rank] = b"unit 0\nunit 1\n"
    assert complaints(evidence) == []
    evidence.outputs[1, 0] = b"unit 0\n"
    assert "2 units done, 1 in its log" in only(evidence, "outputs")
    evidence.injections = [injection(Kind.KILL_NODE, 0, 107.0, 107.0)]
    assert complaints(evidence) == []


def test_an_agent_that_ended_by_itself() -> None:
    evidence = good()
    ended = {"n": 0, "event": "agent_ended", "node": 1, "code": 1, "detail": "exit code 1"}
    again = {"n": 1, "event": "agent_relaunched", "node": 1}
    evidence.events = {"supervisor.jsonl": [ended, again, {"n": 2, "event": "verdict"}]}
    assert "ended by itself" in only(evidence, "agents_ended")
    evidence.events = {"supervisor.jsonl": [{**ended, "code": 2}, {"n": 1, "event": "verdict"}]}
    assert "ended by itself" in only(evidence, "agents_ended")
    evidence.events = {"supervisor.jsonl": [ended, {"n": 1, "event": "verdict"}]}
    assert complaints(evidence) == [], "with the run"
    evidence.events = {"supervisor.jsonl": [{**ended, "code": -9}, again]}
    assert complaints(evidence) == []


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    plan = Plan(nodes=4, min_nodes=2, bursts=8)
    assert make_schedule(5, plan) == make_schedule(5, plan)
    assert len({make_schedule(seed, plan).bursts for seed in range(20)}) == 20


def test_no_schedule_starts_more_agents_than_the_supervisor_does() -> None:
    plan = Plan(nodes=4, min_nodes=2, bursts=30)
    deadly = (Kind.KILL_AGENT, Kind.KILL_NODE)
    for seed in range(200):
        schedule = make_schedule(seed, plan)
        kills = [action.node for action in schedule.actions() if action.kind in deadly]
        worst = max(kills.count(node) for node in range(4)) + kills.count(-1)
        assert worst <= plan.kills_per_node
        assert len(schedule.lost()) <= plan.nodes - plan.min_nodes - 1
