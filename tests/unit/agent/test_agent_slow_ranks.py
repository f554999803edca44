"""Slow ranks of a run: its process groups, its pipelines, its nodes' clocks, and when they are reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.slow_ranks import (
    WINDOWS,
    Network,
    Pace,
    Watched,
    by_node,
    choose_leaving,
    find_slow,
    find_slow_network,
    next_pace,
    next_watched,
)
from hpc_elastic.rendezvous.state import Member
from hpc_elastic.run.progress import GroupArrivals, NodeArrivals, RankSections, SlowRank

STEPS = 40
STEP_US = 100_000
LATE_US = 30_000
KINDS = ("gloo:all_reduce [[1]]",)
NAMES = [f"n{index}" for index in range(10)]


def arrivals(rank: int, *, group: str = "0", late: int = 0, links: tuple[int, ...] = (), at: int = 0) -> GroupArrivals:
    return GroupArrivals(
        rank=rank,
        group=group,
        links=links,
        calls=(0,) * STEPS,
        entered_us=(late + at + rank * 10, *(STEP_US + step % 3 - (step - 1) % 3 for step in range(1, STEPS))),
    )


def node(*groups: GroupArrivals, index: int = 1, reference: str = "a", bound_ns: int = 1000) -> NodeArrivals:
    return NodeArrivals(
        round=index, reference=reference, since_ns=10**15, bound_ns=bound_ns, kinds=KINDS, groups=groups
    )


def find(*nodes: NodeArrivals) -> list[int]:
    return sorted(find_slow(dict(enumerate(nodes)), round_index=1, names=NAMES)[0])


def test_a_rank_of_any_node_is_named() -> None:
    first = node(arrivals(0), arrivals(1))
    assert find(first, node(arrivals(2), arrivals(3, late=LATE_US))) == [3]
    found = find_slow({5: first, 9: node(arrivals(2), arrivals(3, late=LATE_US))}, round_index=1, names=NAMES)[0][3]
    assert (found.node, found.call) == (9, "gloo:all_reduce [[1]]")
    assert found.seconds == pytest.approx(0.03, rel=0.01)
    assert found.share == pytest.approx(0.3, rel=0.05)
    assert str(found) == (
        f"rank 3 on n9 enters each all_reduce 30 ms after the others (median of {STEPS}): "
        "a step takes 0.100 s instead of 0.069 s"
    )


def test_1024_ranks_are_judged_in_three_seconds() -> None:
    calls = {"calls": (0,) * 128, "entered_us": (0, *(STEP_US + step % 3 for step in range(127)))}
    late = {"calls": (0,) * 128, "entered_us": (LATE_US, *calls["entered_us"][1:])}
    nodes = {}
    for index in range(128):
        ranks = range(8 * index, 8 * index + 8)
        groups = [replace(arrivals(rank), **(late if rank == 777 else calls)) for rank in ranks]
        nodes[index] = node(*groups, *(replace(one, group=f"tp{index}") for one in groups))
    began = time.thread_time()
    found, compared, _ = find_slow(nodes, round_index=1, names=["n"] * 128)
    assert time.thread_time() - began < 3
    assert (list(found), len(compared)) == ([777], 1024)


FIRST, LATE = (arrivals(0), arrivals(1)), (arrivals(2), arrivals(3, late=LATE_US))
WAITS_FOR_3 = [
    *(arrivals(rank, group="tp01") for rank in (0, 1)),
    *(arrivals(2, group="tp23"), arrivals(3, group="tp23", late=LATE_US)),
    *(arrivals(0, group="dp02"), arrivals(2, group="dp02", late=LATE_US)),
    *(arrivals(1, group="dp13"), arrivals(3, group="dp13", late=LATE_US)),
]
STAGES = [arrivals(0, links=(1,)), arrivals(1, late=LATE_US), arrivals(2, links=(3,)), arrivals(3, late=LATE_US)]
SAME = [arrivals(1, group="dp"), arrivals(3, group="dp", late=LATE_US)]
LAST_LATE = [arrivals(rank, late=LATE_US * (rank % 2)) for rank in range(8)]
LAST = [arrivals(rank, group="dp") for rank in (1, 3, 5, 7)]


@pytest.mark.parametrize(
    ("nodes", "slow"),
    [
        ([node(*FIRST), node(*LATE, index=0)], []),  # another round wrote it
        *(([node(*FIRST), node(*LATE, reference=reference)], []) for reference in ("", "b")),  # its clock is not known
        ([node(arrivals(0), arrivals(1, late=LATE_US), reference="")], [1]),  # one node needs no reference
        # Ranks 0 and 1, 2 and 3 are tensor-parallel; 0 and 2, 1 and 3 hold the same shards. Rank 3 is slow, and so late
        # is 2 in its own data-parallel group, since it waits for 3 in the other.
        ([node(*WAITS_FOR_3)], [3]),
        # Ranks 0 and 1 are one pipeline, 2 and 3 another; 0 and 2, 1 and 3 are the same stage.
        ([node(*STAGES)], []),
        ([node(*STAGES, *SAME)], [3]),
        # It is not known who sends to whom: all ranks of the group are stages.
        ([node(*(replace(arrivals(rank, late=LATE_US * (rank == 1)), has_transfers=True) for rank in range(4)))], []),
        # Ranks 1 and 3 are the last stage; gloo does not record who sends to whom in a group without collectives.
        ([node(*LAST_LATE[:4], *LAST[:2]), node(*LAST_LATE[4:], *LAST[2:])], []),
        ([node(*LAST_LATE[:4]), node(*LAST_LATE[4:])], [1, 3, 5, 7]),
    ],
)
def test_ranks_are_compared_with_those_that_do_the_same(nodes: list[NodeArrivals], slow: list[int]) -> None:
    assert find(*nodes) == slow


def network(step_ms: int, *travel_ms: float, quick_ms: float | None = None) -> dict[int, NodeArrivals]:
    """One rank on each node; node 0 coordinates, and the packets between it and the others take `travel_ms`."""
    us = [(round(1000 * (took if quick_ms is None else quick_ms)), round(1000 * took)) for took in travel_ms]
    groups = [
        replace(arrivals(rank), entered_us=(rank * 10, *[1000 * step_ms] * (STEPS - 1))) for rank in range(1 + len(us))
    ]
    others = [replace(node(groups[1 + at]), travel_us={0: took}) for at, took in enumerate(us)]
    first = replace(node(groups[0]), travel_us={1 + at: took for at, took in enumerate(us)})
    return dict(enumerate((first, *others)))


def in_network(window: dict[int, NodeArrivals], before: Network) -> tuple[dict[int, SlowRank], Network]:
    pace = find_slow(window, round_index=1, names=NAMES)[2]
    return find_slow_network(window, pace, before, round_index=1, names=NAMES)


def with_checks(window: dict[int, NodeArrivals], every: int) -> dict[int, NodeArrivals]:
    """After each so many steps the ranks have a second call, of another kind, 1 ms after the first."""
    kinds, calls = (*KINDS, "gloo:broadcast [[1]]"), tuple(int(place % every == 1) for place in range(STEPS))
    found = {}
    for at, one in window.items():
        first, *steps = one.groups[0].entered_us
        for place, is_check in enumerate(calls[1:-1]):
            if is_check:
                steps[place], steps[place + 1] = 1000, steps[place + 1] - 1000
        group = replace(one.groups[0], calls=calls, entered_us=(first, *steps))
        found[at] = replace(one, kinds=kinds, groups=(group,))
    return found


FAST = network(100, 0.2, 0.2, 0.2)
IRREGULAR = {
    at: replace(
        one,
        kinds=tuple(f"call {place}" for place in range(STEPS)),
        groups=(replace(one.groups[0], calls=tuple(range(STEPS))),),
    )
    for at, one in network(300, 0.2, 30, 0.2).items()
}


@pytest.mark.parametrize(
    ("windows", "nodes"),
    [
        ([FAST, network(300, 0.2, 30, 0.2)], [2]),
        ([FAST, network(300, 30, 0.2, 30)], [1, 3]),
        ([FAST, network(300, 30, 30, 30)], [0]),  # the coordinator itself
        ([FAST, network(300, 0.2, 0.2, 0.2)], []),  # something else takes the time
        ([FAST, network(100, 0.2, 30, 0.2)], []),  # the collectives take another network
        ([FAST, network(105, 0.2, 30, 0.2)], []),
        ([FAST, network(300, 0.2, 2, 0.2)], []),
        ([network(100, 0.2, 30, 0.2), network(300, 0.2, 35, 0.2)], []),  # it is far away, and always was
        ([network(300, 0.2, 30, 0.2)], []),  # how long do steps take without?
        ([FAST, *[network(300, 0.2, 30, 0.2)] * 30], [2]),
        ([FAST, network(300, 0.2, 30, 0.2, quick_ms=0.2)], [2]),  # a queue, which is not always full
        ([FAST, network(300, 20, 30, 20, quick_ms=0.2)], []),  # busy machines
        ([network(100, 20, 20, 20, quick_ms=0.2), network(300, 0.2, 30, 0.2)], [2]),  # they were busy as they started
        ([network(100, 0.2), network(300, 30)], []),  # of two: whose is it?
        ([FAST, {}], []),
        ([with_checks(FAST, 10), network(300, 0.2, 30, 0.2)], [2]),
        ([FAST, with_checks(network(300, 0.2, 30, 0.2), 10)], [2]),
        ([FAST, with_checks(network(100, 0.2, 30, 0.2), 10)], []),
        ([IRREGULAR], []),  # no step is known
        ([FAST, IRREGULAR], []),
    ],
)
def test_a_slow_network_is_named_by_its_packets_where_steps_take_longer(
    windows: list[dict[int, NodeArrivals]], nodes: list[int]
) -> None:
    before = Network()
    for window in windows:
        found, before = in_network(window, before)
    assert sorted(one.node for one in found.values()) == nodes
    for one in found.values():
        assert one.share == pytest.approx(2 / 3, rel=0.01)
        assert str(one).startswith(f"rank {one.rank} on n{one.node} gets packets 30 ms after the others (its node's ")
        assert str(one).endswith(": a step takes 0.300 s instead of 0.100 s")


def test_the_first_window_holds_the_steps_before_the_network_was_slow() -> None:
    window = network(300, 0.2, 30, 0.2)
    steps = (0, *[100_000] * 15, *[300_000] * (STEPS - 16))
    mixed = {at: replace(one, groups=(replace(one.groups[0], entered_us=steps),)) for at, one in window.items()}
    found, _ = in_network(mixed, Network())
    assert [(one.node, round(one.share, 2)) for one in found.values()] == [(2, 0.67)]


def slow(rank: int, on: int = 0) -> SlowRank:
    return SlowRank(rank=rank, node=on, host=NAMES[on], seconds=0.03, call="x", calls=9, share=0.2)


def test_a_rank_is_reported_after_windows_in_a_row_and_until_as_many_show_it_no_more() -> None:
    watched = Watched()
    reported = []
    for now, found in enumerate([{3}, {}, {3}, {3}, {3, 4}, {}, {3}, {}, {}]):
        watched = next_watched(watched, {rank: slow(rank) for rank in found}, compared={3, 4}, now_ns=now)
        reported.append({rank: one.since_ns for rank, one in watched.slow.items()})
    assert WINDOWS == 2
    assert reported == [{}, {}, {}, {3: 3}, {3: 3}, {3: 3}, {3: 3}, {3: 3}, {}]


def test_a_window_in_which_a_rank_was_not_compared_says_nothing_of_it() -> None:
    """Its node asks less often than the one that compares, since an answer takes long."""
    watched = Watched()
    reported = []
    for now, (found, compared) in enumerate([({3}, {3}), ({}, {0}), ({3}, {3}), ({}, {0}), ({}, {3}), ({}, {3})]):
        watched = next_watched(watched, {rank: slow(rank) for rank in found}, compared=compared, now_ns=now)
        reported.append(list(watched.slow))
    assert reported == [[], [], [3], [3], [3], []]


def test_ranks_without_a_number_in_common_are_not_compared() -> None:
    old = node(*(replace(arrivals(rank), first=900) for rank in (2, 3)))
    assert find_slow({0: node(arrivals(0), arrivals(1)), 1: old}, round_index=1, names=NAMES)[:2] == ({}, set())


def test_a_node_of_which_all_ranks_are_slow() -> None:
    assert by_node([slow(2, 1), slow(3, 1), slow(4, 2)], [2, 2, 2]) == (1,)


FEW, TOO = "only {} of at least 2 nodes would be left", "rank {} was slow on another node, too"


@pytest.mark.parametrize(
    ("slow", "facts", "leaves"),
    [
        ({4: 0.2}, {}, {2: ""}),
        ({4: 0.2, 5: 0.3}, {}, {2: ""}),
        ({4: 0.2, 0: 0.3}, {}, {0: "", 2: FEW.format(1)}),
        ({4: 0.2, 0: 0.3}, {"waiting": 1}, {0: "", 2: ""}),
        ({4: 0.2}, {"lost": (1,)}, {2: FEW.format(1)}),
        ({4: 0.2}, {"lost": (2,)}, {}),
        ({4: 0.2}, {"segment": 2, "waiting": 1}, {2: ""}),
        ({0: 0.2}, {"segment": 2, "waiting": 1}, {0: FEW.format(0)}),
        ({0: 0.2}, {"segment": 2, "waiting": 2}, {0: ""}),
        ({4: 0.2}, {"moved": {4: 0}}, {2: TOO.format(4)}),
        ({4: 0.2}, {"moved": {4: 2, 5: 0}}, {2: ""}),
    ],
)
def test_nodes_leave_where_enough_are_left(
    slow: dict[int, float], facts: dict[str, Any], leaves: dict[int, str]
) -> None:
    one = SlowRank(rank=0, node=0, host="", seconds=0.1, call="", calls=9, share=0)
    found = choose_leaving(
        [replace(one, rank=rank, node=rank // 2, share=share) for rank, share in slow.items()],
        SimpleNamespace(
            members=[Member(f"uid{node}", node, 2) for node in range(3)], lost=facts.get("lost", ()), unfit=()
        ),  # type: ignore[arg-type]
        waiting=facts.get("waiting", 0),
        min_nodes=2,
        segment=facts.get("segment", 1),
        moved=facts.get("moved", {}),
    )
    assert found == leaves


DATA = {"data": 3.0, "step": 26.0, "checkpoint": 1.0}


@pytest.mark.parametrize(
    ("ranks", "slow"),
    [
        ([DATA] * 4, []),
        ([DATA, DATA, DATA | {"data": 8.0, "step": 21.0}, DATA], [2]),
        ([DATA | {"checkpoint": 9.0}, DATA, DATA, DATA], []),
        ([DATA | {"log": 9.0}, DATA, DATA, DATA], []),
        ([DATA, DATA | {"data": 8.0, "step": 21.0}], []),  # one of two: who waits for whom?
        ([DATA | {"data": 2.0 + rank} for rank in range(5)], []),
        ([], []),
    ],
)
def test_sections_are_compared_where_torch_has_no_recorder(ranks: list[dict[str, float]], slow: list[int]) -> None:
    sections = tuple(RankSections(rank=rank, seconds=30.0, spent=spent) for rank, spent in enumerate(ranks))
    found, compared, _ = find_slow(
        {0: NodeArrivals(round=1, since_ns=0, sections=sections)}, round_index=1, names=NAMES
    )
    assert (sorted(found), compared) == (slow, set(range(len(ranks))))
    for one in found.values():
        assert (
            str(one)
            == "rank 2 on n0 is 10.0 s a minute longer in section data than the others: that costs 17% of the time"
        )


HOUR = 3600.0
Seconds = Callable[[float], float]


def look_at(pace: Pace, seconds_of_step: Seconds, *, hours: float, begin: float = 0.0) -> Iterator[Pace]:
    """A look each 30 s; steps take what they take at their time."""
    now = due = done_at = begin
    steps = 0
    while now < begin + hours * HOUR:
        now += seconds_of_step(now)
        steps, done_at = steps + 1, now
        if now >= due:
            due = now + 30
            pace = next_pace(pace, steps=steps, at=done_at)
            yield pace


def saves_and_evaluates(now: float) -> float:
    return 1500.0 if now % 3600 < 1 else 40.0 if now % 600 < 1 else 1.0


@pytest.mark.parametrize(
    "usual",
    [
        lambda now: 1.0,
        lambda now: 75.0,
        saves_and_evaluates,
        lambda now: 5.0 if now < 900 else 1.0,  # it compiles, and fills its caches
        lambda now: 1.0 + 0.9 * (int(now) * 7919 % 101 / 101),  # sequences of any length
        lambda now: 1.0 if now < 4000 else 1.08,
    ],
)
def test_a_healthy_run_is_not_slow(usual: Seconds) -> None:
    assert not any(pace.is_slow for pace in look_at(Pace(), usual, hours=6))


def test_steps_that_drop_slowly_are_found_too() -> None:
    assert list(look_at(Pace(), lambda now: 1 + now / HOUR * 0.05, hours=5))[-1].is_slow


def test_a_step_that_goes_back_begins_again() -> None:
    before = list(look_at(Pace(), lambda now: 1.0, hours=2))[-1]
    assert not next_pace(before, steps=10, at=before.at + 600).is_slow
