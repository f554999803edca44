"""Nodes that leave or never come: nobody waits for them, and the reason goes where the decision goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key
from hpc_elastic.rendezvous.cluster_view import ClaimScanner
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.membership import Peers
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import RoundEvent, Status
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore
from tests.rigs.rendezvous_world import World
from tests.unit.rendezvous.test_rendezvous_coordinator import SETTINGS, committed, decide, info, record, uid, view

ALL = tuple(uid(node) for node in range(4))
WHY = "health check failed: GPU 2 has 3 uncorrectable ECC errors"
BROKEN = record(Status.JOINABLE, *ALL)
"""Opened because of a failure; all four were members of the round before."""


def test_a_member_that_leaves_before_it_joined_again_is_not_waited_for() -> None:
    proposal = committed(view(BROKEN, joined=ALL[:3], leaving={uid(3): WHY}))
    assert proposal.event is RoundEvent.FREEZE
    assert [member.node for member in proposal.record.members] == [0, 1, 2]
    assert proposal.record.lost == (3,)
    assert proposal.left == {3: WHY}
    assert f"without nid003 (left: {WHY})" in proposal.reason


def test_a_node_that_leaves_before_its_first_round_is_not_waited_for() -> None:
    start = record(Status.JOINABLE)
    assert decide(view(start, joined=ALL[:3])) is None
    proposal = committed(view(start, joined=ALL[:3], leaving={uid(3): WHY}))
    assert proposal.event is RoundEvent.FREEZE


def test_a_new_agent_on_a_node_that_left_is_taken_in() -> None:
    newer = uid(3, start=2)
    proposal = committed(view(BROKEN, joined=(*ALL[:3], newer), leaving={uid(3): WHY}))
    assert [member.uid for member in proposal.record.members] == [*ALL[:3], newer]
    assert proposal.left == {}


def test_too_few_are_left_at_once_with_the_reason() -> None:
    seen = view(BROKEN, joined=ALL[:1], leaving=dict.fromkeys(ALL[1:], WHY))
    proposal = committed(seen)
    assert proposal.event is RoundEvent.CLOSE
    assert proposal.record.outcome is Outcome.TOO_FEW_NODES
    assert proposal.record.retryable
    assert f"nid003 (left: {WHY})" in proposal.reason


def test_the_reason_is_read_once_and_who_gives_none_leaves_too() -> None:
    store, clock = MemoryStore(), FakeClock()
    detector = FailureDetector(store, SETTINGS, poll_intervals(SETTINGS), clock)
    scanner = ClaimScanner(store, ALL[0], Peers(store, info(ALL[0]), None), detector)
    store.put_if_absent(claim_key(BROKEN.round, ClaimKind.LEAVE, uid(3)), '{"reason":"no GPU"}')
    store.put_if_absent(claim_key(BROKEN.round, ClaimKind.LEAVE, uid(1)), "nonsense")
    assert scanner.look(BROKEN).leaving == {uid(3): "no GPU", uid(1): ""}
    store.delete(claim_key(BROKEN.round, ClaimKind.LEAVE, uid(3)))
    store.overwrite(claim_key(BROKEN.round, ClaimKind.LEAVE, uid(3)), '{"reason":"another"}')
    assert scanner.look(BROKEN).leaving[uid(3)] == "no GPU"


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
        record = world.newest()
        return record is not None and record.status is Status.CLOSED

    assert world.run(is_closed)
    missing = [fields for _, event, fields in world.events if event == "node_missing"]
    assert missing == [{"round": 0, "node": 2, "host": "", "reason": "it has not joined"}]
