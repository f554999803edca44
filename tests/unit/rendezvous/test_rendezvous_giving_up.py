"""Where too few nodes are left: the run is closed for all, or each one waits for replacements."""

from __future__ import annotations

import pytest

from hpc_elastic.base.outcome import Outcome
from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.cluster_view import ClusterView
from hpc_elastic.rendezvous.coordinator import next_proposal
from hpc_elastic.rendezvous.peers import NodeInfo
from hpc_elastic.rendezvous.restart import RestartDecision
from hpc_elastic.rendezvous.state import FailureMemory, Member, RoundRecord, Status
from tests.rigs.rendezvous_world import World

A, B = "00000-a-0000000000000001-0000", "00001-b-0000000000000001-0000"


def decide_restart(*_: object) -> RestartDecision:
    return RestartDecision(go_on=True, reason="", memory=FailureMemory())


def one_of_two_is_left() -> ClusterView:
    members = (Member(A, 0, 1), Member(B, 1, 1))
    record = RoundRecord(
        number=5, epoch="e", term=1, leader=A, round=1, status=Status.JOINABLE, members=members, lost=(1,)
    )
    info = NodeInfo(uid=A, node=0, host="a", local_world_size=1, addresses=(), port=0)
    return ClusterView(
        record=record,
        joined={A: info},
        acked={},
        failures={},
        done=frozenset(),
        leaving={},
        gone=frozenset(),
        dead=frozenset({B}),
        silent=frozenset(),
        answered=frozenset(),
        names={},
        since_status=1000.0,
        since_lost=1000.0,
    )


@pytest.mark.parametrize(("least", "give_up"), [(2, True), (2, False), (1, False)])
def test_too_few_nodes(least: int, give_up: bool) -> None:
    settings = RendezvousSettings(min_nodes=least, max_nodes=2, expected_nodes=2, give_up=give_up)
    proposal = next_proposal(one_of_two_is_left(), settings, decide_restart)
    if least == 1:
        assert proposal is not None
        assert proposal.record.status is Status.FROZEN
    elif give_up:
        assert proposal is not None
        assert proposal.record.outcome is Outcome.TOO_FEW_NODES
    else:
        assert proposal is None


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
