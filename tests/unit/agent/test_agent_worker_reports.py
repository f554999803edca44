"""What a node reports of its checkpoints, and of the in-process restart group; and which workers it replaces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.heartbeats import HeartbeatFolder, RankBeat
from hpc_elastic.agent.local_workers import DeadWorker, keep_apart
from hpc_elastic.agent.worker_reports import CheckpointStatus, CheckpointWatch, RestartGroupWatch, why_not_replaced
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.option_values import GrowPolicy, RestartWith
from hpc_elastic.worker_api.records import (
    LINE_LIMIT,
    RESTART_REPLACES,
    RESTART_REPORTS,
    RESTART_WAIT,
    RestartGroupEvent,
    RestartGroupReport,
    read_report,
)
from tests.rigs.event_pairs import log_into_dicts
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


DEAD = DeadWorker(local_rank=1, rank=5, pid=100, exitcode=-9)


class Workers:
    """One that has died, and whoever is put in its place."""

    def __init__(self, *dead: DeadWorker) -> None:
        self.round = 3
        self.dead = list(dead)
        self.started: list[tuple[int, Mapping[str, str]]] = []
        self.error: Exception | None = None

    def replace(self, local_rank: int, extra: Mapping[str, str]) -> int:
        if self.error is not None:
            raise self.error
        self.started.append((local_rank, extra))
        return 200 + len(self.started)


def site_of(folder: HeartbeatFolder, events: Any, *, policy: RestartWith, limit: int) -> Any:
    me = SimpleNamespace(spec=SimpleNamespace(restart_policy=policy, max_restarts=limit))
    return SimpleNamespace(me=me, events=events, watch=SimpleNamespace(pages=folder))


class Group:
    def __init__(self, folder: Path, *, policy: RestartWith = RestartWith.IN_PROCESS, limit: int = 2) -> None:
        self.events: list[dict[str, Any]] = []
        log: Any = log_into_dicts(self.events)
        self.watch = RestartGroupWatch(site_of(HeartbeatFolder(folder), log, policy=policy, limit=limit))
        self.path = folder / "ring"

    def report(self, event: RestartGroupEvent, *, pid: int = 100, **facts: Any) -> None:
        with open(self.path, "wb", buffering=0) as pipe:
            pipe.write(RestartGroupReport(event=event, pid=pid, rank=5, **facts).encode())

    @property
    def names(self) -> list[str]:
        return [event["event"] for event in self.events]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    found = Group(tmp_path)
    yield found
    os.close(*found.watch.watched())


@pytest.mark.parametrize(
    ("last", "used", "why"),
    [
        (RestartGroupEvent.BEGUN, 0, ""),
        (RestartGroupEvent.LEFT, 1, ""),
        (None, 0, "rank 5 ended with SIGKILL before it was in a wrapped call"),
        (RestartGroupEvent.ENDED, 0, "rank 5 ended with SIGKILL after its wrapped call"),
        (RestartGroupEvent.GAVE_UP, 0, "rank 5 ended with SIGKILL: the in-process restart group gave up"),
        (RestartGroupEvent.BEGUN, 2, "rank 5 ended with SIGKILL, and 2 of 2 replacements in this round are used"),
    ],
)
def test_which_worker_is_replaced(last: RestartGroupEvent | None, used: int, why: str) -> None:
    assert why_not_replaced(DEAD, last=last, used=used, limit=2) == why


def test_a_worker_that_died_in_its_restart_group_is_replaced_so_often_as_it_may(group: Group) -> None:
    workers = Workers(DEAD)
    group.report(RestartGroupEvent.BEGUN)
    assert group.watch.replace_dead(workers)
    workers.dead = [DeadWorker(local_rank=0, rank=4, pid=100, exitcode=1)]
    assert group.watch.replace_dead(workers)
    workers.dead = [DEAD]
    assert not group.watch.replace_dead(workers), "two in a round"
    assert workers.started == [(1, {RESTART_REPLACES: "1"}), (0, {RESTART_REPLACES: "1"})]
    assert group.names == ["worker_replaced", "worker_replaced", "replacement_refused"]
    assert (group.events[0]["old_pid"], group.events[0]["pid"], group.events[0]["exitcode"]) == (100, 201, -9)
    workers.round = 4
    assert group.watch.replace_dead(workers), "a new round begins anew"


def test_nobody_is_replaced_where_one_of_them_cannot_be(group: Group) -> None:
    group.report(RestartGroupEvent.BEGUN)
    group.report(RestartGroupEvent.GAVE_UP, pid=101, reason="RestartAbort: enough")
    workers = Workers(DEAD, DeadWorker(local_rank=0, rank=4, pid=101, exitcode=1))
    assert not group.watch.replace_dead(workers)
    assert workers.started == []
    assert group.names == ["ring_gave_up", "replacement_refused"]


def test_one_that_cannot_be_started_has_all_start_again(group: Group) -> None:
    group.report(RestartGroupEvent.BEGUN)
    workers = Workers(DEAD)
    workers.error = HpcElasticError(message="no memory")
    assert not group.watch.replace_dead(workers)
    assert group.events[-1]["event"] == "replacement_refused"
    assert "no memory" in group.events[-1]["reason"]


def test_under_the_other_policy_all_start_again_and_the_reports_are_kept(tmp_path: Path) -> None:
    group = Group(tmp_path, policy=RestartWith.PROCESSES)
    group.report(RestartGroupEvent.BEGUN)
    group.report(RestartGroupEvent.RESTARTED, iteration=2, seconds=0.5, interruptions=((1, "EXCEPTION"),), world_size=4)
    group.report(RestartGroupEvent.LEFT, reason="KeyError: 1")
    group.watch.handle(7)
    assert not group.watch.replace_dead(Workers(DEAD))
    assert group.names == ["ring_restarted", "ring_left"]
    assert group.events[0]["interruptions"] == [[1, "EXCEPTION"]]
    assert {event["round"] for event in group.events} == {7}
    assert group.watch.environment({}) == {RESTART_REPORTS: str(group.path)}
    os.close(*group.watch.watched())


def test_the_workers_are_given_where_to_report_and_how_long_to_wait(group: Group) -> None:
    assert group.watch.environment({}) == {RESTART_REPORTS: str(group.path), RESTART_WAIT: "300"}
    assert group.watch.environment({RESTART_WAIT: "20"})[RESTART_WAIT] == "20"


def test_without_a_folder_nothing_is_heard(tmp_path: Path) -> None:
    watch = RestartGroupWatch(site_of(HeartbeatFolder(None), None, policy=RestartWith.IN_PROCESS, limit=1))
    assert watch.watched() == (-1,)
    assert watch.environment({}) == {}
    watch.handle(0)


def test_a_line_is_taken_in_pieces(group: Group) -> None:
    line = RestartGroupReport(event=RestartGroupEvent.LEFT, pid=1, rank=2, reason="x").encode()
    with open(group.path, "wb", buffering=0) as pipe:
        pipe.write(line[:9])
        group.watch.handle(0)
        assert group.names == []
        pipe.write(line[9:] + b"no json\n" + b'{"event": "of another version"}\n')
        group.watch.handle(0)
    assert group.names == ["ring_left"]


def test_a_line_never_exceeds_what_a_pipe_takes_at_once() -> None:
    many = tuple((rank, "TERMINATED") for rank in range(5000))
    line = RestartGroupReport(
        event=RestartGroupEvent.RESTARTED,
        pid=1,
        rank=0,
        reason="é" * 5000,
        interruptions=many,
        joined=tuple(range(5000)),
    )
    raw = line.encode()
    assert len(raw) <= LINE_LIMIT < 4096
    found = read_report(raw)
    assert found is not None
    assert found.event is RestartGroupEvent.RESTARTED
    assert found.interruptions == many[: len(found.interruptions)]
    short = RestartGroupReport(
        event=RestartGroupEvent.RESTARTED, pid=7, rank=1, seconds=0.25, interruptions=((3, "EXCEPTION"),), joined=(2,)
    )
    assert read_report(short.encode()) == short


def test_a_dead_workers_error_file_is_kept_apart(tmp_path: Path) -> None:
    keep_apart(tmp_path / "error.json", 0)
    (tmp_path / "error.json").write_text("{}")
    keep_apart(tmp_path / "error.json", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["error-replaced-1.json"]
