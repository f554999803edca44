"""The agent's part that compares its ranks: whom it asks when, what it writes, and what it reports."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent.part import PARTS
from hpc_elastic.agent.slow_rank_watch import ANSWER_SECONDS, EVERY_SECONDS, LEAVE_SECONDS, SlowRankWatch
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base import codec
from hpc_elastic.base.clock import Offset
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.agent_events import RunSlowed, RunSlowEnded, SlowRankEnded, SlowRankFound
from hpc_elastic.run.progress import BestPace, NodeArrivals, OnSlowRank, ProgressSource, SlowRanks
from tests.rigs.fake_clock import FakeClock

STEP_NS = 100_000_000
LATE_NS = 30_000_000


class Workers:
    """Two ranks of one node that enter an all_reduce each 0.1 s."""

    round = 1

    def __init__(self, clock: FakeClock, node: int) -> None:
        self.clock, self.layout = clock, SimpleNamespace(group_rank=node, first_rank=2 * node, world_size=4)
        self.late: dict[int, int] = {}
        self.cost, self.step_ns = 0.02, STEP_NS
        self.groups, self.has_recorder = 1, True
        self.asked = 0
        self.raw: bytes | None = None

    def ask_for_arrivals(self) -> None:
        self.asked += 1

    def take_arrivals(self) -> dict[int, bytes]:
        first = self.layout.first_rank
        if not self.has_recorder:
            return {}
        return {rank: self.raw or self._answer(rank) for rank in (first, first + 1)}

    def _answer(self, rank: int) -> bytes:
        last = self.clock.time_ns() // self.step_ns
        entered = [n * self.step_ns + self.late.get(rank, 0) + n % 7 * 1000 for n in range(last - 60, last)]
        group = {"members": "[0, 1, 2, 3]", "transfers": [], "first": last - 60, "kinds": ["gloo:all_reduce [[9]]"]}
        group |= {"calls": [0] * 60, "entered_ns": entered}
        groups = {f"gloo {index}": group for index in range(self.groups)}
        return json.dumps({"groups": groups, "seconds": self.cost}).encode()


class Node:
    def __init__(
        self,
        clock: FakeClock,
        folder: Path,
        node: int,
        offset: Offset | None,
        choice: OnSlowRank = OnSlowRank.OBSERVE,
        count: int = 2,
    ) -> None:
        self.events: list[Any] = []
        self.figures: dict[str, float] = {}
        self.clock, self.steps, self.left = clock, 0.0, ""
        self.data_share, self.travel = 0.1, {"uid0": (100_000, 200_000)}
        site: Any = SimpleNamespace(
            me=SimpleNamespace(
                paths=SimpleNamespace(slow_ranks=folder),
                run=SimpleNamespace(pace_json=folder.parent / "pace.json"),
                spec=SimpleNamespace(slow_ranks=choice, min_nodes=1, segment=1),
                node=node,
                attempt=SimpleNamespace(nodes=[f"n{n}" for n in range(count)]),
            ),
            watch=SimpleNamespace(read=self._beats),
            clock=clock,
            files=SimpleNamespace(post=lambda action: action()),
            notifier=SimpleNamespace(offset_to=lambda uid: offset, travel_from=lambda uid: self.travel.get(uid)),
            info=SimpleNamespace(uid=f"uid{node}"),
            events=SimpleNamespace(write=self.events.append),
        )
        self.watch = SlowRankWatch(site)
        self.workers = Workers(clock, node)
        members = [SimpleNamespace(node=n, uid=f"uid{n}", local_world_size=2) for n in range(count)]
        record = SimpleNamespace(leader="uid0", members=members, lost=(), unfit=(), status=Status.FINAL, waiting=0)
        self.watch.on_record(record, None)  # type: ignore[arg-type]
        self.watch.on_start(self.workers)  # type: ignore[arg-type]

    def _beats(self) -> list[Any]:
        beat = {"source": ProgressSource.OPTIMIZER, "step": None, "counted_steps": int(self.steps)}
        first, now = 2 * self.workers.layout.group_rank, self.clock.now
        spent = [{"step": now, "data": now * (self.data_share if rank == 3 else 0.1)} for rank in (first, first + 1)]
        return [SimpleNamespace(stepped_at=now, rank=first + n, spent=each, **beat) for n, each in enumerate(spent)]

    def look(self) -> None:
        agent: Any = SimpleNamespace(
            figures=SimpleNamespace(put=self.figures.__setitem__),
            phase=Phase.JOINING,
            on_health=lambda verdict: setattr(self, "left", verdict.reason),
        )
        self.watch.look(agent)


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
                node.look()
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
    assert [slow.rank for slow in now.ranks] == [3]
    assert nodes[0].figures["slow_ranks"] == 1
    assert nodes[0].figures["slow_ranks_share"] == pytest.approx(0.3, rel=0.1)
    nodes[1].workers.late = {}
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert isinstance(nodes[0].events[-1], SlowRankEnded)
    assert nodes[0].events[-1].recovered
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


def test_a_node_whose_network_is_slow_is_named(clock: FakeClock, tmp_path: Path) -> None:
    nodes = [Node(clock, tmp_path / "slow", node, Offset(offset_ns=0, bound_ns=1000), count=3) for node in range(3)]
    nodes[0].travel = dict.fromkeys(("uid1", "uid2"), (100_000, 200_000))
    run(nodes, clock, 3 * EVERY_SECONDS)
    for node in nodes:
        node.workers.step_ns = 3 * STEP_NS
    nodes[0].travel["uid2"] = nodes[2].travel["uid0"] = (LATE_NS, LATE_NS)
    run(nodes, clock, 3 * EVERY_SECONDS)
    (found,) = nodes[0].events
    assert (found.slow.rank, found.slow.host, found.slow.by_network) == (4, "n2", True)
    for node in nodes:
        node.workers.step_ns = STEP_NS
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert nodes[0].events[-1].recovered


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
    assert not nodes[0].events[-1].recovered
    assert [path.name for path in (tmp_path / "slow").iterdir()] == ["now.json"]


def test_an_answer_that_takes_long_is_asked_for_less_often(nodes: list[Node], clock: FakeClock) -> None:
    nodes[0].workers.cost = 0.2
    run(nodes, clock, 1300)
    assert nodes[0].workers.asked <= 1 + 1300 * 0.001 / 0.2
    assert nodes[1].workers.asked > 40


@pytest.mark.parametrize("has_recorder", [False, True])
def test_sections_count_where_no_worker_answers(nodes: list[Node], clock: FakeClock, has_recorder: bool) -> None:
    for node in nodes:
        node.data_share, node.workers.has_recorder = 0.4, has_recorder
    run(nodes, clock, 4 * EVERY_SECONDS)
    assert [event.slow.rank for event in nodes[0].events] == ([] if has_recorder else [3])


def test_no_node_reads_more_than_a_megabyte_a_minute(clock: FakeClock, tmp_path: Path) -> None:
    node, minutes, count = Node(clock, tmp_path / "slow", 1, Offset(offset_ns=0, bound_ns=0)), 120, 400
    node.watch._record.members *= count // 2  # type: ignore[union-attr, operator]
    for groups in (1, 16):
        node.workers.groups, node.workers.asked = groups, 0
        run([node], clock, 60 * minutes)
        size = (tmp_path / "slow" / "node-00001.json").stat().st_size
        assert (node.workers.asked - 1) * size * count <= 1e6 * minutes
    assert node.workers.asked > 3


def test_a_clock_that_is_not_known_yet_is_written_as_such(clock: FakeClock, tmp_path: Path) -> None:
    node = Node(clock, tmp_path / "slow", 1, None)
    run([node], clock, 2 * EVERY_SECONDS + ANSWER_SECONDS)
    written = codec.load(tmp_path / "slow" / "node-00001.json", NodeArrivals)
    assert written.reference == ""
    assert (tmp_path / "slow" / "node-00001.json").stat().st_size < 4096


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"groups": {"a": 1}, "seconds": 0}', b'{"seconds": "x"}'])
def test_what_is_not_understood_is_left_out(nodes: list[Node], clock: FakeClock, raw: bytes, tmp_path: Path) -> None:
    nodes[0].workers.raw = raw
    run(nodes, clock, 3 * EVERY_SECONDS)
    assert nodes[0].events == []


@pytest.mark.parametrize(("choice", "leaves"), [(OnSlowRank.EXCLUDE, True), (OnSlowRank.OBSERVE, False)])
def test_a_node_with_a_slow_rank_leaves_at_the_next_restart(
    clock: FakeClock, tmp_path: Path, choice: OnSlowRank, leaves: bool
) -> None:
    nodes = [Node(clock, tmp_path / "slow", node, Offset(offset_ns=0, bound_ns=1000), choice) for node in range(2)]
    nodes[1].workers.late = {3: LATE_NS}
    run(nodes, clock, 4 * EVERY_SECONDS)
    assert [node.left for node in nodes] == ["", ""], "no restart by itself"
    for node in nodes:
        node.watch.before_stop()
    for node in nodes:
        node.watch.on_join(1)
        node.look()
    assert nodes[0].left == ""
    assert nodes[1].left.startswith("slow rank: rank 3 on n1 enters") is leaves
    assert [node.watch.due for node in nodes] == [None, None], "the loop rests until the workers run"
    assert not any(node.watch.holds_join(None) for node in nodes)  # type: ignore[arg-type]


def test_a_filesystem_that_hangs_holds_no_restart(clock: FakeClock, tmp_path: Path) -> None:
    node = Node(clock, tmp_path, 0, None, OnSlowRank.EXCLUDE)
    node.watch._files = SimpleNamespace(post=lambda action: None)  # type: ignore[assignment]
    node.watch.before_stop()
    node.watch.on_join(1)
    assert node.watch.holds_join(None)  # type: ignore[arg-type]
    clock.now += LEAVE_SECONDS
    node.look()
    assert not node.watch.holds_join(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world_size", "is_slow", "answer"), [(4, True, 0.0), (4, True, 0.4), (8, False, 0.0)])
def test_a_run_that_is_slower_than_its_best_hour_is_reported(
    clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, world_size: int, is_slow: bool, answer: float
) -> None:
    """As soon where an answer takes its rank so long that workers are asked rarely."""
    codec.save(tmp_path / "pace.json", BestPace(world_size=world_size, step=1.0))
    node = Node(clock, tmp_path / "slow", 0, None)
    node.watch._seconds = answer

    def train(minutes: int, step: float) -> None:
        for _ in range(2 * minutes):
            node.steps += 30 / step
            run([node], clock, 30)

    train(10, 1.5)
    assert [type(event) for event in node.events] == [RunSlowed] * is_slow
    if not is_slow:
        return
    took = "a step takes 1.5 s and took 1 s in the run's best hour: 33% of the time is lost"
    assert took in caplog.text
    now = codec.load(tmp_path / "slow" / "now.json", SlowRanks)
    assert str(now.pace) == took
    assert node.figures["step_seconds"] == pytest.approx(1.5, rel=0.01)
    assert node.figures["step_seconds_best"] == pytest.approx(1, rel=0.01)
    train(10, 1.0)
    assert isinstance(node.events[-1], RunSlowEnded)
    assert node.events[-1].seconds == pytest.approx(500, abs=120)
    assert not (tmp_path / "slow" / "now.json").exists()


def test_the_best_hour_is_kept_for_the_next_round(clock: FakeClock, tmp_path: Path) -> None:
    node = Node(clock, tmp_path / "slow", 0, None)
    for _ in range(70):
        node.steps += 30
        run([node], clock, 30)
    best = codec.load(tmp_path / "pace.json", BestPace)
    assert (best.world_size, best.step) == (4, pytest.approx(1, rel=0.01))


@pytest.mark.parametrize("choice", OnSlowRank)
def test_off_asks_the_workers_nothing(choice: OnSlowRank) -> None:
    needs = next(needs for module, _, needs in PARTS if module == "slow_rank_watch")
    me: Any = SimpleNamespace(spec=SimpleNamespace(slow_ranks=choice))
    assert needs(me) is (choice is not OnSlowRank.OFF)
