"""What a loop waits for; and the thread that waits for files, so that nobody else has to."""

from __future__ import annotations

import math
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.loop import (
    FileExecutor,
    FilesystemHangsError,
    Inbox,
    Waker,
    seconds_until,
    start_thread,
    wait_readable,
)
from hpc_elastic.run.agent_events import RoundFinal
from hpc_elastic.run.events import EventLog
from tests.rigs.event_pairs import read_events
from tests.rigs.fake_clock import FakeClock


def test_says_which_can_be_read() -> None:
    a, b = socket.socketpair()
    with a, b:
        assert wait_readable([a, b], 0) == set()
        b.send(b"x")
        assert wait_readable([a, b], 10) == {a.fileno()}
        assert wait_readable([a.fileno()], 10) == {a.fileno()}
        assert wait_readable([a], 365 * 86400.0) == {a.fileno()}, "the end of a job without a time limit"


def test_an_end_is_something_to_read() -> None:
    read, write = os.pipe()
    os.close(write)
    assert wait_readable([read], 10) == {read}
    os.close(read)


def test_gives_up_when_the_time_has_passed_and_not_before() -> None:
    began = time.monotonic()
    assert wait_readable([], 0.0104) == set()
    assert time.monotonic() - began >= 0.0104
    assert wait_readable([], -1) == set()


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1100, reason="no descriptor of that number here")
def test_takes_a_descriptor_that_select_does_not() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    read, write = os.pipe()
    high = 1099
    os.dup2(read, high)
    try:
        os.write(write, b"x")
        assert wait_readable([high], 10) == {high}
    finally:
        for fd in (read, write, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_waker_ends_a_wait_until_it_is_drained() -> None:
    waker = Waker()
    assert wait_readable([waker], 0) == set()
    for _ in range(100_000):  # never blocks, however often
        waker.wake()
    assert wait_readable([waker], 10) == {waker.fileno()}
    assert waker.peek()[:1] == b"\0"
    assert len(waker.drain()) > 0
    assert (waker.drain(), waker.peek()) == (b"", b"")
    os.write(waker.write_fd, b"\x0f")
    assert waker.drain() == b"\x0f"
    waker.close()
    waker.wake()


def test_the_first_of_several_times_ends_a_wait() -> None:
    clock = FakeClock(100.0)
    assert seconds_until([None, 103.0, 102.5], clock) == 2.5
    assert seconds_until([None, 103.0], clock, most=1.0) == 1.0
    assert seconds_until([99.0], clock) == 0.0
    assert seconds_until([None], clock) == math.inf


def test_what_other_threads_put_in_comes_out_in_order() -> None:
    inbox = Inbox[int]()
    for number in range(3):
        start_thread(partial(inbox.put, number))
        assert wait_readable([-1, inbox], math.inf) == {inbox.fileno()}
        assert inbox.take() == [number]
    assert (inbox.take(), wait_readable([inbox], 0)) == ([], set())


class Mount:
    """Answers when a test lets it."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def ask(self) -> str:
        self.answers.wait(60)
        return "answer"


@pytest.fixture
def mount() -> Iterator[Mount]:
    mount = Mount()
    yield mount
    mount.answers.set()


def test_what_fails_unawaited_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    files = FileExecutor()
    for _ in range(3):
        files.post(lambda: 1 / 0)
    assert files.close(10)
    (line,) = caplog.messages
    assert line.startswith("a file operation failed: ZeroDivisionError: division by zero (test_base_loop.py:")


def test_results_and_errors_come_back_in_order() -> None:
    files, seen = FileExecutor(), []
    files.post(lambda: seen.append(1))
    assert files.do(lambda: seen.append(2) or "two", within=10) == "two"
    assert seen == [1, 2]
    with pytest.raises(ZeroDivisionError):
        files.do(lambda: 1 / 0, within=10)
    assert files.settle(10)
    files.post(lambda: seen.append(3))
    assert files.close(10)
    assert seen == [1, 2, 3]
    assert FileExecutor().close(10)


def test_who_does_not_get_an_answer_hears_so_in_time_and_who_comes_later_sooner(mount: Mount) -> None:
    files = FileExecutor()
    began = time.monotonic()
    with pytest.raises(FilesystemHangsError, match="has not answered"):
        files.do(mount.ask, within=0.3)
    assert isinstance(FilesystemHangsError(), OSError)
    assert time.monotonic() - began < 5
    assert files.stuck_for() > 0.05
    began = time.monotonic()
    for _ in range(4):
        with pytest.raises(FilesystemHangsError):
            files.do(lambda: None, within=0.3)
    assert time.monotonic() - began < 1.0


def test_what_was_given_up_before_it_began_is_not_done(mount: Mount) -> None:
    files, done = FileExecutor(), []
    files.post(mount.ask)
    with pytest.raises(FilesystemHangsError):
        files.do(lambda: done.append("late"), within=0.05)
    mount.answers.set()
    assert files.do(lambda: "and on", within=10) == "and on"
    assert done == []


def test_waiting_ends_where_the_caller_has_other_worries(mount: Mount) -> None:
    worries = threading.Event()
    threading.Timer(0.1, worries.set).start()
    with pytest.raises(FilesystemHangsError):
        FileExecutor().do(mount.ask, within=60, unless=worries.is_set)


def test_events_are_written_when_the_disk_is_back_and_their_log_is_closed_in_time_where_it_hangs(
    tmp_path: Path, mount: Mount
) -> None:
    tmp_path.chmod(0o700)
    files = FileExecutor()
    files.post(mount.ask)
    events = EventLog(tmp_path, role="agent", host="h", node=0, uid="u", clock=SystemClock(), files=files)
    for index in range(5):
        events.write(RoundFinal(round=index))
    assert list(tmp_path.iterdir()) == []
    began = time.monotonic()
    events.close(within=0.1)
    assert time.monotonic() - began < 5
    mount.answers.set()
    assert files.close(10)
    assert [event["round"] for event in read_events(tmp_path)] == [0, 1, 2, 3, 4]


def test_what_may_wait_is_done_together_and_at_once_when_it_has_to_be() -> None:
    files, seen = FileExecutor(), []
    for number in range(3):
        files.post(lambda number=number: seen.append(number), after=60.0)
    assert files.do(lambda: list(seen), within=10) == []
    assert files.settle(10)
    assert seen == [0, 1, 2]
    files.post(lambda: seen.append(3), after=0.01)
    deadline = time.monotonic() + 10
    while len(seen) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert seen == [0, 1, 2, 3]
