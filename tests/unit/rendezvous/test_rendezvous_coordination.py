"""The thread that talks to the store: stepped at once when asked or notified, told of through a descriptor."""

from __future__ import annotations

import errno
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.codec import to_json
from hpc_elastic.base.loop import is_refusal
from hpc_elastic.rendezvous.cluster_view import PendingNotifications
from hpc_elastic.rendezvous.coordination import ALONE_SECONDS, Coordination, RefusalWatch
from hpc_elastic.rendezvous.membership import BeatPlan
from hpc_elastic.rendezvous.schedule import Lease, poll_intervals
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.control_events import RunClosed
from hpc_elastic.run.events import Note
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import StoreError, StoreFullError
from hpc_elastic.store.notifier import Notifier
from tests.rigs.fake_clock import FakeClock

RECORD = RoundRecord(number=1, epoch="e", term=1, leader="a", round=0, status=Status.JOINABLE)
HOME = "127.0.0.1"
LONG = 1000.0
"""Seconds until the next step, where nothing comes before."""


class Stepped:
    """A participant's place: counts its steps, does what a test wants in them."""

    def __init__(self, do: Callable[[int], float | None] | None = None) -> None:
        self.detector = self
        self.steps = 0
        self.asked: list[str] = []
        self.notified: list[bool] = []
        self.hearing: dict[bool | None, set[str]] = {True: set(), False: set(), None: set()}
        self.known = {""}
        self._do = do
        self.beaten_to: list[tuple[str, int]] = []
        self.heard_of: set[str] = set()
        self.notifications = PendingNotifications()
        self.muted = 0.0
        self.looks: list[float] = []
        self.refused_looks = 0
        self.changed = threading.Condition()

    intervals = poll_intervals(RendezvousSettings(beat_interval=0.001))
    looks_when_asked = False
    waits_to_speak = False
    has_unwritten_record = False

    def beat_to_files(self) -> None:
        pass

    def look_past_caches(self) -> None:
        self.looks.append(time.monotonic())
        if len(self.looks) <= self.refused_looks:
            raise OSError("stale file handle")

    def step(self, *, notified: bool) -> float:
        with self.changed:
            self.steps += 1
            self.notified.append(notified)
            self.changed.notify_all()
        delay = self._do(self.steps) if self._do else None
        return LONG if delay is None else delay

    def heard(self, uids: Iterable[str], *, hears_us: bool | None) -> None:
        with self.changed:
            self.heard_of |= set(uids)
            self.hearing[hears_us] |= set(uids)
            self.changed.notify_all()

    def note_newest(self, keys: Iterable[str]) -> bool:
        return bool(set(keys) - self.known)

    def packets_dropped_for(self, seconds: float) -> None:
        with self.changed:
            self.muted += seconds
            self.changed.notify_all()

    def beats(self) -> BeatPlan:
        return BeatPlan(about="log/9", heard=tuple(self.beaten_to), unheard=tuple(self.beaten_to))

    def until(self, steps: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.steps >= steps, 10), f"{self.steps} of {steps} steps"


class Started:
    """What a test gets: a coordination that runs, and its participant."""

    def __init__(self, coordination: Coordination, participant: Stepped, notifier: Notifier | None) -> None:
        self.coordination = coordination
        self.participant = participant
        self.notifier = notifier

    @property
    def port(self) -> int:
        assert self.notifier is not None
        return self.notifier.port

    def notices(self) -> list[Any]:
        ready, _, _ = select.select([self.coordination], [], [], 10)
        assert ready, "nothing was told"
        return self.coordination.take()


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    made: list[Coordination] = []
    notifiers: list[Notifier] = []

    def build(do: Callable[[int], float | None] | None = None, *, notifier: bool = False) -> Started:
        participant = Stepped(do)
        notifier = Notifier(secret=b"s", run_uid="r", uid="a", host=HOME) if notifier else None
        notifiers.extend([notifier] if notifier else [])
        coordination = Coordination(lambda _: participant, notifier=notifier, clock=SystemClock())  # type: ignore[arg-type,return-value]
        made.append(coordination)
        coordination.start()
        participant.until(1)
        return Started(coordination, participant, notifier)

    yield build
    for coordination in made:
        assert coordination.stop(within=10)
    for notifier in notifiers:
        notifier.close()


@pytest.fixture
def other() -> Iterator[Notifier]:
    """Another node's notifier."""
    notifier = Notifier(secret=b"s", run_uid="r", uid="b", host=HOME)
    yield notifier
    notifier.close()


