"""A notice on one node: what the workers are told, and what the node answers."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.heartbeats import RankBeat
from hpc_elastic.agent.local_workers import LocalWorkers
from hpc_elastic.agent.worker_reports import PreemptionWatch, ended_by_notice
from hpc_elastic.rendezvous.state import PreemptionStatus, RoundRecord, RunNotice, Status
from hpc_elastic.worker_api.records import NO_STEP, STEP_PENDING
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_record

FINAL = make_record()


NOTICE = RunNotice("SIGUSR2 on n0", 60.0)
NOTICED = replace(FINAL, number=6, notice=NOTICE)
AGREED = replace(FINAL, number=7, notice=replace(NOTICE, step=30))


class Pages:
    """Stands for `HeartbeatWatch`: two workers."""

    def __init__(self) -> None:
        self.told: list[tuple[float, int]] = []
        self.beats = [
            RankBeat(rank=n, local_rank=n, section="step", at=0.0, step=10, asks_for_notices=True) for n in range(2)
        ]

    def read(self) -> list[RankBeat]:
        return list(self.beats)

    def deliver_notice(self, *, deadline: float, step: int) -> None:
        self.told.append((deadline, step))

    def put(self, local_rank: int, **changes: Any) -> None:
        self.beats[local_rank] = replace(self.beats[local_rank], **changes)


class Node:
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


def test_without_a_notice_nobody_looks() -> None:
    node = Node()
    node.on_record(FINAL)
    assert node.watch.due is None
    assert node.read() is None
    assert node.watch.ended() is None


def test_a_notice_while_no_worker_runs_is_nothing_to_tell() -> None:
    node = Node()
    node.on_record(replace(NOTICED, status=Status.FROZEN))
    assert node.pages.told == []


def test_the_workers_are_told_twice_and_each_time_once() -> None:
    node = Node()
    began = node.clock.now
    node.on_record(NOTICED)
    node.on_record(replace(NOTICED, number=7))
    node.clock.now += 3
    node.on_record(AGREED)
    assert node.pages.told == [(began + 60, STEP_PENDING), (began + 60, 30)], "the deadline stays"


def test_a_notice_that_leaves_less_time_is_told_and_one_that_leaves_more_is_not() -> None:
    node = Node("SIGUSR1")
    began = node.clock.now
    node.on_record(NOTICED)
    node.on_record(AGREED)
    node.clock.now += 10
    node.on_record(replace(AGREED, number=8, notice=RunNotice("SIGTERM on n1", 15.0, step=30)))
    node.clock.now += 1
    node.on_record(replace(AGREED, number=9, notice=RunNotice("another", 40.0, step=30)))
    assert [deadline - began for deadline, _ in node.pages.told] == [60, 60, 25, 25]
    assert node.sent == [signal.SIGUSR1] * 2, "once to each"


def test_a_worker_that_does_not_catch_the_signal_yet_gets_it_when_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    node = Node("SIGUSR1")
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
    node = Node()
    node.on_record(NOTICED)
    assert node.read() is None
    node.pages.put(1, step=14)
    assert node.read(after=0.5) is None
    node.pages.put(1, step=15)
    reply = node.read(after=0.5)
    assert (reply.round, reply.status) == (2, PreemptionStatus(heeds=True, step=15, rate=5.0))


def test_workers_that_tell_no_steps_are_not_measured() -> None:
    node = Node()
    for rank in range(2):
        node.pages.put(rank, step=None, asks_for_notices=rank == 1)
    node.on_record(NOTICED)
    assert node.read().status == PreemptionStatus(heeds=True, step=NO_STEP)


def test_a_signal_counts_as_heeding() -> None:
    node = Node("SIGUSR1")
    for rank in range(2):
        node.pages.put(rank, step=None, asks_for_notices=False)
    node.on_record(NOTICED)
    node.on_record(replace(NOTICED, number=7))
    assert node.read().status.heeds
    assert node.sent == [signal.SIGUSR1] * 2, "once to each"


def noted() -> Node:
    node = Node()
    node.pages.put(0, checkpoints=3)
    node.on_record(NOTICED)
    node.read()
    assert node.read(after=1.0).status is not None
    return node


def agreed() -> Node:
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
    node = Node("SIGUSR1")
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
    assert reply is not None
    assert (reply.round, reply.status) == (2, None)
    assert node.watch.ended() is None, "once"


def test_a_signal_that_no_worker_got_has_ended_none() -> None:
    node = Node("SIGUSR1")
    node.deaf = {0, 1}
    node.on_record(NOTICED)
    node.read(after=0.2)
    assert node.watch.ended() is None
    node.deaf = {0}
    node.read(after=0.2)
    assert node.watch.ended() is not None, "one of them has got it"


def test_workers_that_have_all_ended_save_no_more() -> None:
    node = agreed()
    assert node.read(after=1.0, running=()) is None, "`ended` says why they ended"


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
