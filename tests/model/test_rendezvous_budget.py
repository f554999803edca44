"""What the rendezvous asks of a file server, held to within a tenth: counted on a model of one, in simulated time."""

from __future__ import annotations

import pytest

from hpc_elastic.run.spec import RendezvousSettings
from tests.bench.scale import Measured, files_alone, simulate
from tests.model.scale_world import World


@pytest.fixture(scope="module")
def eight() -> Measured:
    return simulate(8)


def test_operations_of_a_round_at_eight_nodes(eight: Measured) -> None:
    """Of all nodes and the supervisor, per node. A look too much of each node costs two, one more file three.

    While the coordinator is asked whether it lives, each node looks by itself, once a second.
    """
    assert eight.first_operations <= 47
    assert eight.next_operations <= 20.7
    assert eight.lost_operations <= 95


def test_system_calls_of_a_restart_at_eight_nodes(eight: Measured) -> None:
    """A claim that was announced is one read; the coordinator lists the folders only before it settles a round."""
    coordinator, other = eight.next_calls
    assert coordinator <= 60
    assert other <= 12


def test_operations_while_workers_run_at_eight_nodes(eight: Measured) -> None:
    """A second, of all together."""
    assert eight.steady <= 14.4
    assert files_alone(8) <= 36


def test_a_round_takes_no_poll_of_time_where_packets_come_through(eight: Measured) -> None:
    assert eight.first_seconds <= 0.2
    assert eight.next_seconds <= 0.2
    assert eight.lost_seconds <= 9


def test_operations_per_node_do_not_grow_with_the_nodes(eight: Measured) -> None:
    many = simulate(200)
    assert many.first_operations <= eight.first_operations
    assert many.next_operations <= eight.next_operations
    assert many.steady <= 150
    assert many.first_seconds <= 1
    assert many.lost_seconds <= 10


def test_many_nodes_are_rung_by_each_other_and_all_at_once() -> None:
    """The coordinator sends a few datagrams, not one to each."""
    nodes = 400
    settings = RendezvousSettings(min_nodes=1, max_nodes=nodes, expected_nodes=nodes)
    with World(settings) as world:
        for index in range(nodes):
            world.start(index, at=0.0)
        assert world.run(lambda: bool(world.nodes) and all(0 in n.final_at for n in world.agents()), seconds=20)
        frozen = next(at for at, _, event in world.events if event == "round_confirmed")
        assert max(node.final_at[0] for node in world.agents()) - frozen < 0.2
        assert world.most_sent_at_once <= nodes // 8
