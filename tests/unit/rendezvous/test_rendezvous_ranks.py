"""From members to ranks: contiguous, in slot order, each node with its own number of workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.rendezvous.ranks import rank_layout
from hpc_elastic.rendezvous.state import Member


def group(*sizes: int) -> list[Member]:
    """Members whose node index is not their slot."""
    return [Member(f"uid{slot}", 100 - slot, size) for slot, size in enumerate(sizes)]


def test_one_worker_on_one_node() -> None:
    layout = rank_layout(group(1), "uid0")
    assert (layout.group_rank, layout.group_world_size, layout.world_size) == (0, 1, 1)
    assert list(layout.global_ranks) == [0]


def test_nodes_with_different_numbers_of_workers() -> None:
    members = group(4, 1, 8)
    assert [list(rank_layout(members, f"uid{slot}").global_ranks) for slot in range(3)] == [
        [0, 1, 2, 3],
        [4],
        [5, 6, 7, 8, 9, 10, 11, 12],
    ]
    last = rank_layout(members, "uid2")
    assert (last.group_rank, last.group_world_size) == (2, 3)
    assert (last.first_rank, last.local_world_size, last.world_size) == (5, 8, 13)


def test_the_slot_counts_and_not_the_node_index() -> None:
    members = [Member("b", 7, 2), Member("a", 0, 2)]
    assert list(rank_layout(members, "b").global_ranks) == [0, 1]
    assert list(rank_layout(members, "a").global_ranks) == [2, 3]


def test_who_is_no_member_has_no_rank() -> None:
    with pytest.raises(StopIteration):
        rank_layout(group(1, 1), "stranger")


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_the_ranks_of_all_nodes_are_the_numbers_below_the_world_size(sizes: list[int]) -> None:
    members = group(*sizes)
    layouts = [rank_layout(members, member.uid) for member in members]
    assert [rank for layout in layouts for rank in layout.global_ranks] == list(range(sum(sizes)))
    assert {layout.world_size for layout in layouts} == {sum(sizes)}
    assert [layout.group_rank for layout in layouts] == list(range(len(sizes)))
    assert {layout.group_world_size for layout in layouts} == {len(sizes)}
    assert [layout.local_world_size for layout in layouts] == sizes
