"""Assignments and filters, on thousands of simulated ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_elastic.inprocess.hooks import (
    FillGaps,
    MaxActiveWorldSize,
    RankDiscarded,
    ShiftRanks,
    WorldSizeDivisibleBy,
    filled_gaps,
    grouped_out,
    shifted,
)
from hpc_elastic.inprocess.state import State, Status

pytestmark = pytest.mark.torch


def state_of(rank: int, world_size: int) -> State:
    state = State()
    state.rank, state.world_size = rank, world_size
    state.activate_all_ranks()
    return state


@st.composite
def worlds(draw: Any) -> tuple[int, set[int]]:
    world_size = draw(st.integers(1, 64))
    dead = draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    return world_size, dead


def test_the_documented_example() -> None:
    dead = {1, 4, 5}
    alive = [0, 2, 3, 6, 7]
    assert [filled_gaps(rank, 8, dead) for rank in alive] == [0, 2, 3, 1, 4]  # 0 6 2 3 7
    assert [shifted(rank, dead) for rank in alive] == [0, 1, 2, 3, 4]  # 0 2 3 6 7


@given(worlds())
def test_ranks_are_contiguous_and_nobody_moves_without_need(world: tuple[int, set[int]]) -> None:
    world_size, dead = world
    alive = sorted(set(range(world_size)) - dead)
    filled = {rank: filled_gaps(rank, world_size, dead) for rank in alive}
    closed = {rank: shifted(rank, dead) for rank in alive}
    for found in (filled, closed):
        assert sorted(found.values()) == list(range(len(alive)))
    assert all(new == old for old, new in filled.items() if old < len(alive))
    assert [closed[rank] for rank in alive] == sorted(closed.values())


@settings(max_examples=5)
@given(st.sets(st.integers(0, 2**14 - 1), min_size=1, max_size=30))
def test_of_sixteen_thousand_ranks_whole_nodes_leave_and_the_rest_are_contiguous(dead: set[int]) -> None:
    world_size, node = 2**14, 8
    keys = {rank: str(rank // node) for rank in range(world_size) if rank not in dead}
    gone = dead | grouped_out(keys, lambda count: count == node)
    assert gone == {each * node + rank for each in {rank // node for rank in dead} for rank in range(node)}
    alive = [rank for rank in range(world_size) if rank not in gone]
    closed = [shifted(rank, gone) for rank in alive]
    assert closed == list(range(len(alive)))
    assert all(
        new // node == closed[first] // node
        for first in range(0, len(alive), node)
        for new in closed[first : first + node]
    )
    filled = [filled_gaps(rank, world_size, gone) for rank in alive]
    assert sorted(filled) == closed
    assert [new for new, rank in zip(filled, alive, strict=True) if rank < len(alive)] == [
        rank for rank in alive if rank < len(alive)
    ]


def test_sixteen_thousand_ranks_take_seconds() -> None:
    world_size = 2**14
    dead = {rank for rank in range(world_size) if rank // 8 % 3 == 0}
    started = time.process_time()
    sample = [rank for rank in range(0, world_size, 64) if rank not in dead]
    found = [(filled_gaps(rank, world_size, dead), shifted(rank, dead)) for rank in sample]
    keys = {rank: str(rank // 8) for rank in range(world_size) if rank % 1000}
    assert grouped_out(keys, lambda count: count == 8) == {
        rank for rank in keys if any(other % 1000 == 0 for other in range(rank // 8 * 8, rank // 8 * 8 + 8))
    }
    assert max(max(pair) for pair in found) < world_size - len(dead)
    assert time.process_time() - started < 20


@pytest.mark.parametrize("assignment", [FillGaps(), ShiftRanks()])
def test_the_state_changes_and_nothing_is_left_to_absorb(assignment: Any) -> None:
    state, left = assignment(state_of(3, 4), {1})
    assert (state.world_size, left) == (3, set())
    assert state.rank == (1 if isinstance(assignment, FillGaps) else 2)
    with pytest.raises(RankDiscarded, match=r"rank 1 of 4.*1, 2"):
        assignment(state_of(1, 4), {1, 2})


def test_a_group_with_the_wrong_count_leaves_as_a_whole() -> None:
    keys = {0: "a", 2: "b", 3: "b", 6: "d", 7: "d"}
    assert grouped_out(keys, lambda count: count == 2) == {0}


@pytest.mark.parametrize(
    ("filter_", "world_size", "active"),
    [
        (MaxActiveWorldSize(2), 4, 2),
        (MaxActiveWorldSize(8), 4, 4),
        (MaxActiveWorldSize(None), 4, 4),
        (WorldSizeDivisibleBy(4), 11, 8),
        (WorldSizeDivisibleBy(4), 3, 0),
        (WorldSizeDivisibleBy(), 3, 3),
    ],
)
def test_filters(filter_: Any, world_size: int, active: int) -> None:
    found = [filter_(state_of(rank, world_size)) for rank in range(world_size)]
    assert {state.active_world_size for state in found} == {active}
    assert [state.status is Status.ACTIVE for state in found] == [rank < active for rank in range(world_size)]


def test_the_environment_holds_the_active_world(monkeypatch: pytest.MonkeyPatch) -> None:
    state = MaxActiveWorldSize(2)(state_of(1, 4))
    state.set_distributed_vars()
    again = State()
    assert (again.rank, again.world_size, again.status) == (1, 2, Status.INITIALIZED)
