"""What a node reports to the coordinator of its checkpoints, and when it looks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.agent.worker_reports import CheckpointStatus, CheckpointWatch
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.option_values import GrowPolicy
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_record

FINAL = make_record()


WAITING = replace(FINAL, waiting=1)


class Heartbeats:
    """Stands for `HeartbeatWatch`: two workers."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.reads = 0
        self.beats = [RankBeat(rank=n, local_rank=n, section="step", at=0.0) for n in range(2)]

    def read(self) -> list[RankBeat]:
        self.reads += 1
        return self.beats

    def write(self, local_rank: int) -> None:
        self.beats[local_rank] = replace(self.beats[local_rank], section="checkpoint")

    def complete(self, local_rank: int) -> None:
        beat = self.beats[local_rank]
        done = {"checkpoints": beat.checkpoints + 1, "saved_at": self._clock.now, "section": "step"}
        self.beats[local_rank] = replace(beat, **done)


class Node:
    def __init__(self, grow: GrowPolicy = GrowPolicy.CHECKPOINT, max_nodes: int = 3) -> None:
        self.clock = FakeClock()
        self.heartbeats = Heartbeats(self.clock)
        me = SimpleNamespace(spec=SimpleNamespace(grow=grow, max_nodes=max_nodes))
        coordination = SimpleNamespace(ask=None)
        site: Any = SimpleNamespace(watch=self.heartbeats, me=me, clock=self.clock, coordination=coordination)
        self.watch = CheckpointWatch(site)

    def read(self, after: float = 0.0, running: tuple[int, ...] = (0, 1)) -> tuple[int, int, float | None] | None:
        self.clock.now += after
        word = self.watch.read(running)
        return None if word is None else (word.round, word.serial, word.age)


def test_while_nobody_waits_nobody_looks() -> None:
    node = Node()
    node.watch.on_record(FINAL)
    node.heartbeats.complete(0)
    assert node.watch.due is None
    assert node.read(after=100) is None
    assert node.heartbeats.reads == 0


def test_nor_where_nobody_can_be_taken_in_or_is_to_be_after_a_checkpoint() -> None:
    for node in (Node(max_nodes=2), Node(GrowPolicy.NOW), Node(GrowPolicy.NEVER)):
        node.watch.on_record(WAITING)
        assert node.watch.due is None


def test_an_earlier_checkpoint_is_told_with_its_age_and_the_next_one_when_it_is_complete() -> None:
    node = Node()
    node.heartbeats.complete(1)
    node.clock.now += 40
    node.watch.on_record(WAITING)
    assert node.read() == (2, 0, 40.0)
    assert node.read(after=0.5) is None
    assert node.heartbeats.reads == 1, "once a second is enough"
    assert node.read(after=0.5) is None
    node.heartbeats.complete(0)
    assert node.read(after=1) == (2, 1, 1.0)
    assert node.watch.due is None, "it has said what there is to say"
    node.watch.on_record(replace(WAITING, number=6, waiting=2))
    assert node.watch.due is None, "also where one more waits"


def test_while_workers_write_one_it_says_so_once_and_not_that_another_is_complete() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    assert node.read() is None
    node.heartbeats.write(0)
    node.heartbeats.write(1)
    assert node.read(after=1) == (2, 0, None)
    node.heartbeats.complete(1)
    assert node.read(after=1) is None
    node.heartbeats.complete(0)
    assert node.read(after=1) == (2, 0, 1.0)


def test_who_has_ended_writes_nothing() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    node.read()
    node.heartbeats.write(0)
    node.heartbeats.complete(1)
    assert node.read(after=1, running=(1,)) == (2, 0, 1.0)


def test_nodes_that_wait_again_begin_a_new_period() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    node.read()
    node.heartbeats.complete(0)
    assert node.read(after=1) == (2, 0, 1.0)
    node.watch.on_record(FINAL)
    assert node.watch.due is None
    node.watch.on_record(WAITING)
    assert node.read(after=5) == (2, 1, 6.0), "a word of its own: the former can't be taken back"
    node.watch.on_record(replace(WAITING, round=3))
    assert node.read(after=1) == (3, 0, 7.0)


def test_a_round_that_is_over_ends_it() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    node.watch.on_record(replace(WAITING, status=Status.JOINABLE, round=3))
    assert node.watch.due is None


def test_the_status_becomes_claims() -> None:
    said: list[tuple[Any, ...]] = []

    class Claims:
        def report_saving(self, *words: Any) -> None:
            said.append(("saving", *words))

        def report_saved(self, *words: Any) -> None:
            said.append(("saved", *words))

    for age in (None, 2.5):
        CheckpointStatus(round=1, serial=4, age=age).send(SimpleNamespace(claims=Claims()))  # type: ignore[arg-type]
    assert said == [("saving", 1, 4), ("saved", 1, 4, 2.5)]
