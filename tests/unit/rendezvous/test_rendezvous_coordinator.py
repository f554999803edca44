"""Every row of the coordinator's decisions: what it sees → what it commits, and what it says about it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.rendezvous.claims import ClaimKind, claim_key
from hpc_elastic.rendezvous.cluster_view import ClaimScanner, ClusterView
from hpc_elastic.rendezvous.coordinator import decide_growth, next_proposal
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.membership import NodeInfo, Peers
from hpc_elastic.rendezvous.proposals import Proposal, RestartDecision, consequences, propose_close
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import (
    FailureMemory,
    HangMark,
    Member,
    NodeFailure,
    RoundEvent,
    RoundRecord,
    Status,
)
from hpc_elastic.run.control_events import NodeLost
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore
from tests.rigs.rendezvous_world import World

SETTINGS = RendezvousSettings(min_nodes=2, max_nodes=4, expected_nodes=4)
NAMES = {0: "node 0", 1: "node 1", 2: "node 2", 3: "nid003"}
MEMORY = FailureMemory(fingerprint="before", times=1, step=7)


def uid(node: int, start: int = 1) -> str:
    """Of the `start`-th agent of a node."""
    return f"{node:05d}-n{node}-{start:016x}-abcd"


def info(name: str, local_world_size: int = 1) -> NodeInfo:
    node = int(name[:5])
    return NodeInfo(uid=name, node=node, host=f"n{node}", local_world_size=local_world_size, addresses=())


def members(*names: str) -> tuple[Member, ...]:
    return tuple(Member(name, int(name[:5]), 1) for name in names)


def record(status: Status, *names: str, **changes: Any) -> RoundRecord:
    plain = RoundRecord(
        number=9,
        epoch="e",
        term=3,
        leader=uid(0),
        round=5,
        status=status,
        members=members(*names),
        restarts_used=1,
        reason="why it opened",
        memory=MEMORY,
    )
    return replace(plain, **changes)


def view(of: RoundRecord, *, joined: Sequence[str] = (), **seen: Any) -> ClusterView:
    plain = ClusterView(
        record=of,
        joined={name: info(name) for name in joined},
        acked={},
        failures={},
        done=frozenset(),
        leaving={},
        gone=frozenset(),
        dead=frozenset(),
        silent=frozenset(),
        answered=frozenset(),
        names={3: "nid003"},
        since_status=0.0,
        since_lost=0.0,
    )
    return replace(plain, **{name: frozenset(v) if isinstance(v, list | set) else v for name, v in seen.items()})


def failure(node: int, failure_class: str = "root", message: str = "boom") -> NodeFailure:
    return NodeFailure(node=node, fingerprint="F", failure_class=failure_class, retryable=True, message=message)


@dataclass
class DecideRestart:
    """The restart policy's place: answers what it was made with, and remembers what it was asked."""

    answer: RestartDecision = field(default_factory=lambda: settled())
    asked: list[tuple[RoundRecord, tuple[NodeFailure, ...]]] = field(default_factory=list)

    def __call__(self, of: RoundRecord, failures: Sequence[NodeFailure]) -> RestartDecision:
        self.asked.append((of, tuple(failures)))
        return self.answer


def settled(**changes: Any) -> RestartDecision:
    plain = RestartDecision(go_on=True, reason="", memory=FailureMemory(fingerprint="after", times=2, step=8))
    return replace(plain, **changes)


def decide(
    seen: ClusterView, settings: RendezvousSettings = SETTINGS, decide_restart: DecideRestart | None = None
) -> Proposal | None:
    proposal = next_proposal(seen, settings, decide_restart or DecideRestart())
    if proposal is not None:
        assert proposal.record.number == seen.record.number + 1
        assert proposal.record.term == seen.record.term
        assert proposal.record.leader == seen.record.leader
        assert proposal.record.epoch == seen.record.epoch
    return proposal


def committed(
    seen: ClusterView, settings: RendezvousSettings = SETTINGS, decide_restart: DecideRestart | None = None
) -> Proposal:
    proposal = decide(seen, settings, decide_restart)
    assert proposal is not None
    return proposal


def nodes_of(proposal: Proposal) -> list[int]:
    return [member.node for member in proposal.record.members]


ALL = [uid(0), uid(1), uid(2), uid(3)]
START = record(Status.JOINABLE, round=0)
AGAIN = record(Status.JOINABLE, *ALL, failed=True)
FROZEN = record(Status.FROZEN, *ALL)
FINAL = record(Status.FINAL, *ALL, master="n0:1")


# -- joinable: waiting, last call, freezing


