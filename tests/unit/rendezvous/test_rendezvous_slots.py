"""Who sits where: living members keep their slots, holes are filled, a shrink closes up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.rendezvous.slots import assign_slots
from hpc_elastic.rendezvous.state import Member


def member(node: int, agent: str = "a") -> Member:
    return Member(f"{node:05d}-{agent}", node, 1)


def slots(previous: list[int], present: list[int], max_nodes: int) -> list[int]:
    found = assign_slots([member(n) for n in previous], [member(n) for n in present], max_nodes=max_nodes)
    return [m.node for m in found]


@pytest.mark.parametrize(
    ("previous", "present", "max_nodes", "expected"),
    [
        ([], [2, 0, 1], 3, [0, 1, 2]),
        ([], [3, 1, 2, 0], 2, [0, 1]),
        ([], [], 4, []),
        ([0, 1, 2], [2, 1, 0], 3, [0, 1, 2]),
        ([0, 1, 2], [0, 2], 3, [0, 2]),
        ([0, 1, 2], [0, 2, 3], 3, [0, 3, 2]),
        ([0, 1, 2], [0, 2, 4, 3], 3, [0, 3, 2]),
        ([0, 1, 2], [0, 2, 4, 3], 4, [0, 3, 2, 4]),
        ([0, 3, 2], [0, 1, 2, 3], 3, [0, 3, 2]),
        ([0, 3, 2], [0, 1, 2, 3], 4, [0, 3, 2, 1]),
        ([2, 3], [0, 1], 2, [0, 1]),
        ([2, 3], [3, 0], 2, [0, 3]),
        ([0, 1, 2, 3], [0, 1, 2, 3], 2, [0, 1]),
    ],
)
def test_examples(previous: list[int], present: list[int], max_nodes: int, expected: list[int]) -> None:
    assert slots(previous, present, max_nodes) == expected


def test_a_new_agent_of_a_member_node_gets_its_slot() -> None:
    found = assign_slots([member(0), member(1)], [member(1), member(0, "b")], max_nodes=2)
    assert found == (member(0, "b"), member(1))


NODES = st.lists(st.integers(0, 12), unique=True, max_size=10)


@given(previous=NODES, present=NODES, max_nodes=st.integers(1, 12))
def test_properties(previous: list[int], present: list[int], max_nodes: int) -> None:
    previous = previous[:max_nodes]
    found = slots(previous, present, max_nodes)
    assert len(found) == min(len(present), max_nodes), "as many as there are, up to max"
    assert len(set(found)) == len(found)
    assert set(found) <= set(present)
    stayed = [node for node in previous if node in present]
    assert set(stayed) <= set(found), "no living member is evicted"
    assert [node for node in found if node in stayed] == stayed, "nor overtaken"
    if len(present) >= len(previous):
        for index, node in enumerate(previous):
            if node in present:
                assert found[index] == node, "where all holes can be filled, it keeps its very slot"
    newcomers = [node for node in found if node not in previous]
    if stayed:
        assert newcomers == sorted(newcomers), "the lowest node index fills the first hole"
    else:
        assert found == sorted(found), "topology decides where nobody has a slot"
    left_out = set(present) - set(found)
    assert not left_out or not newcomers or max(newcomers) < min(left_out), "a higher index does not jump the queue"


@given(previous=NODES, present=st.permutations(list(range(7))), max_nodes=st.integers(1, 8))
def test_the_order_of_arrival_does_not_matter(previous: list[int], present: list[int], max_nodes: int) -> None:
    assert slots(previous, present, max_nodes) == slots(previous, sorted(present), max_nodes)


@given(previous=NODES, present=NODES, max_nodes=st.integers(1, 12))
def test_the_same_nodes_sit_the_same_way_again(previous: list[int], present: list[int], max_nodes: int) -> None:
    found = slots(previous, present, max_nodes)
    assert slots(found, present, max_nodes) == found