def test_what_is_asked_is_done_in_order_before_the_next_step(start: Callable[..., Started]) -> None:
    done: list[tuple[str, int]] = []
    running = start()
    participant = running.participant
    for word in "abc":
        running.coordination.ask(lambda p, word=word: done.append((word, p.steps)))  # type: ignore[attr-defined,misc]
    participant.until(2)
    running.coordination.stop(within=10)
    assert [word for word, _ in done] == ["a", "b", "c"]


CLOSED = RunClosed(round=0, outcome="failed")


def test_what_is_told_comes_through_a_descriptor_in_order(start: Callable[..., Started]) -> None:
    running = start()
    ready, _, _ = select.select([running.coordination], [], [], 0)
    assert not ready
    running.coordination.on_record(RECORD)
    running.coordination.on_event(CLOSED)
    assert running.notices() == [RECORD, CLOSED]
    assert running.coordination.take() == []
    ready, _, _ = select.select([running.coordination], [], [], 0)
    assert not ready


def test_ten_thousand_notices_block_nobody(start: Callable[..., Started]) -> None:
    """Nobody takes them while the main loop is busy."""
    running = start()
    for _ in range(10_000):
        running.coordination.on_event(CLOSED)
    for _ in range(10_000):
        running.coordination.ask(lambda p: None)
    assert len(running.notices()) == 10_000


def test_a_notification_brings_the_next_step_at_once(start: Callable[..., Started], other: Notifier) -> None:
    running = start(notifier=True)
    for steps in (2, 3):
        other.notify([(HOME, running.port)], f"log/{steps}")
        running.participant.until(steps)
    assert running.participant.notifications.keys == {"log/2", "log/3"}


def test_forged_notifications_bring_none(start: Callable[..., Started]) -> None:
    """Or anybody on the network could have a thousand agents list folders without end."""
    running = start(notifier=True)
    assert running.notifier is not None
    forger = Notifier(secret=b"other", run_uid="r", uid="b", host=HOME)
    try:
        for count in range(1, 6):
            forger.notify([(HOME, running.port)])
            deadline = time.monotonic() + 10
            while running.notifier.rejections.total() < count:
                assert time.monotonic() < deadline, "the datagram was not taken in"
                time.sleep(0.001)
        assert running.participant.steps == 1
        running.coordination.ask(lambda p: None)
        running.participant.until(2)
    finally:
        forger.close()


def test_without_a_notification_the_participant_says_when(start: Callable[..., Started]) -> None:
    running = start(lambda steps: 0.001 if steps < 20 else None)
    running.participant.until(20)


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), StoreFullError(root="/store", why="No space left on device")]
)
def test_a_passing_fault_and_a_full_disk_are_waited_for(
    start: Callable[..., Started], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(steps: int) -> float | None:
        if steps < 5:
            raise error
        return None

    running = start(refuse)
    running.participant.until(5)
    assert running.coordination.take() == []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [StoreError(root="/store", why="no space"), RuntimeError("a defect")])
def test_what_ends_the_thread_is_told(start: Callable[..., Started], error: Exception) -> None:
    def fail(steps: int) -> float | None:
        if steps == 2:
            raise error
        return None

    running = start(fail)
    running.coordination.ask(lambda p: None)
    assert running.notices() == [error]
    assert running.coordination.stop(within=10)
    assert running.participant.steps == 2


def test_an_error_in_what_was_asked_is_told_too(start: Callable[..., Started]) -> None:
    running = start()

    def defect(_: object) -> None:
        raise KeyError("a defect")

    running.coordination.ask(defect)
    (told,) = running.notices()
    assert isinstance(told, KeyError)


def test_a_participant_that_can_not_be_made_yet_is_tried_again() -> None:
    tries: list[int] = []
    participant = Stepped()

    def make(_: Coordination) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(116, "Stale file handle")
        return participant

    coordination = Coordination(make, notifier=None, clock=SystemClock())
    coordination.start()
    participant.until(1)
    assert coordination.stop(within=10)
    assert len(tries) == 3


def test_stopping_does_what_was_asked_for_first(start: Callable[..., Started]) -> None:
    done = []
    running = start()
    running.coordination.ask(lambda p: done.append("last word"))
    assert running.coordination.stop(within=10)
    assert done == ["last word"]
    assert running.coordination.stop(within=10), "again"
    never_started = Coordination(lambda _: Stepped(), notifier=None, clock=SystemClock())  # type: ignore[arg-type,return-value]
    assert never_started.stop(within=1)


