from __future__ import annotations

import math
import os
import resource
import socket
import time
from functools import partial

import pytest

from hpc_elastic.base.loop import Inbox, Waker, seconds_until, start_thread, wait_readable
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
