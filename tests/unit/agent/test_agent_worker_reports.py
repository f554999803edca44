"""What a node reports of its workers: checkpoints, restart groups in process, and answers to a notice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.heartbeats import HeartbeatFolder, RankBeat
from hpc_elastic.agent.local_workers import DeadWorker, LocalWorkers, keep_apart
from hpc_elastic.agent.worker_reports import (
    CheckpointStatus,
    CheckpointWatch,
    PreemptionWatch,
    RestartGroupWatch,
    ended_by_notice,
    why_not_replaced,
)
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.state import PreemptionStatus, RoundRecord, RunNotice, Status
from hpc_elastic.run.option_values import GrowPolicy, RestartWith
from hpc_elastic.worker_api.records import (
    LINE_LIMIT,
    NO_STEP,
    RESTART_REPLACES,
    RESTART_REPORTS,
    RESTART_WAIT,
    STEP_PENDING,
    RestartGroupEvent,
    RestartGroupReport,
    read_report,
)
from tests.rigs.event_pairs import log_into_dicts
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_record

FINAL = make_record()


WAITING = replace(FINAL, waiting=1)


class Pages:
    """Stands for `HeartbeatWatch`: two workers."""

    def __init__(self) -> None:
        self.reads = 0
        self.told: list[tuple[float, int]] = []
        self.beats = [
            RankBeat(rank=n, local_rank=n, section="step", at=0.0, step=10, asks_for_notices=True) for n in range(2)
        ]

    def read(self) -> list[RankBeat]:
        self.reads += 1
        return list(self.beats)

    def deliver_notice(self, *, deadline: float, step: int) -> None:
        self.told.append((deadline, step))

    def put(self, local_rank: int, **changes: Any) -> None:
        self.beats[local_rank] = replace(self.beats[local_rank], **changes)


class Node:
    def __init__(self, grow: GrowPolicy = GrowPolicy.CHECKPOINT, max_nodes: int = 3) -> None:
        self.clock = FakeClock()
        self.pages = Pages()
        me = SimpleNamespace(spec=SimpleNamespace(grow=grow, max_nodes=max_nodes))
        coordination = SimpleNamespace(ask=None)
        site: Any = SimpleNamespace(watch=self.pages, me=me, clock=self.clock, coordination=coordination)
        self.watch = CheckpointWatch(site)

    def read(self, after: float = 0.0, running: tuple[int, ...] = (0, 1)) -> tuple[int, int, float | None] | None:
        self.clock.now += after
        word = self.watch.read(running)
        return None if word is None else (word.round, word.serial, word.age)

    def write(self, local_rank: int) -> None:
        self.pages.put(local_rank, section="checkpoint")

    def complete(self, local_rank: int) -> None:
        done = self.pages.beats[local_rank].checkpoints + 1
        self.pages.put(local_rank, checkpoints=done, saved_at=self.clock.now, section="step")


def test_nobody_looks_where_no_checkpoint_is_waited_for() -> None:
    node = Node()
    node.watch.on_record(FINAL)
    node.complete(0)
    assert node.watch.due is None, "nobody waits"
    assert node.read(after=100) is None
    assert node.pages.reads == 0
    for other in (Node(max_nodes=2), Node(GrowPolicy.NOW), Node(GrowPolicy.NEVER)):
        other.watch.on_record(WAITING)
        assert other.watch.due is None, "nobody can be taken in, or is to be after a checkpoint"
    node.watch.on_record(WAITING)
    node.watch.on_record(replace(WAITING, status=Status.JOINABLE, round=3))
    assert node.watch.due is None, "the round is over"


def test_an_earlier_checkpoint_is_told_with_its_age_and_the_next_one_when_it_is_complete() -> None:
    node = Node()
    node.complete(1)
    node.clock.now += 40
    node.watch.on_record(WAITING)
    assert node.read() == (2, 0, 40.0)
    assert node.read(after=0.5) is None
    assert node.pages.reads == 1, "once a second is enough"
    assert node.read(after=0.5) is None
    node.complete(0)
    assert node.read(after=1) == (2, 1, 1.0)
    assert node.watch.due is None, "it has said what there is to say"
    node.watch.on_record(replace(WAITING, number=6, waiting=2))
    assert node.watch.due is None, "also where one more waits"


def test_while_workers_write_one_it_says_so_once_and_not_that_another_is_complete() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    assert node.read() is None
    node.write(0)
    node.write(1)
    assert node.read(after=1) == (2, 0, None)
    node.complete(1)
    assert node.read(after=1) is None
    node.complete(0)
    assert node.read(after=1) == (2, 0, 1.0)


def test_who_has_ended_writes_nothing() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    node.read()
    node.write(0)
    node.complete(1)
    assert node.read(after=1, running=(1,)) == (2, 0, 1.0)


def test_nodes_that_wait_again_begin_a_new_period() -> None:
    node = Node()
    node.watch.on_record(WAITING)
    node.read()
    node.complete(0)
    assert node.read(after=1) == (2, 0, 1.0)
    node.watch.on_record(FINAL)
    assert node.watch.due is None
    node.watch.on_record(WAITING)
    assert node.read(after=5) == (2, 1, 6.0), "a word of its own: the former can't be taken back"
    node.watch.on_record(replace(WAITING, round=3))
    assert node.read(after=1) == (3, 0, 7.0)


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
    workers = Workers(DEAD)
    workers.error = HpcElasticError(message="no memory")
    assert not group.watch.replace_dead(workers), "it cannot be started"
    assert "no memory" in group.events[-1]["reason"]
    group.report(RestartGroupEvent.GAVE_UP, pid=101, reason="RestartAbort: enough")
    workers = Workers(DEAD, DeadWorker(local_rank=0, rank=4, pid=101, exitcode=1))
    assert not group.watch.replace_dead(workers)
    assert workers.started == []
    assert group.names == ["replacement_refused", "ring_gave_up", "replacement_refused"]


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


NOTICE = RunNotice("SIGUSR2 on n0", 60.0)
NOTICED = replace(FINAL, number=6, notice=NOTICE)
AGREED = replace(FINAL, number=7, notice=replace(NOTICE, step=30))


class NoticedNode:
    def __init__(self, signal_name: str = "") -> None:
        self.clock = FakeClock()
        self.pages = Pages()
        self.sent: list[signal.Signals] = []
        self.deaf: set[int] = set()
        """Local ranks no process of which catches the signal."""
        me = SimpleNamespace(spec=SimpleNamespace(preemption_signal=signal_name))
        site: Any = SimpleNamespace(watch=self.pages, me=me, clock=self.clock, coordination=SimpleNamespace(ask=None))
        self.watch = PreemptionWatch(site)

    def on_record(self, record: RoundRecord) -> None:
        self.watch.on_record(record, SimpleNamespace(send=self._send))  # type: ignore[arg-type]

    def _send(self, number: signal.Signals, speakers: dict[int, int]) -> list[int]:
        heard = [rank for rank in speakers if rank not in self.deaf]
        self.sent += [number] * len(heard)
        return [rank for rank in speakers if rank in self.deaf]

    def read(self, after: float = 0.0, running: tuple[int, ...] = (0, 1)) -> Any:
        self.clock.now += after
        return self.watch.read(running)


def test_without_a_notice_nobody_looks_and_while_no_worker_runs_it_is_nothing_to_tell() -> None:
    node = NoticedNode()
    node.on_record(FINAL)
    assert (node.watch.due, node.read(), node.watch.ended()) == (None, None, None)
    node.on_record(replace(NOTICED, status=Status.FROZEN))
    assert node.pages.told == []


def test_a_notice_that_leaves_less_time_is_told_and_one_that_leaves_more_is_not() -> None:
    node = NoticedNode("SIGUSR1")
    began = node.clock.now
    node.on_record(NOTICED)
    node.on_record(replace(NOTICED, number=7))
    node.clock.now += 3
    node.on_record(AGREED)
    node.clock.now += 7
    node.on_record(replace(AGREED, number=8, notice=RunNotice("SIGTERM on n1", 15.0, step=30)))
    node.clock.now += 1
    node.on_record(replace(AGREED, number=9, notice=RunNotice("another", 40.0, step=30)))
    told = [(deadline - began, step) for deadline, step in node.pages.told]
    assert told == [(60, STEP_PENDING), (60, 30), (25, 30), (25, 30)]
    assert node.sent == [signal.SIGUSR1] * 2, "once to each"


def test_a_worker_that_does_not_catch_the_signal_yet_gets_it_when_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    node = NoticedNode("SIGUSR1")
    node.deaf = {1}
    node.on_record(NOTICED)
    node.read(after=0.2)
    node.on_record(AGREED)
    node.read(after=1.0)
    assert node.sent == [signal.SIGUSR1], "to the other one, once"
    node.deaf = set()
    node.read(after=0.2)
    node.read(after=0.2)
    assert node.sent == [signal.SIGUSR1] * 2
    assert caplog.messages == ["no process of rank 1 catches SIGUSR1: it is sent when one does"]


def test_the_node_says_where_its_workers_stand_and_how_fast_they_are() -> None:
    node = NoticedNode()
    node.on_record(NOTICED)
    assert node.read() is None
    node.pages.put(1, step=14)
    assert node.read(after=0.5) is None
    node.pages.put(1, step=15)
    reply = node.read(after=0.5)
    assert (reply.round, reply.status) == (2, PreemptionStatus(heeds=True, step=15, rate=5.0))


@pytest.mark.parametrize("by_signal", [False, True])
def test_workers_that_tell_no_steps_are_not_measured(by_signal: bool) -> None:
    """Each one is sent its signal once, and that counts as heeding."""
    node = NoticedNode("SIGUSR1" if by_signal else "")
    for rank in range(2):
        node.pages.put(rank, step=None, asks_for_notices=rank == 1 and not by_signal)
    node.on_record(NOTICED)
    node.on_record(replace(NOTICED, number=7))
    assert node.read().status == PreemptionStatus(heeds=True, step=NO_STEP)
    assert node.sent == [signal.SIGUSR1] * (2 * by_signal)


def noted() -> NoticedNode:
    node = NoticedNode()
    node.pages.put(0, checkpoints=3)
    node.on_record(NOTICED)
    node.read()
    assert node.read(after=1.0).status is not None
    return node


def agreed() -> NoticedNode:
    node = noted()
    node.on_record(AGREED)
    return node


SAVED = {"checkpoints": 1, "saved_step": 30}


def test_the_node_has_saved_when_all_its_workers_have() -> None:
    node = noted()
    node.pages.put(0, checkpoints=4, saved_step=30)
    node.pages.put(1, **SAVED)
    assert node.read(after=1.0) is None, "not before the step is agreed: it was another checkpoint"
    node = agreed()
    assert node.read(after=1.0) is None
    assert node.read(running=()) is None, "all have ended: `ended` says why"
    node.pages.put(1, **SAVED)
    assert node.read(after=1.0) is None
    node.pages.put(0, checkpoints=4, saved_step=31)
    reply = node.read(after=1.0)
    assert (reply.round, reply.status) == (2, None)
    assert node.watch.due is None, "there is no more to say"


@pytest.mark.parametrize(
    ("first", "second", "running"),
    [
        ({}, SAVED, (1,)),  # it has ended
        ({"asks_for_notices": False}, SAVED, (0, 1)),
        ({"checkpoints": 4, "saved_step": 30}, {"step": None, "checkpoints": 1}, (0, 1)),  # without steps any will do
    ],
)
def test_a_worker_that_can_save_no_such_step_is_not_waited_for(
    first: dict[str, Any], second: dict[str, Any], running: tuple[int, ...]
) -> None:
    node = agreed()
    node.pages.put(0, **first)
    node.pages.put(1, **second)
    assert node.read(after=1.0, running=running).status is None


@pytest.mark.parametrize("early", [10, 29, None])
def test_a_checkpoint_of_an_earlier_step_or_of_none_is_not_the_one_that_is_waited_for(
    early: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = agreed()
    node.pages.put(0, checkpoints=4, saved_step=30)
    node.pages.put(1, checkpoints=1, saved_step=early)
    assert node.read(after=1.0) is None
    assert node.read(after=1.0) is None
    (line,) = caplog.messages
    assert "rank 1" in line
    assert "step 30 is waited for" in line
    node.pages.put(1, checkpoints=2, saved_step=30)
    assert node.read(after=1.0).status is None


def test_a_worker_that_heeds_the_signal_alone_saves_where_it_stands() -> None:
    node = NoticedNode("SIGUSR1")
    for rank in range(2):
        node.pages.put(rank, asks_for_notices=False)
    node.on_record(NOTICED)
    node.read()
    node.read(after=1.0)
    node.on_record(AGREED)
    node.pages.put(0, checkpoints=1, saved_step=10)
    node.pages.put(1, checkpoints=1, saved_step=7)
    assert node.read(after=1.0) is None, "begun before the signal"
    node.pages.put(1, checkpoints=2, saved_step=12)
    assert node.read(after=1.0).status is None


def test_workers_that_end_because_of_it_have_saved_and_others_were_ready() -> None:
    node = noted()
    assert node.watch.ended() is None
    node.pages.put(1, has_notice=True)
    reply = node.watch.ended()
    assert (reply.round, reply.status) == (2, None)
    assert node.watch.ended() is None, "once"


def test_a_signal_that_no_worker_got_has_ended_none() -> None:
    node = NoticedNode("SIGUSR1")
    node.deaf = {0, 1}
    node.on_record(NOTICED)
    node.read(after=0.2)
    assert node.watch.ended() is None
    node.deaf = {0}
    node.read(after=0.2)
    assert node.watch.ended() is not None, "one of them has got it"


@pytest.mark.parametrize(
    ("is_signalled", "has_notice", "step", "total", "expected"),
    [
        (False, False, None, None, False),
        (False, False, 10, 500, False),
        (False, True, 10, None, True),
        (False, True, 10, 500, True),
        (True, False, None, None, True),
        (True, False, 10, 500, True),
        # Steps may be numbered from 0 or from 1: with step 499 one step may be missing.
        (True, False, 499, 500, True),
        (True, True, 500, 500, False),
        (False, True, 500, 500, False),
        (False, True, None, 500, True),
    ],
)
def test_why_a_worker_ended_with_0(
    is_signalled: bool, has_notice: bool, step: int | None, total: int | None, expected: bool
) -> None:
    beat = RankBeat(rank=0, local_rank=0, section="step", at=0.0, step=step, total=total, has_notice=has_notice)
    assert ended_by_notice(beat, is_signalled=is_signalled) is expected


def test_a_worker_that_has_ended_did_not_get_the_signal() -> None:
    """Else its end with 0 would count as a save under the notice."""
    ended: Any = SimpleNamespace(running_pids={})
    assert LocalWorkers.send(ended, signal.SIGUSR1, {0: 5, 1: 6}) == [0, 1]