def test_last_words_are_tried_again_where_the_filesystem_refuses_once(start: Callable[..., Started]) -> None:
    stopping = threading.Event()
    refused = []

    def refuse(_: int) -> float | None:
        if stopping.is_set() and len(refused) < 2:
            refused.append(1)
            raise OSError(5, "Input/output error")
        return None

    running = start(refuse)
    stopping.set()
    running.coordination.ask(lambda p: None)
    assert running.coordination.stop(within=10)
    assert len(refused) == 2
    assert running.participant.steps >= 4, "a step that worked came after the refused ones"


def test_a_disk_that_stays_full_is_given_up_after_ten_minutes() -> None:
    class Fast(SystemClock):
        def monotonic(self) -> float:
            return super().monotonic() * 10_000

    def refuse(_: int) -> float | None:
        raise full

    full = StoreFullError(root="/store", why="No space left on device")
    participant = Stepped(refuse)
    coordination = Coordination(lambda _: participant, notifier=None, clock=Fast())  # type: ignore[arg-type,return-value]
    coordination.start()
    assert Started(coordination, participant, None).notices() == [full]
    assert participant.steps > 1


def test_a_hung_filesystem_is_not_waited_for(start: Callable[..., Started]) -> None:
    hung, thaw = threading.Event(), threading.Event()

    def hang(steps: int) -> float | None:
        if steps == 2:
            hung.set()
            thaw.wait(30)
        return None

    running = start(hang)
    running.coordination.ask(lambda p: None)
    assert hung.wait(10)
    assert running.coordination.stop(within=0.05) is False
    thaw.set()


def test_a_beat_is_passed_on_and_ends_no_wait(start: Callable[..., Started], other: Notifier) -> None:
    running = start(notifier=True)
    other.beat([(HOME, running.port)])
    participant = running.participant
    with participant.changed:
        assert participant.changed.wait_for(lambda: participant.heard_of == {"b"}, 10)
    assert participant.steps == 1


def test_beats_go_on_while_a_step_hangs(other: Notifier) -> None:
    """A mount that does not answer must not make its node silent."""
    release = threading.Event()
    participant = Stepped(lambda n: None if n == 1 else (release.wait(20), None)[1])
    participant.beaten_to = [(HOME, other.port)]
    notifier = Notifier(secret=b"s", run_uid="r", uid="a", host=HOME)
    coordination = Coordination(
        lambda _: participant,  # type: ignore[arg-type,return-value]
        notifier=notifier,
        clock=SystemClock(),
        beat_interval=0.02,
    )
    try:
        coordination.start()
        participant.until(1)
        coordination.ask(lambda _: None)
        participant.until(2)  # hangs from here on
        other.drain()
        alive: set[str] = set()
        for _ in range(3):
            select.select([other], [], [], 10)
            alive |= other.drain().alive
        assert alive == {"a"}
    finally:
        release.set()
        coordination.stop(within=10)
        notifier.close()


def test_what_a_filesystem_refuses_is_tried_again(start: Callable[..., Started]) -> None:
    tries: list[int] = []
    done = threading.Event()

    def command(_: Any) -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise OSError("stale file handle")
        done.set()

    start().coordination.ask(command)
    assert done.wait(10)
    assert tries == [0, 1, 2]


def test_a_gap_or_a_question_of_a_worker_has_the_record_read_past_caches_before_the_lease_holds_again() -> None:
    participant = Stepped()
    participant.intervals = poll_intervals(RendezvousSettings(heartbeat_ttl=0.5, beat_interval=0.02))
    clock, shown, (questions, ask) = FakeClock(), [(0, 0)], os.pipe2(os.O_NONBLOCK)
    clock.wait = lambda stop, seconds: stop.wait(seconds)  # type: ignore[method-assign]
    lease = Lease(clock, uid="a", node=0, questions=questions)
    lease.set_intervals(participant.intervals, has_beats=True)
    notifier = Notifier(secret=b"s", run_uid="r", uid="a", host=HOME)
    coordination = Coordination(
        lambda _: participant,  # type: ignore[arg-type,return-value]
        notifier=notifier,
        clock=clock,
        beat_interval=0.02,
        lease=lease,
    )
    lease.begin(0, lambda *values: shown.append(values))

    def left() -> float:
        return shown[-1][0] / 1e9 - clock.now

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert condition()

    try:
        coordination.start()
        wait_for(lambda: left() > 0)
        assert not participant.looks
        participant.refused_looks = 2
        clock.now += 60
        wait_for(lambda: left() > 0)
        assert len(participant.looks) == 3
        os.write(ask, b"?")
        wait_for(lambda: len(participant.looks) == 4 and shown[-1][1] == clock.now * 1e9)
    finally:
        coordination.stop(within=10)
        notifier.close()
        os.close(questions)
        os.close(ask)


