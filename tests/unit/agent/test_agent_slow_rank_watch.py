"""The agent's part that compares its ranks: whom it asks when, what it writes, and what it reports."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent.slow_rank_watch import ANSWER_SECONDS, EVERY_SECONDS, SlowRankWatch
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Offset
from hpc_elastic.run.agent_events import SlowRankEnded, SlowRankFound
from hpc_elastic.run.slow_ranks import NodeArrivals, SlowRanks
from tests.rigs.fake_clock import FakeClock

STEP_NS = 100_000_000
LATE_NS = 30_000_000


class Workers:
    """Two ranks of one node that enter an all_reduce each 0.1 s."""

    round = 1

    def __init__(self, clock: FakeClock, node: int) -> None:
        self.clock, self.layout = clock, SimpleNamespace(group_rank=node, first_rank=2 * node)
        self.late: dict[int, int] = {}
        self.cost = 0.02
        self.asked = 0
        self.raw: bytes | None = None

    def ask_for_arrivals(self) -> None:
        self.asked += 1

    def take_arrivals(self) -> dict[int, bytes]:
        first = self.layout.first_rank
        return {rank: self.raw or self._answer(rank) for rank in (first, first + 1)}

    def _answer(self, rank: int) -> bytes:
        last = self.clock.time_ns() // STEP_NS
        entered = [n * STEP_NS + self.late.get(rank, 0) + n % 7 * 1000 for n in range(last - 60, last)]
        group = {"members": "[0, 1, 2, 3]", "transfers": [], "first": last - 60, "kinds": ["gloo:all_reduce [[9]]"]}
        group |= {"calls": [0] * 60, "entered_ns": entered}
        return json.dumps({"groups": {"gloo 0": group}, "seconds": self.cost}).encode()


class Node:
    def __init__(self, clock: FakeClock, folder: Path, node: int, offset: Offset | None) -> None:
        self.events: list[Any] = []
        self.figures: dict[str, float] = {}
        site: Any = SimpleNamespace(
            me=SimpleNamespace(
                paths=SimpleNamespace(slow_ranks=folder), node=node, attempt=SimpleNamespace(nodes=["n0", "n1"])
            ),
            clock=clock,
            files=SimpleNamespace(post=lambda action: action()),
            notifier=SimpleNamespace(offset_to=lambda uid: offset),
            info=SimpleNamespace(uid=f"uid{node}"),
            events=SimpleNamespace(write=self.events.append),
        )
        self.watch = SlowRankWatch(site)
        self.workers = Workers(clock, node)
        members = [SimpleNamespace(node=n, local_world_size=2) for n in range(2)]
        self.watch.on_record(SimpleNamespace(leader="uid0", members=members), None)  # type: ignore[arg-type]
        self.watch.on_start(self.workers)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_000_000.0)


@pytest.fixture
def nodes(clock: FakeClock, tmp_path: Path) -> list[Node]:
    return [Node(clock, tmp_path / "slow", node, Offset(offset_ns=0, bound_ns=1000)) for node in range(2)]


def run(nodes: list[Node], clock: FakeClock, seconds: float) -> None:
    end = clock.now + seconds
    while (due := min(node.watch.due or end for node in nodes)) < end:
        clock.now = max(due, clock.now)
        for node in nodes:
            if node.watch.due is not None and node.watch.due <= clock.now:
                node.watch.look(SimpleNamespace(figures=SimpleNamespace(put=node.figures.__setitem__)))  # type: ignore[arg-type]
    clock.now = end


def test_a_slow_rank_is_reported_once_and_again_when_it_is_over(
    nodes: list[Node], clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert nodes[0].events == []
    nodes[1].workers.late = {3: LATE_NS}
    run(nodes, clock, 4 * EVERY_SECONDS)
    (found,) = nodes[0].events
    assert isinstance(found, SlowRankFound)
    assert (found.slow.rank, found.slow.node, found.round) == (3, 1, 1)
    assert "rank 3 on n1 enters each all_reduce 30 ms after the others" in caplog.text
    now = codec.load(tmp_path / "slow" / "now.json", SlowRanks)
    assert isinstance(now, SlowRanks)
    assert [slow.rank for slow in now.ranks] == [3]
    assert nodes[0].figures["slow_ranks"] == 1
    assert nodes[0].figures["slow_ranks_share"] == pytest.approx(0.3, rel=0.1)
    nodes[1].workers.late = {}
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert isinstance(nodes[0].events[-1], SlowRankEnded)
    assert nodes[0].events[-1].seconds == pytest.approx(4 * EVERY_SECONDS, abs=EVERY_SECONDS)
    assert not (tmp_path / "slow" / "now.json").exists()
    assert nodes[0].figures["slow_ranks"] == 0
    assert nodes[1].events == [], "the node of group rank 0 alone reports"


def test_a_node_whose_ranks_are_all_slow_is_named(
    nodes: list[Node], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    nodes[1].workers.late = {2: LATE_NS, 3: LATE_NS}
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert caplog.text.count("all ranks on n1 are slow") == 1


@pytest.mark.parametrize("end", ["before_stop", "on_success"])
def test_the_end_of_a_round_ends_what_was_slow_in_it(
    nodes: list[Node], clock: FakeClock, tmp_path: Path, end: str
) -> None:
    nodes[0].workers.late = {0: LATE_NS}
    run(nodes, clock, 3 * EVERY_SECONDS)
    for node in nodes:
        getattr(node.watch, end)()
        assert node.watch.due is None
    assert [type(event) for event in nodes[0].events] == [SlowRankFound, SlowRankEnded]
    assert list((tmp_path / "slow").iterdir()) == []


def test_all_nodes_ask_at_the_same_time_of_the_clock(clock: FakeClock, tmp_path: Path) -> None:
    clock.now += 7.3
    first = Node(clock, tmp_path, 0, None)
    clock.now += 4.1
    second = Node(clock, tmp_path, 1, None)
    assert first.watch.due == second.watch.due
    assert first.watch.due is not None
    assert first.watch.due % EVERY_SECONDS == pytest.approx(0, abs=0.001)


def test_an_answer_that_takes_long_is_asked_for_less_often(nodes: list[Node], clock: FakeClock) -> None:
    nodes[0].workers.cost = 0.2
    run(nodes, clock, 1300)
    assert nodes[0].workers.asked <= 1 + 1300 * 0.001 / 0.2
    assert nodes[1].workers.asked > 40


def test_a_clock_that_is_not_known_yet_is_written_as_such(clock: FakeClock, tmp_path: Path) -> None:
    node = Node(clock, tmp_path / "slow", 1, None)
    run([node], clock, 2 * EVERY_SECONDS + ANSWER_SECONDS)
    written = codec.load(tmp_path / "slow" / "node-00001.json", NodeArrivals)
    assert isinstance(written, NodeArrivals)
    assert written.reference == ""
    assert (tmp_path / "slow" / "node-00001.json").stat().st_size < 4096


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"groups": {"a": 1}, "seconds": 0}', b'{"seconds": "x"}'])
def test_what_is_not_understood_is_left_out(nodes: list[Node], clock: FakeClock, raw: bytes, tmp_path: Path) -> None:
    nodes[0].workers.raw = raw
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert nodes[0].events == []