@pytest.mark.parametrize(
    ("what", "seen", "nodes"),
    [
        ("all that were launched are here", view(START, joined=ALL), [0, 1, 2, 3]),
        ("MIN is not here yet", view(START, joined=ALL[:1], since_status=599), None),
        ("nobody is here", view(START), None),
        ("MIN is here, the last call goes on", view(START, joined=ALL[:2], since_status=29.9), None),
        ("the last call is over", view(START, joined=ALL[1:3], since_status=30), [1, 2]),
        ("nobody is waited for who was given up", view(START, joined=ALL[1:], gone=[0]), [1, 2, 3]),
        ("who was given up stays out", view(START, joined=ALL, gone=[0]), [1, 2, 3]),
        ("nor who was lost before", view(replace(START, lost=(0, 1)), joined=ALL[2:]), [2, 3]),
        ("nor who died while joining", view(START, joined=ALL, dead=ALL[1:2]), [0, 2, 3]),
        ("one that died is no member after the last call", view(START, joined=ALL[:3], dead=ALL[:1]), None),
        ("the same, later", view(START, joined=ALL[:3], dead=ALL[:1], since_status=30), [1, 2]),
        ("one that leaves is no member", view(START, joined=ALL, leaving={uid(3): "left"}, since_status=30), [0, 1, 2]),
        ("members come back", view(replace(AGAIN, waiting=2), joined=ALL), [0, 1, 2, 3]),
        (
            "a living member is waited for beyond the last call: its workers are still ending",
            view(AGAIN, joined=ALL[:3], since_status=599),
            None,
        ),
        ("a dead member is not waited for", view(AGAIN, joined=ALL[:3], dead=ALL[3:]), [0, 1, 2]),
        ("nor one whose node was given up", view(AGAIN, joined=ALL[:3], gone=[3]), [0, 1, 2]),
        ("lost nodes that are here again are members", view(replace(AGAIN, lost=(2, 3)), joined=ALL), [0, 1, 2, 3]),
        # A member that is alive and stuck must not end the run of the others.
        ("the timeout: those that are here are enough", view(AGAIN, joined=ALL[:3], since_status=600), [0, 1, 2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_when_a_round_is_frozen(what: str, seen: ClusterView, nodes: list[int] | None) -> None:
    if nodes is None:
        assert decide(seen) is None
        return
    proposal = committed(seen)
    record = proposal.record
    assert (proposal.event, record.status) == (RoundEvent.FREEZE, Status.FROZEN)
    assert (record.round, record.waiting, nodes_of(proposal)) == (seen.record.round, 0, nodes)
    assert record.lost == tuple(node for node in range(4) if node not in nodes)


def spares(seen: ClusterView, *nodes: int) -> ClusterView:
    """The same, where agents on these nodes were submitted as spares."""
    joined = {name: replace(node, spare=node.node in nodes) for name, node in seen.joined.items()}
    return replace(seen, joined=joined)


TWO_OF_FOUR = replace(SETTINGS, max_nodes=2, expected_nodes=4)


@pytest.mark.parametrize(
    ("what", "seen", "nodes"),
    [
        ("all others are here", view(START, joined=ALL[:2]), [0, 1]),
        ("one is not, spares are", view(START, joined=ALL[1:]), None),
        ("the same when the last call is over", view(START, joined=ALL[1:], since_status=30), [1, 2]),
        ("or the one was given up", view(START, joined=ALL[1:], gone=[0]), [1, 2]),
        ("one of two members was lost", view(record(Status.JOINABLE, *ALL[:2], lost=(0,)), joined=ALL[1:3]), [2, 1]),
        (
            "a spare that has a place is as good as any",
            view(record(Status.JOINABLE, uid(2), uid(1)), joined=[uid(0), uid(1), uid(2)]),
            [2, 1],
        ),
        # Its slot is its own: a spare does not take it.
        ("a member still ends its workers", view(record(Status.JOINABLE, *ALL[:2]), joined=ALL[1:]), None),
        ("and joins", view(record(Status.JOINABLE, *ALL[:2]), joined=ALL), [0, 1]),
        ("at MAX nobody else is waited for", view(START, joined=ALL[:2]), [0, 1]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_spares_are_the_second_choice(what: str, seen: ClusterView, nodes: list[int] | None) -> None:
    proposal = decide(spares(seen, 2, 3), TWO_OF_FOUR)
    assert (nodes_of(proposal) if proposal else None) == nodes


def test_a_spare_that_nobody_waited_for_is_not_missing() -> None:
    proposal = committed(spares(view(START, joined=ALL[:2]), 2, 3), TWO_OF_FOUR)
    assert proposal.record.lost == ()
    assert "without" not in proposal.reason
    late = committed(spares(view(START, joined=ALL[:3], gone=[3]), 2, 3), TWO_OF_FOUR)
    assert late.record.lost == (3,)


def test_who_takes_whose_place_is_told() -> None:
    proposal = committed(
        view(record(Status.JOINABLE, *ALL[:3], lost=(1,)), joined=[uid(0), uid(2), uid(3)], names={1: "n1", 3: "n3"})
    )
    assert nodes_of(proposal) == [0, 3, 2]
    assert [(gone.node, come.node) for gone, come in proposal.replaced] == [(1, 3)]
    assert "n3 took the place of n1" in proposal.reason


def test_places_of_lost_members_stay_vacant_until_somebody_takes_them() -> None:
    shrunk = committed(view(replace(AGAIN, lost=(2, 3)), joined=ALL[:2])).record
    assert (len(shrunk.members), shrunk.vacant) == (2, 2)
    of = replace(shrunk, status=Status.JOINABLE)
    assert committed(view(of, joined=ALL[:3])).record.vacant == 1
    assert committed(view(of, joined=ALL)).record.vacant == 0
    assert committed(view(START, joined=ALL[:2], since_status=30)).record.vacant == 0, "who never came was not lost"


def test_a_node_that_comes_for_a_lost_one_is_taken_in_whatever_grow_says() -> None:
    never = replace(SETTINGS, grow=GrowPolicy.NEVER)
    of = record(Status.FINAL, *ALL[:2], lost=(2, 3), master="n0:1")
    waits = committed(view(of, joined=[uid(2)]), never)
    assert (waits.event, waits.reason) == (RoundEvent.ANNOUNCE, "node 2 waits for a new round to begin (--grow never)")
    comes = committed(view(replace(of, vacant=1), joined=[uid(2)]), never)
    assert (comes.event, comes.reason) == (RoundEvent.REOPEN, "node 2 came for a lost node")


def test_a_node_that_waits_and_leaves_is_not_taken_in() -> None:
    of = replace(SMALL, waiting=1)
    proposal = committed(view(of, joined=[uid(3)], leaving={uid(3): "its agent left"}))
    assert (proposal.event, proposal.record.waiting) == (RoundEvent.ANNOUNCE, 0)


def test_after_a_checkpoint_those_who_wait_come_in() -> None:
    settings = replace(SETTINGS, grow=GrowPolicy.CHECKPOINT)
    seen = view(replace(SMALL, waiting=1), joined=[uid(3)], since_status=60, since_waiting=20)
    assert committed(replace(seen, since_saved=5.0), settings).event is RoundEvent.REOPEN
    assert decide(replace(seen, since_saved=5.0, done=ALL[:1]), settings) is None, "the end is near"


def test_of_two_agents_of_one_node_the_newer_one_that_lives_is_a_member() -> None:
    names = [uid(0, 1), uid(0, 2), *ALL[1:]]
    for order in (names, names[::-1]):
        proposal = committed(view(START, joined=order))
        assert [m.uid for m in proposal.record.members] == [uid(0, 2), *ALL[1:]]
    proposal = committed(view(START, joined=names, dead=[uid(0, 2)]))
    assert proposal.record.members[0].uid == uid(0, 1)


def test_local_world_sizes_are_the_nodes_own() -> None:
    seen = replace(view(START), joined={uid(n): info(uid(n), n + 1) for n in range(4)})
    assert [m.local_world_size for m in committed(seen).record.members] == [1, 2, 3, 4]


def test_freezing_says_who_is_not_there() -> None:
    proposal = committed(view(START, joined=ALL[1:3], since_status=30, gone=[3]))
    assert "without node 0, nid003" in proposal.reason


# -- joinable: nodes that leave

WHY = "health check failed: GPU 2 has 3 uncorrectable ECC errors"


def test_a_member_that_leaves_before_it_joined_again_is_not_waited_for() -> None:
    proposal = committed(view(AGAIN, joined=ALL[:3], leaving={uid(3): WHY}))
    assert (proposal.event, proposal.record.lost, proposal.left) == (RoundEvent.FREEZE, (3,), {3: WHY})
    assert nodes_of(proposal) == [0, 1, 2]
    assert f"without nid003 (left: {WHY})" in proposal.reason
    assert committed(view(START, joined=ALL[:3], leaving={uid(3): WHY})).event is RoundEvent.FREEZE, "nor at first"


def test_a_new_agent_on_a_node_that_left_is_taken_in() -> None:
    newer = uid(3, start=2)
    proposal = committed(view(AGAIN, joined=[*ALL[:3], newer], leaving={uid(3): WHY}))
    assert [member.uid for member in proposal.record.members] == [*ALL[:3], newer]
    assert proposal.left == {}


def test_too_few_are_left_at_once_with_the_reason() -> None:
    proposal = committed(view(AGAIN, joined=ALL[:1], leaving=dict.fromkeys(ALL[1:], WHY)))
    assert (proposal.event, proposal.record.outcome) == (RoundEvent.CLOSE, Outcome.TOO_FEW_NODES)
    assert proposal.record.retryable
    assert f"nid003 (left: {WHY})" in proposal.reason


def test_the_reason_is_read_once_and_who_gives_none_leaves_too() -> None:
    store = MemoryStore()
    detector = FailureDetector(store, SETTINGS, poll_intervals(SETTINGS), FakeClock())
    scanner = ClaimScanner(store, ALL[0], Peers(store, info(ALL[0]), None), detector)
    left = claim_key(AGAIN.round, ClaimKind.LEAVE, uid(3))
    store.put_if_absent(left, '{"reason":"no GPU"}')
    store.put_if_absent(claim_key(AGAIN.round, ClaimKind.LEAVE, uid(1)), "nonsense")
    assert scanner.look(AGAIN).leaving == {uid(3): "no GPU", uid(1): ""}
    store.delete(left)
    store.overwrite(left, '{"reason":"another"}')
    assert scanner.look(AGAIN).leaving[uid(3)] == "no GPU"


@pytest.mark.parametrize(
    ("least", "give_up", "event"),
    [(2, True, RoundEvent.CLOSE), (2, False, None), (1, False, RoundEvent.FREEZE)],
)
def test_where_too_few_are_left_each_one_waits_for_replacements_or_the_run_is_closed(
    least: int, give_up: bool, event: RoundEvent | None
) -> None:
    settings = replace(SETTINGS, min_nodes=least, max_nodes=2, expected_nodes=2, give_up=give_up)
    one_is_lost = record(Status.JOINABLE, *ALL[:2], lost=(1,))
    seen = view(one_is_lost, joined=ALL[:1], dead=ALL[1:2], since_status=1000.0, since_lost=1000.0)
    proposal = decide(seen, settings)
    assert (proposal.event if proposal is not None else None) is event


def test_where_the_time_is_over_the_nodes_that_never_came_are_named_as_missing() -> None:
    world = World(RendezvousSettings(min_nodes=3, max_nodes=3, expected_nodes=3, timeout=30))
    for node in (0, 1):
        world.start(node)

    def is_closed() -> bool:
        newest = world.newest()
        return newest is not None and newest.status is Status.CLOSED

    assert world.run(is_closed)
    missing = [fields for _, event, fields in world.events if event == "node_missing"]
    assert missing == [{"round": 0, "node": 2, "host": "", "reason": "it has not joined"}]


# -- joinable: what the restart policy says


def test_the_policy_is_asked_about_the_last_rounds_failures() -> None:
    decide_restart = DecideRestart(settled(restarts_used=2, reason="restart 2 of 3"))
    failures = {uid(1): failure(1), uid(2): failure(2, "symptom")}
    proposal = committed(view(AGAIN, joined=ALL, failures=failures), decide_restart=decide_restart)
    assert decide_restart.asked == [(AGAIN, (failure(1), failure(2, "symptom")))]
    assert proposal.record.restarts_used == 2
    assert proposal.record.memory == decide_restart.answer.memory
    assert proposal.reason == "restart 2 of 3"


def test_where_the_policy_gives_no_reason_the_rounds_own_stays() -> None:
    assert committed(view(AGAIN, joined=ALL)).reason == "why it opened"


def test_the_policy_is_asked_only_when_the_round_is_frozen() -> None:
    decide_restart = DecideRestart()
    decide(view(AGAIN, joined=ALL[:3], failures={uid(1): failure(1)}), decide_restart=decide_restart)
    decide(view(FROZEN, acked=dict.fromkeys(ALL, "n0:1")), decide_restart=decide_restart)
    decide(view(FINAL, failures={uid(1): failure(1)}), decide_restart=decide_restart)
    assert decide_restart.asked == []


@pytest.mark.parametrize("retryable", [True, False])
def test_the_policy_gives_up(retryable: bool) -> None:
    decide_restart = DecideRestart(settled(go_on=False, reason="restarts exhausted", retryable=retryable))
    proposal = committed(view(AGAIN, joined=ALL, failures={uid(1): failure(1)}), decide_restart=decide_restart)
    memory = decide_restart.answer.memory
    end = {"outcome": Outcome.FAILED, "reason": "restarts exhausted", "retryable": retryable, "memory": memory}
    assert proposal.event is RoundEvent.CLOSE
    assert proposal.record == AGAIN.successor(status=Status.CLOSED, **end)


@pytest.mark.parametrize(
    ("what", "seen", "lost"),
    [
        ("nobody", view(AGAIN, joined=ALL), False),
        ("a member died", view(AGAIN, joined=ALL[:3], dead=ALL[3:]), True),
        ("a member was noticed as lost before", view(replace(AGAIN, lost=(3,)), joined=ALL[:3]), True),
        ("a member's node was given up", view(AGAIN, joined=ALL[:3], gone=[3]), True),
        ("a member's agent was started again", view(AGAIN, joined=[*ALL[:3], uid(3, 2)]), True),
        (
            "a member's agent was started again, the old one's claim is here too",
            view(AGAIN, joined=[*ALL, uid(3, 2)]),
            True,
        ),
        (
            "a node that was lost long ago, and no member since",
            view(record(Status.JOINABLE, *ALL[:3], lost=(3,), failed=True), joined=ALL[:3]),
            False,
        ),
        (
            "a node that was given up long ago",
            view(replace(AGAIN, members=members(*ALL[:3])), joined=ALL[:3], gone={3}),
            False,
        ),
        ("a node that never came", view(replace(START, failed=True), joined=ALL[:3], since_status=30), False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_symptoms_of_a_lost_member_are_free(what: str, seen: ClusterView, lost: bool) -> None:
    decide_restart, found = DecideRestart(), {uid(0): failure(0, "symptom")}
    proposal = committed(replace(seen, failures=found), decide_restart=decide_restart)
    assert proposal.event is RoundEvent.FREEZE
    assert decide_restart.asked[0][1] == (() if lost else (failure(0, "symptom"),))
    assert proposal.explained == ((0,) if lost else ())


@pytest.mark.parametrize(
    ("what", "seen", "explained"),
    [
        ("its connection broke with the node", {"since_failed": {uid(0): 7.0}, "since_sign": {uid(3): 7.4}}, True),
        ("the node gave a sign just then", {"since_failed": {uid(0): 7.0}, "since_sign": {uid(3): 6.5}}, True),
        ("the node lived on after it", {"since_failed": {uid(0): 12.0}, "since_sign": {uid(3): 7.0}}, False),
        ("nobody knows when", {}, False),
        ("it was in the next round already", {"joined": ALL, "dead": ALL[3:]}, False),
        ("it took itself out", {"leaving": {uid(3): "unfit"}}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lost_member_explains_what_failed_with_it_whatever_the_words(
    what: str, seen: dict[str, Any], explained: bool
) -> None:
    facts = {"since_failed": {uid(0): 7.0}, "since_sign": {uid(3): 7.4}} if seen else {}
    gone = {"joined": ALL[:3], "dead": ALL[3:], **facts, **seen}
    decide_restart = DecideRestart()
    proposal = committed(view(AGAIN, failures={uid(0): failure(0)}, **gone), decide_restart=decide_restart)
    assert decide_restart.asked[0][1] == (() if explained else (failure(0),))
    assert proposal.explained == ((0,) if explained else ())
    assert ("nid003 stopped its heartbeat; a consequence: why it opened" in proposal.reason) is explained


@pytest.mark.parametrize(
    ("what", "found", "explained"),
    [
        ("a rank elsewhere hung", failure(0, "hang"), True),
        ("a machine elsewhere broke", failure(0, "infrastructure"), False),
        ("it reports a lost connection", replace(failure(0, "infrastructure"), lost_connection=True), True),
        ("a worker elsewhere was killed", replace(failure(0), fingerprint="killed:signal:SIGKILL"), False),
        ("the node's own worker raised", failure(3), False),
        ("the node's own worker was killed", replace(failure(3), fingerprint=""), True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_which_failures_a_lost_member_explains(what: str, found: NodeFailure, explained: bool) -> None:
    by = uid(found.node)
    seen = view(AGAIN, joined=[*ALL[:3], uid(3, 2)], failures={by: found}, since_failed={by: 1.0})
    proposal = committed(replace(seen, since_sign={uid(3): 1.5}))
    assert proposal.explained == ((found.node,) if explained else ())


@pytest.mark.parametrize("failure_class", ["root", "hang", "infrastructure", "unknown"])
def test_what_fails_in_a_stop_that_no_failure_has_asked_for_follows_from_it(failure_class: str) -> None:
    """Nodes that waited came in, say; a peer then saw the reset of a rank that was stopped."""
    grown, decide_restart = replace(AGAIN, failed=False), DecideRestart()
    seen = view(grown, joined=ALL, failures={uid(0): failure(0, failure_class)})
    proposal = committed(seen, decide_restart=decide_restart)
    assert (decide_restart.asked[0][1], proposal.explained, proposal.reason) == ((), (0,), "why it opened")


def test_a_run_that_ends_for_want_of_nodes_says_what_the_loss_explains() -> None:
    seen = view(AGAIN, joined=ALL[:1], dead=ALL[1:], since_lost=30, failures={uid(0): failure(0)})
    proposal = committed(replace(seen, since_failed={uid(0): 7.0}, since_sign=dict.fromkeys(ALL, 7.0)))
    assert (proposal.record.outcome, proposal.explained) == (Outcome.TOO_FEW_NODES, (0,))


# -- joinable: too few nodes


@pytest.mark.parametrize(
    ("what", "seen", "reason"),
    [
        ("the rest may still come", view(START, joined=ALL[:1]), None),
        (
            "all others were given up",
            view(START, joined=ALL[:1], gone=[1, 2, 3]),
            "1 of at least 2 nodes are left (missing: node 1-2, nid003)",
        ),
        (
            "the others are lost, and may be started again",
            view(AGAIN, joined=ALL[:1], dead=ALL[1:], since_status=500, since_lost=29),
            None,
        ),
        (
            "so far as the launcher knows",
            view(replace(AGAIN, lost=(1, 2, 3)), joined=ALL[:1], dead=ALL[1:], since_lost=29),
            None,
        ),
        (
            "the others are lost, and were not started again",
            view(AGAIN, joined=ALL[:1], dead=ALL[1:], since_lost=30),
            "1 of at least 2 nodes are left (missing: node 1-2, nid003)",
        ),
        (
            "the others are lost, and nobody is left who could start an agent",
            view(AGAIN, joined=ALL[:1], dead=ALL[1:], since_lost=1, is_unsupervised=True),
            "1 of at least 2 nodes are left (missing: node 1-2, nid003), "
            "and no supervisor answers that could start an agent",
        ),
        (
            "nobody could start an agent, and somebody who lives is still awaited",
            view(AGAIN, joined=ALL[:1], dead=ALL[2:], since_lost=1, is_unsupervised=True),
            None,
        ),
        ("somebody is still awaited", view(AGAIN, joined=ALL[:1], dead=ALL[2:], since_lost=31), None),
        ("who died while joining may be started again", view(START, joined=ALL, dead=ALL[1:], since_lost=29), None),
        (
            "who died while joining was not started again",
            view(START, joined=ALL, dead=ALL[1:], since_lost=30),
            "1 of at least 2 nodes are left (missing: node 1-2, nid003)",
        ),
        (
            "the timeout",
            view(START, joined=ALL[:1], gone=[3], since_status=600),
            "3 of 4 nodes had not joined after 600 s (missing: node 1-2, nid003)",
        ),
        ("just before the timeout", view(START, joined=ALL[:1], since_status=599.9), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_few_nodes(what: str, seen: ClusterView, reason: str | None) -> None:
    proposal = decide(seen)
    if reason is None:  # the launcher learns which members are lost, and starts agents there
        dead = tuple(member.node for member in seen.record.members if member.uid in seen.dead)
        assert (proposal.record.lost if proposal is not None else seen.record.lost) == dead
        assert proposal is None or proposal.event is RoundEvent.ASK
        return
    assert proposal is not None
    record = proposal.record
    assert (proposal.event, record.outcome, record.reason) == (RoundEvent.CLOSE, Outcome.TOO_FEW_NODES, reason)
    assert record.retryable
    assert record.memory == MEMORY


@pytest.mark.parametrize(
    ("what", "joined", "dead", "lost", "spares"),
    [
        ("a spare that lives", ALL[3:], (), (), ()),
        ("a dead one", ALL[3:], ALL[3:], (3,), (uid(3),)),
        ("one with a new agent", [uid(3), uid(3, 2)], ALL[3:], (), ()),
        ("a member whose workers were done", (), ALL[2:3], (2,), ()),
    ],
)
def test_who_is_dead_when_the_run_ends_is_lost(
    what: str, joined: Sequence[str], dead: Sequence[str], lost: tuple[int, ...], spares: tuple[str, ...]
) -> None:
    three = record(Status.FINAL, *ALL[:3], master="n0:1", waiting=len(joined))
    seen = view(three, joined=joined, dead=frozenset(dead), done=ALL[:3])
    proposal = committed(seen)
    assert (proposal.event, proposal.record.lost, proposal.dead_spares) == (RoundEvent.CLOSE, lost, spares)


def test_fewer_were_launched_than_are_needed() -> None:
    proposal = committed(view(START, joined=ALL[:1]), replace(SETTINGS, expected_nodes=1))
    assert proposal.record.outcome is Outcome.TOO_FEW_NODES


# -- segments

PAIRS = replace(SETTINGS, min_nodes=2, max_nodes=4, expected_nodes=6, segment=2)
SIX = [uid(node) for node in range(6)]


@pytest.mark.parametrize(
    ("what", "seen", "nodes", "reason"),
    [
        ("all are here", view(START, joined=SIX), [0, 1, 2, 3], "why it opened"),
        (
            "a spare segment takes the place of one that lost a node",
            view(AGAIN, joined=[uid(0), *SIX[2:]], gone=[1]),
            [4, 5, 2, 3],
            "why it opened; node 4 took the place of node 0; node 5 took the place of node 1; "
            "without node 1, node 0 (the rest of a segment)",
        ),
        (
            "without one the run shrinks by a segment",
            view(AGAIN, joined=ALL[1:], gone=[0, 4, 5]),
            [2, 3],
            "why it opened; without node 0, node 4, node 5, node 1 (the rest of a segment)",
        ),
        ("half of each is none", view(AGAIN, joined=SIX[::2], since_status=31), None, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_segments_come_and_go_as_a_whole(what: str, seen: ClusterView, nodes: list[int] | None, reason: str) -> None:
    if nodes is None:
        assert decide(seen, PAIRS) is None
        return
    proposal = committed(seen, PAIRS)
    assert proposal.event is RoundEvent.FREEZE
    assert nodes_of(proposal) == nodes
    assert proposal.reason.replace("nid003", "node 3") == reason


def test_parts_of_segments_are_too_few() -> None:
    seen = view(AGAIN, joined=SIX[::2], gone=[1, 3, 5])
    proposal = committed(seen, PAIRS)
    assert proposal.record.outcome is Outcome.TOO_FEW_NODES
    assert proposal.reason.startswith("0 of at least 2 nodes are left in whole segments of 2 (missing: ")


def test_who_waits_for_the_rest_of_its_segment_makes_no_round_grow() -> None:
    two = record(Status.FINAL, *ALL[2:], master="n0:1", vacant=2)
    proposal = committed(view(two, joined=[uid(0)]), PAIRS)
    assert (proposal.event, proposal.reason) == (RoundEvent.ANNOUNCE, "node 0 waits for the rest of a segment")
    waits = replace(two, waiting=1)
    assert decide(view(waits, joined=[uid(0)]), PAIRS) is None
    # Two agents of one node are no segment.
    again = committed(view(waits, joined=[uid(0), uid(0, 2)]), PAIRS)
    assert again.event is RoundEvent.ANNOUNCE
    whole = committed(view(waits, joined=[uid(0), uid(1, 2)]), PAIRS)
    assert (whole.event, whole.record.round) == (RoundEvent.REOPEN, 6)


# -- frozen


@pytest.mark.parametrize(
    ("what", "seen", "lost"),
    [
        ("nobody has confirmed", view(FROZEN), None),
        ("one has not confirmed", view(FROZEN, acked=dict.fromkeys(ALL[:3], "m"), since_status=40), None),
        (
            "one has not confirmed for two heartbeats' lives",
            view(FROZEN, acked=dict.fromkeys(ALL[:3], "m"), since_status=40.1),
            {3: "did not confirm"},
        ),
        ("a member died", view(FROZEN, dead=[uid(2)]), {2: "stopped its heartbeat"}),
        (
            "a member died after it confirmed",
            view(FROZEN, acked=dict.fromkeys(ALL, "m"), dead=[uid(2)]),
            {2: "stopped its heartbeat"},
        ),
        ("a member leaves", view(FROZEN, leaving={uid(0): "disk full"}), {0: "left: disk full"}),
        ("a node was given up", view(FROZEN, gone=[1]), {1: "has no agent any more"}),
        ("a stranger died", view(FROZEN, joined=[uid(5)], dead=[uid(5)]), None),
        ("a stranger waits", view(FROZEN, joined=[uid(5)]), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frozen_round_opens_again(what: str, seen: ClusterView, lost: dict[int, str] | None) -> None:
    if lost is None:
        assert decide(seen) is None
        return
    proposal = committed(seen)
    ((node, why),) = lost.items()
    name = "n0" if "left" in why else NAMES[node]  # its uid says so, whatever else is known
    assert proposal.event is RoundEvent.REOPEN
    assert f"{name} {why}" in proposal.reason
    # The members stay in the slots that they are to keep.
    opened = FROZEN.successor(status=Status.JOINABLE, round=6, lost=(node,), reason=proposal.reason)
    assert proposal.record == replace(opened, failed=proposal.record.failed)


def test_all_confirmed_makes_it_final_with_the_first_slots_master() -> None:
    of = replace(FROZEN, members=members(uid(2), uid(0), uid(1), uid(3)))
    masters = {uid(0): "", uid(1): "", uid(2): "10.0.0.2 29500 1", uid(3): ""}
    proposal = committed(view(of, acked=masters))
    assert proposal.event is RoundEvent.CONFIRM
    assert proposal.record == of.successor(status=Status.FINAL, master="10.0.0.2 29500 1")


# -- final


def test_a_failure_opens_the_next_round() -> None:
    """The restart is charged when the next round is frozen."""
    failures = {
        uid(1): failure(1, "symptom", "connection reset"),
        uid(2): failure(2, "root", "ValueError"),
        uid(3): failure(3, "infrastructure", "no space"),
    }
    proposal = committed(view(FINAL, failures=failures))
    reason = "ValueError on node 2"
    opened = FINAL.successor(status=Status.JOINABLE, round=6, master="", reason=reason, failed=True)
    assert (proposal.event, proposal.reason, proposal.record) == (RoundEvent.REOPEN, reason, opened)


@pytest.mark.parametrize(("classes", "named"), [(("unknown", "infrastructure"), 1), (("symptom", "unknown"), 0)])
def test_the_strongest_failure_gives_the_reason(classes: tuple[str, str], named: int) -> None:
    failures = {uid(n): failure(n, failure_class) for n, failure_class in enumerate(classes)}
    assert f"on node {named}" in committed(view(FINAL, failures=failures)).reason


def test_a_hang_is_told_to_all_with_who_is_furthest_behind() -> None:
    waits, hangs = HangMark(8, 60.0), HangMark(7, 59.5)
    failures = {
        uid(0): failure(0, "symptom"),
        uid(1): replace(failure(1, "hang", "rank 1 hangs"), hang=waits),
        uid(2): replace(failure(2, "hang", "rank 2 hangs"), hang=hangs),
    }
    proposal = committed(view(FINAL, failures=failures))
    assert proposal.record.hang == hangs
    assert proposal.reason == "rank 2 hangs on node 2"
    seen = {uid(0): replace(failure(0, "hang", "no progress; rank 2 on n2"), hang=HangMark(-1, 60.0, (2,)))}
    assert committed(view(FINAL, failures=seen)).reason == "no progress; rank 2 on n2"
    # It stays where records in between were not seen, and is gone with the next round.
    frozen = committed(view(replace(AGAIN, hang=hangs), joined=ALL)).record
    assert frozen.hang == hangs
    assert committed(view(replace(FINAL, hang=hangs), failures={uid(1): failure(1)})).record.hang is None


BOOM = {uid(1): failure(1)}


@pytest.mark.parametrize(
    ("what", "seen", "lost", "reason"),
    [
        ("died", view(FINAL, dead=[uid(2)]), (2,), "node 2 stopped its heartbeat"),
        ("leaves", view(FINAL, leaving={uid(2): "no GPU"}), (2,), "n2 left: no GPU"),
        ("given up", view(FINAL, gone=[2]), (2,), "node 2 has no agent any more"),
        ("a new agent", view(FINAL, joined=[uid(2, 2)]), (), "node 2 has a new agent"),
        (
            "died before, and a new agent is here",
            view(replace(FINAL, lost=(2,)), joined=[uid(2, 2)], dead=[uid(2)]),
            (),
            "node 2 has a new agent",
        ),
        ("two died", view(FINAL, dead=[uid(3), uid(1)]), (1, 3), "node 1 stopped its heartbeat; nid003 stopped"),
        ("one is lost already", view(record(Status.FINAL, *ALL[:3], lost=(3,)), dead=[uid(2)]), (2, 3), "node 2"),
        (
            "one died, others are done",
            view(FINAL, dead=[uid(2)], done=[uid(0), uid(1)]),
            (2,),
            "node 2 stopped its heartbeat",
        ),
        (
            "a new agent in a round that is not confirmed",
            view(replace(FROZEN, lost=(1,)), joined=[uid(1, 2)]),
            (),
            "new",
        ),
        ("a member asks for it", view(FINAL, joined=[uid(1)]), (), ""),
        ("a failure and a loss", view(FINAL, failures=BOOM, dead=[uid(3)]), (3,), "boom on node 1"),
        ("a late failure, all others are done", view(FINAL, done=frozenset([uid(0), *ALL[2:]]), failures=BOOM), (), ""),
        ("a failure of a round that all have done", view(FINAL, done=ALL, failures=BOOM), (), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lost_member_opens_the_next_round(what: str, seen: ClusterView, lost: tuple[int, ...], reason: str) -> None:
    proposal = committed(seen)
    assert (proposal.event, proposal.record.round, proposal.record.lost) == (RoundEvent.REOPEN, 6, lost)
    assert reason in proposal.reason


@pytest.mark.parametrize(
    ("what", "seen", "over"),
    [
        ("all are done", view(FINAL, done=ALL), True),
        ("all but one", view(FINAL, done=ALL[:3]), False),
        ("none, for long", view(FINAL, since_status=1e6), None),
        ("the others are done and dead", view(FINAL, done=ALL, dead=ALL[1:]), True),
        ("one is done and dead, the others run", view(FINAL, done=ALL[:1], dead=ALL[:1]), False),
        ("one is done and given up, the others run", view(FINAL, done=ALL[:1], gone=[0]), False),
        ("one is done and has a new agent", view(FINAL, done=ALL[:1], joined=[uid(0, 2)]), False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_done_on_all_nodes_is_success(what: str, seen: ClusterView, over: bool | None) -> None:
    proposal = decide(seen)
    if over:
        assert proposal is not None
        assert (proposal.event, proposal.record.outcome) == (RoundEvent.CLOSE, Outcome.SUCCEEDED)
        assert proposal.record.retryable
    else:
        assert proposal is None or (over is False and proposal.event is RoundEvent.ANNOUNCE)


SMALL = record(Status.FINAL, *ALL[:3], lost=(3,), master="n0:1")


@pytest.mark.parametrize(
    ("what", "seen", "event", "waiting"),
    [
        ("a node comes and there is room", view(SMALL, joined=[uid(3)]), RoundEvent.REOPEN, 0),
        ("one that was given up came", view(SMALL, joined=[uid(3)], gone=[3]), None, 0),
        ("a dead one came", view(SMALL, joined=[uid(3)], dead=[uid(3)]), None, 0),
        ("a node comes when the first are done", view(SMALL, joined=[uid(3)], done=ALL[:1]), RoundEvent.ANNOUNCE, 1),
        ("a node comes and there is no room", view(FINAL, joined=[uid(4)]), RoundEvent.ANNOUNCE, 1),
        ("it is announced once", view(replace(FINAL, waiting=1), joined=[uid(4)]), None, 0),
        ("another one comes", view(replace(FINAL, waiting=1), joined=[uid(4), uid(5)]), RoundEvent.ANNOUNCE, 2),
        (
            "the one that waited died",
            view(replace(FINAL, waiting=1), joined=[uid(4)], dead=[uid(4)]),
            RoundEvent.ANNOUNCE,
            0,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nodes_that_come_later(what: str, seen: ClusterView, event: RoundEvent | None, waiting: int) -> None:
    proposal = decide(seen)
    assert (proposal.event if proposal else None) is event
    if proposal is None:
        return
    assert proposal.record.waiting == waiting
    if event is RoundEvent.REOPEN:
        assert "nid003 came" in proposal.reason
        assert proposal.record.round == 6
    else:
        assert proposal.record == seen.record.successor(waiting=waiting)


# -- closed


def test_after_the_end_nothing_follows() -> None:
    closed = record(Status.CLOSED, *ALL, outcome=Outcome.SUCCEEDED)
    assert decide(view(closed, joined=ALL, failures={uid(1): failure(1)}, dead=ALL)) is None
    with pytest.raises(IllegalTransitionError):
        propose_close(closed, Outcome.FAILED, "again")


@pytest.mark.parametrize("status", [Status.JOINABLE, Status.FROZEN, Status.FINAL])
def test_anything_else_can_be_closed(status: Status) -> None:
    of = record(status, *ALL, waiting=1, lost=(5,))
    closed = propose_close(of, Outcome.CANCELLED, "Ctrl-C").record
    assert closed == of.successor(status=Status.CLOSED, outcome=Outcome.CANCELLED, reason="Ctrl-C")


@pytest.mark.parametrize(
    ("missing", "text"),
    [({0}, "node 0"), ({0, 1}, "node 0-1"), ({0, 2}, "node 0,2"), ({1, 2, 3, 9, 10, 12}, "node 1-3,9-10,12")],
)
def test_nodes_are_named_in_ranges(missing: set[int], text: str) -> None:
    settings = replace(SETTINGS, expected_nodes=13, min_nodes=13, max_nodes=13)
    here = [uid(node) for node in range(13) if node not in missing]
    seen = replace(view(START, joined=here, since_status=600), names={})
    assert f"(missing: {text})" in committed(seen, settings).reason


def test_who_falls_silent_is_asked_and_not_put_out() -> None:
    proposal = committed(view(FINAL, silent={uid(1)}))
    assert (proposal.event, proposal.record) == (RoundEvent.ASK, FINAL.successor(suspects=(uid(1),)))


def test_a_member_that_is_heard_and_changes_no_file_is_asked_while_the_others_wait_for_it() -> None:
    proposal = committed(view(AGAIN, joined=ALL[:3], stale={uid(3): 10.2}, since_status=10.2))
    assert proposal.event is RoundEvent.ASK
    assert proposal.record.suspects == (uid(3),)
    what = "no new heartbeat in the run directory, and no claim to join, from nid003 (10 s)"
    assert proposal.reason == f"{what}: checking its files"


def test_a_member_whose_files_hang_is_left_out_and_named_with_that_reason() -> None:
    asked = replace(AGAIN, suspects=(uid(3),))
    seen = view(asked, joined=ALL[:3], stale={uid(3): 30.4}, since_status=30.4)
    assert decide(seen) is None, "it is waited for until it counts as dead"
    proposal = committed(replace(seen, dead={uid(3)}))
    assert proposal.event is RoundEvent.FREEZE
    assert (proposal.record.lost, proposal.record.suspects) == ((3,), ())
    why = "its files hang: its beats come, its heartbeat in the run directory has not changed for 30 s"
    assert proposal.reason.endswith(f"without nid003 ({why})")
    (lost,) = consequences(asked, proposal, lambda _: 0.4)
    assert isinstance(lost, NodeLost)
    assert (lost.age, lost.reason) == (30.4, why)


@pytest.mark.parametrize(
    ("what", "seen", "event"),
    [
        ("it answers", {"answered": {uid(1)}}, RoundEvent.ASK),
        ("it answers through the files, and is not heard", {"silent": {uid(1)}, "answered": {uid(1)}}, RoundEvent.ASK),
        ("it is lost", {"dead": {uid(1)}}, RoundEvent.REOPEN),
    ],
)
def test_a_suspect_that_answers_or_is_lost_or_takes_no_part_is_none_any_more(
    what: str, seen: dict[str, Any], event: RoundEvent
) -> None:
    asked = replace(FINAL, suspects=(uid(1),))
    assert decide(view(asked, silent={uid(1)})) is None, "asked once"
    proposal = committed(view(replace(asked, suspects=(uid(1), uid(99))) if "dead" in seen else asked, **seen))
    assert (proposal.event, proposal.record.suspects) == (event, ())


def test_of_many_missing_nodes_some_are_named() -> None:
    crowd = replace(
        view(START, joined=ALL[:1], gone=frozenset(range(1, 40))), names={n: f"nid{n:03}" for n in range(30)}
    )
    proposal = committed(crowd)
    assert proposal.record.reason.endswith(
        "(missing: node 30-39, nid001, nid002, nid003, nid004, nid005, nid006, nid007, nid008 and 21 more)"
    )


# -- all workers of a node failed alike, and none elsewhere


def test_a_node_apart_is_in_no_further_round() -> None:
    decide_restart = DecideRestart(settled(reason="restart 1 of 3", apart=(2,)))
    proposal = committed(view(AGAIN, joined=ALL, failures={uid(2): failure(2)}), decide_restart=decide_restart)
    assert proposal.event is RoundEvent.FREEZE
    assert nodes_of(proposal) == [0, 1, 3]
    assert proposal.record.unfit == (2,)
    assert proposal.record.lost == (), "it lives, and leaves by itself"
    assert "; without node 2 (all its workers failed alike, and none of the other nodes')" in proposal.reason
    # It waits until it has read that, and is taken in no more.
    later = replace(proposal.record, status=Status.JOINABLE, number=20)
    assert nodes_of(committed(view(later, joined=ALL, since_status=30.0))) == [0, 1, 3]
    final = replace(later, status=Status.FINAL)
    assert final.vacant == 1
    assert decide(view(final, joined=[uid(2)])) is None, "it does not come for its own place"


def test_where_too_few_are_left_without_it_the_attempt_ends_and_another_one_may_go_well() -> None:
    decide_restart = DecideRestart(settled(reason="restart 1 of 3", apart=(0, 2, 3)))
    proposal = committed(view(AGAIN, joined=ALL, failures={uid(2): failure(2)}), decide_restart=decide_restart)
    assert proposal.event is RoundEvent.CLOSE
    assert (proposal.record.outcome, proposal.record.retryable) == (Outcome.FAILED, True)
    assert proposal.record.reason.startswith("1 of at least 2 nodes are left without node 0, node 2, nid003 (all its")
    assert proposal.record.reason.endswith(": boom")


def takes_in(
    policy: GrowPolicy = GrowPolicy.CHECKPOINT, *, newcomers: int = 1, spares: int = 0, free: int = 1, vacant: int = 0,
    **seen: Any,
) -> bool:  # fmt: skip
    of = record(Status.FINAL, uid(0), vacant=vacant)
    settings = replace(SETTINGS, max_nodes=1 + free, grow=policy, grow_patience=300.0, suspect_answer=4.0)
    waiting = {uid(at): replace(info(uid(at)), spare=at > newcomers) for at in range(1, 1 + newcomers + spares)}
    return decide_growth(view(of, **{"since_status": 60.0, "since_waiting": 10.0, **seen}), settings, waiting)[0]


@pytest.mark.parametrize(
    ("policy", "facts", "expected"),
    [
        (GrowPolicy.NOW, {}, True),
        (GrowPolicy.NEVER, {}, False),
        (GrowPolicy.NEVER, {"since_saved": 5.0, "since_status": 900.0}, False),
        (GrowPolicy.CHECKPOINT, {}, False),
        (GrowPolicy.CHECKPOINT, {"since_saved": 5.0}, True),
        (GrowPolicy.CHECKPOINT, {"since_saved": 5.0, "is_saving": True}, False),  # the others still write theirs
        (GrowPolicy.CHECKPOINT, {"since_saved": 1.0}, False),  # or may, and have not said so yet
        (GrowPolicy.CHECKPOINT, {"since_saved": 12.0}, False),  # that one was before anybody waited
        (GrowPolicy.CHECKPOINT, {"since_status": 301.0}, True),  # a script that reports none
        (GrowPolicy.CHECKPOINT, {"since_status": 301.0, "is_saving": True}, True),  # one that never ends
        (GrowPolicy.CHECKPOINT, {"since_status": 301.0, "since_waiting": 1.0}, False),  # who saved has yet to answer
        (GrowPolicy.CHECKPOINT, {"since_status": 900.0, "since_saved": 299.0}, False),
        (GrowPolicy.CHECKPOINT, {"since_status": 900.0, "since_saved": 301.0}, True),
    ],
)
def test_a_healthy_round(policy: GrowPolicy, facts: dict[str, object], expected: bool) -> None:
    assert takes_in(policy, **facts) is expected


@pytest.mark.parametrize("policy", GrowPolicy)
def test_who_replaces_a_lost_node_comes_in_at_once_and_others_wait_at_max_or_as_a_spare(policy: GrowPolicy) -> None:
    assert takes_in(policy, vacant=1, since_waiting=0.0)
    assert takes_in(policy, vacant=1, newcomers=0, spares=1, since_waiting=0.0)
    assert not takes_in(policy, vacant=1, newcomers=0)
    for since_saved, since_status in itertools.product((5.0, float("inf")), (1.0, 9999.0)):
        assert not takes_in(policy, free=0, since_saved=since_saved, since_status=since_status)
        assert not takes_in(policy, newcomers=0, spares=1, since_saved=since_saved, since_status=since_status)