# -- a filesystem that refuses: since when, with what, and whether it refuses the others too


EACCES = OSError(errno.EACCES, "Permission denied", b"/runs/store/hb/1")
PEER = {"b"}
REFUSED, FINE = frozenset({"b"}), frozenset[str]()


@pytest.mark.parametrize(
    ("is_one", "numbers"),
    [
        (True, [errno.EACCES, errno.EPERM, errno.ESTALE, errno.EIO, errno.EKEYEXPIRED]),
        (False, [errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EEXIST]),
    ],
)
def test_which_errors_are_refusals(is_one: bool, numbers: list[int]) -> None:
    assert [is_refusal(OSError(number, "no")) for number in numbers] == [is_one] * 5


def test_a_time_of_refusal_begins_once_and_ends() -> None:
    watch = RefusalWatch()
    assert watch.refused(EACCES, 10.0, 1_000)
    assert not watch.refused(OSError(errno.EIO, "Input/output error"), 12.0, 3_000)
    assert watch.now is not None
    assert str(watch.now) == "Permission denied (/runs/store/hb/1)"
    ended = watch.answered()
    assert ended is not None
    assert to_json(ended.to_event(35.0, over=True)) == {
        "event": "filesystem_refused",
        "error": "Permission denied",
        "path": "/runs/store/hb/1",
        "since_ns": 1_000,
        "seconds": 25.0,
        "over": True,
    }
    assert watch.answered() is None


FULL = StoreFullError(root="/runs/store", why="can't create x")
FULL.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(FULL, "Disk quota exceeded (/runs/store)", id="a quota"),
        pytest.param(
            OSError(errno.EACCES, "Permission denied", b"12 the text", None, b"/runs/store/log/1"),
            "Permission denied (/runs/store/log/1)",
            id="a link, by its path and not by its text",
        ),
    ],
)
def test_what_was_refused_is_named(error: Exception, said: str) -> None:
    watch = RefusalWatch()
    watch.refused(error, 0.0, 0)
    assert str(watch.now) == said


def test_the_limit_of_open_files_is_no_refusal_of_the_filesystem() -> None:
    watch = RefusalWatch()
    watch.refused(OSError(errno.EMFILE, "Too many open files", "/runs/store/hb/1"), 0.0, 0)
    assert watch.now is not None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reason = f"no file could be opened for 12 s: open files: an agent may have {limit} (ulimit -Hn)"
    assert watch.now.to_event(12.0, over=True) == Note(subject="health_warning", text="descriptors", reason=reason)


def alone(*beats: tuple[float, frozenset[str]], at: float) -> bool:
    """Refused since 0; the beats of a peer, and whether this process is alone with it then."""
    watch = RefusalWatch()
    watch.refused(EACCES, 0.0, 0)
    for when, refused in beats:
        watch.heard(PEER, refused, when)
    return watch.is_alone(at)


def test_it_is_alone_where_a_peer_is_not_refused_for_a_while() -> None:
    beats = [(float(second), FINE) for second in range(12)]
    assert alone(*beats, at=11.0)
    assert not alone(*beats[:9], at=8.0), "a peer may be late to notice"
    assert not alone(at=60.0), "nobody says how it fares"
    assert not alone(*beats[:5], at=60.0), "the peer has not been heard for long"


def test_it_is_not_alone_with_a_peer_that_was_refused_a_moment_ago() -> None:
    beats = [*((float(s), REFUSED) for s in range(30)), *((float(s), FINE) for s in range(30, 45))]
    assert not alone(*beats[:34], at=33.0)
    assert alone(*beats, at=29.0 + ALONE_SECONDS + 2.0)


def test_a_peer_that_is_refused_now_is_news_once() -> None:
    watch = RefusalWatch()
    assert not watch.heard(PEER, FINE, 0.0)
    assert watch.heard(PEER, REFUSED, 1.0)
    assert not watch.heard(PEER, REFUSED, 2.0)
    assert not watch.heard({"c"}, FINE, 2.5)
    assert not watch.heard(PEER, REFUSED, 3.0)
    assert not watch.heard(PEER, FINE, 4.0)
    assert watch.heard(PEER, REFUSED, 5.0)
