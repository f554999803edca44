"""Which nodes are paired, and which are bad or slow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hpc_elastic.doctor.pairs import (
    Hello,
    NetworkVerdict,
    PairTime,
    Plan,
    Time,
    common_backend,
    join_times,
    judge_times,
    needs_round,
    pair_up,
    rate_text,
)

MIB = 1 << 20
Link = Callable[[int, int], "float | None"]


def hello(node: int, backend: str = "gloo", gpus: int = 0) -> Hello:
    return Hello(host=f"n{node}", addresses=("127.0.0.1",), port=1, backend=backend, gpus=gpus, token="t")


def measured(count: int, link: Link) -> tuple[PairTime, ...]:
    """All rounds of `count` nodes, whose links have these seconds."""
    times: tuple[PairTime, ...] = ()
    done = 0
    while needs_round(range(count), times, done=done):
        done += 1
        pairs = pair_up(range(count), times)
        found = [PairTime(pair=pair, seconds=link(*pair), why="" if link(*pair) else "no route") for pair in pairs]
        times = (*times, *found)
    return times


def verdict(count: int, link: Link) -> NetworkVerdict:
    plan = Plan(nodes={node: hello(node) for node in range(count)}, times=measured(count, link), bytes=4 * MIB)
    return judge_times(plan, backend="gloo")


def test_neighbours_first_then_the_fastest_with_the_slowest() -> None:
    assert pair_up([4, 5, 6, 7], ()) == ((4, 5), (6, 7))
    times = [PairTime(pair=(4, 5), seconds=0.3), PairTime(pair=(6, 7), seconds=0.1)]
    assert pair_up([4, 5, 6, 7], times) == ((6, 5), (7, 4))
    failed = [PairTime(pair=(4, 5), why="no route"), PairTime(pair=(6, 7), seconds=0.1)]
    assert pair_up([4, 5, 6, 7], failed) == ((6, 5), (7, 4))


@pytest.mark.parametrize("count", range(2, 12))
def test_each_node_of_a_sound_network_is_measured_twice_at_least(count: int) -> None:
    rng = random.Random(count)
    for _ in range(50):
        times = measured(count, lambda a, b: rng.uniform(0.1, 0.12))
        for node in range(count):
            own = [time.pair for time in times if node in time.pair]
            assert len(own) >= 2


@pytest.mark.parametrize("count", range(3, 12))
def test_the_one_bad_node_is_found_and_no_other(count: int) -> None:
    for bad in range(count):
        rng = random.Random(bad)
        found = verdict(count, lambda a, b, bad=bad, rng=rng: None if bad in (a, b) else rng.uniform(0.1, 0.12))
        assert set(found.bad) == {bad}
        assert not found.slow
        assert {node for pair in found.failed for node in pair.pair} >= {bad}


@pytest.mark.parametrize("count", range(3, 12))
def test_the_one_slow_node_is_found_and_no_other(count: int) -> None:
    for slow in range(count):
        rng = random.Random(slow)
        found = verdict(
            count, lambda a, b, slow=slow, rng=rng: (3.0 if slow in (a, b) else 1.0) * rng.uniform(0.1, 0.12)
        )
        assert set(found.slow) == {slow}
        assert not found.bad


@pytest.mark.parametrize("count", range(6, 12))
def test_a_bad_and_a_slow_node_are_told_apart(count: int) -> None:
    for bad in range(count):
        for slow in set(range(count)) - {bad}:
            found = verdict(
                count, lambda a, b, bad=bad, slow=slow: None if bad in (a, b) else 3.0 if slow in (a, b) else 0.1
            )
            assert (set(found.bad), set(found.slow)) == ({bad}, {slow})


@pytest.mark.parametrize("count", range(2, 12))
def test_a_healthy_network_has_neither(count: int) -> None:
    rng = random.Random(count)
    for _ in range(50):
        found = verdict(count, lambda a, b: rng.uniform(0.1, 0.19))
        assert not found.bad
        assert not found.slow
        assert not found.failed


def test_where_nothing_works_or_two_nodes_cannot_try_others_nobody_is_blamed() -> None:
    for count in range(2, 8):
        found = verdict(count, lambda a, b: None)
        assert not found.bad
        assert found.failed
    # Two halves that do not reach each other: each node works with its neighbour.
    halves = verdict(4, lambda a, b: 0.1 if a // 2 == b // 2 else None)
    assert not halves.bad
    assert {pair.pair for pair in halves.failed} == {(0, 3), (1, 2)}


def test_the_reason_names_the_partners_and_the_rates() -> None:
    found = verdict(6, lambda a, b: None if 1 in (a, b) else 0.4 if 2 in (a, b) else 0.01)
    assert found.bad[1] == (
        "no transfer over the network succeeded (with n0: no route; with n4: no route; with n5: no route)"
    )
    assert found.slow[2].startswith("83.9 Mbit/s with n3 and n")
    assert found.slow[2].endswith("where the median of 5 nodes is 3.4 Gbit/s")


def test_a_pair_works_where_both_say_so_and_takes_as_long_as_the_slower() -> None:
    times = {0: Time(seconds=0.1, bytes=1), 1: Time(seconds=0.3, bytes=1), 2: Time(seconds=0.1, bytes=1)}
    assert join_times([(0, 1), (2, 3)], times) == (
        PairTime(pair=(0, 1), seconds=0.3),
        PairTime(pair=(2, 3), why="it did not answer"),
    )
    both = {0: Time(why="the other node did not connect"), 1: Time(why="10.0.0.1: no route")}
    assert join_times([(0, 1)], both)[0].why == "10.0.0.1: no route"


def test_all_use_what_each_of_them_has() -> None:
    assert common_backend([hello(0, "nccl", 8), hello(1, "nccl", 4)]) == ("nccl", 4)
    assert common_backend([hello(0, "nccl", 8), hello(1, "gloo")]) == ("gloo", 0)
    assert common_backend([hello(0, "gloo"), hello(1, "tcp")]) == ("tcp", 0)
    assert rate_text(125_000_000, 0.1) == "10.0 Gbit/s"
