"""What a worker learns of a notice, from the page that its agent writes into."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc_elastic
from hpc_elastic.worker_api import heartbeat, preemption
from hpc_elastic.worker_api.records import (
    FILE_BYTES,
    NO_STEP,
    STEP_PENDING,
    VARIABLE,
    NoticeRecord,
    empty_file,
    pack_notice,
    read_notice,
    read_record,
)
from tests.rigs.heartbeat_page import said, write_record
from tests.rigs.waiting import until


def tell(page: Path, *, step: int, serial: int = 1, seconds: float = 60.0) -> None:
    deadline = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)
    offset, raw = pack_notice(NoticeRecord(serial=serial, deadline_ns=deadline, step=step))
    with open(page, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(raw)


def test_all_save_after_the_step_that_is_agreed(page: Path) -> None:
    assert not hpc_elastic.should_checkpoint(6)
    assert hpc_elastic.preemption_notice() is None
    tell(page, step=STEP_PENDING)
    assert not hpc_elastic.should_checkpoint(7), "it is being agreed on"
    notice = hpc_elastic.preemption_notice()
    assert (notice.step, notice.is_agreed) == (None, False)
    tell(page, step=9, serial=2)
    assert [hpc_elastic.should_checkpoint(step) for step in (8, 9, 10)] == [False, True, True]
    notice = hpc_elastic.preemption_notice()
    assert notice.step == 9
    assert 58 < notice.seconds_left <= 60


def test_where_no_step_is_agreed_it_is_due_at_once(page: Path) -> None:
    tell(page, step=NO_STEP, seconds=-5)
    assert hpc_elastic.should_checkpoint(0)
    notice = hpc_elastic.preemption_notice()
    assert (notice.step, notice.seconds_left) == (None, 0.0)


def test_the_agent_learns_who_asks_and_who_has_been_told(page: Path) -> None:
    hpc_elastic.preemption_notice()
    assert said(page).section == "setup", "asking alone does not end it"
    assert (said(page).asks_for_notices, said(page).has_notice) == (True, False)
    hpc_elastic.heartbeat(1)
    count = said(page).count
    hpc_elastic.preemption_notice()
    assert said(page).count == count, "once"
    tell(page, step=4)
    hpc_elastic.preemption_notice()
    assert (said(page).has_notice, said(page).step) == (True, 1)


def test_a_script_that_is_not_asked_to_save_yet_has_not_been_told(page: Path) -> None:
    """One that ends with 0 then has done all that it had to do."""
    tell(page, step=9)
    assert not hpc_elastic.should_checkpoint(8)
    assert (said(page).asks_for_notices, said(page).has_notice) == (True, False)
    assert hpc_elastic.should_checkpoint(9)
    assert said(page).has_notice


def test_a_callback_that_is_not_called_yet_has_told_nothing(page: Path, watch: preemption._Watch) -> None:
    calls: list[int | None] = []
    hpc_elastic.on_preemption(lambda notice: calls.append(notice.step))
    tell(page, step=STEP_PENDING)
    time.sleep(0.02)
    assert not said(page).has_notice
    tell(page, step=9, serial=2)
    until(lambda: bool(calls))
    assert said(page).has_notice


def test_a_look_at_the_notice_tells_the_agent_nothing(page: Path) -> None:
    """And leaves the page for the process that speaks for this worker."""
    before = page.read_bytes()
    assert not heartbeat.notice_is_there()
    tell(page, step=STEP_PENDING)
    assert heartbeat.notice_is_there()
    assert read_record(page.read_bytes()) == read_record(before)
    assert heartbeat.reporter._lock_fd < 0
    assert not heartbeat.reporter.asks_for_notices
    hpc_elastic.preemption_notice()
    assert heartbeat.reporter.asks_for_notices
    page.unlink()
    assert not heartbeat.notice_is_there()


def test_it_is_a_heartbeat_too_and_refuses_what_that_refuses(page: Path) -> None:
    hpc_elastic.should_checkpoint(3)
    assert (said(page).step, said(page).section) == (3, "step")
    with pytest.raises(ValueError, match="step=-1 must be 0 or more"):
        hpc_elastic.should_checkpoint(-1)


# -- callbacks


@pytest.fixture
def watch(page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[preemption._Watch]:
    """Of this process, with nobody registered yet; its thread looks all the time."""
    monkeypatch.setattr(preemption, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(preemption, "_watch", watch := preemption._Watch())
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    yield watch
    monkeypatch.undo()  # its thread ends
    for thread in threading.enumerate():
        if thread.name == "hpc_elastic on_preemption":
            thread.join(10)


def test_a_callback_is_called_once_when_the_step_is_agreed(page: Path, watch: preemption._Watch) -> None:
    calls: list[tuple[int | None, str]] = []
    hpc_elastic.on_preemption(lambda notice: calls.append((notice.step, threading.current_thread().name)))
    assert said(page).asks_for_notices, "from then on it is waited for"
    tell(page, step=STEP_PENDING)
    assert calls == []
    tell(page, step=9, serial=2)
    until(lambda: bool(calls))
    tell(page, step=9, serial=3)
    late: list[int | None] = []
    hpc_elastic.on_preemption(lambda notice: late.append(notice.step))
    until(lambda: bool(late))
    assert late == [9], "one that comes after the notice hears of it too"
    assert calls == [(9, "hpc_elastic on_preemption")]


def test_a_callback_that_fails_or_was_taken_back_keeps_no_other_from_being_called(
    page: Path, watch: preemption._Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def fail(notice: object) -> None:
        raise RuntimeError("the disk is full")

    hpc_elastic.on_preemption(fail)
    take_back = hpc_elastic.on_preemption(lambda notice: calls.append("taken back"))
    take_back()
    take_back()
    hpc_elastic.on_preemption(lambda notice: calls.append("called"))
    tell(page, step=NO_STEP)
    until(lambda: bool(calls))
    assert calls == ["called"]
    assert "RuntimeError: the disk is full" in capsys.readouterr().err


def test_outside_of_a_run_there_is_never_a_notice_and_nothing_is_started(
    watch: preemption._Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(heartbeat, "reporter", heartbeat._Reporter())
    assert not hpc_elastic.should_checkpoint(3)
    assert hpc_elastic.preemption_notice() is None
    hpc_elastic.on_preemption(print)
    assert not watch._has_started


def test_the_signals_of_the_process_are_left_alone(page: Path, watch: preemption._Watch) -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    hpc_elastic.on_preemption(print)
    assert [signal.getsignal(number) for number in numbers] == before
    with pytest.raises(TypeError, match="must be callable, not str"):
        hpc_elastic.on_preemption("save")  # type: ignore[arg-type]


@given(st.integers(0, 31), st.integers(1, 255))
def test_a_notice_that_is_being_written_is_none(at: int, flip: int) -> None:
    raw = bytearray(empty_file())
    offset, text = pack_notice(NoticeRecord(serial=3, deadline_ns=5, step=7))
    raw[offset : offset + len(text)] = text
    assert read_notice(bytes(raw)) == NoticeRecord(serial=3, deadline_ns=5, step=7)
    raw[offset + at] ^= flip
    assert read_notice(bytes(raw)) is None


def test_the_page_has_room_for_all_of_it() -> None:
    offset, text = pack_notice(NoticeRecord(serial=1, deadline_ns=0, step=0))
    assert offset + len(text) <= FILE_BYTES
    raw = bytearray(empty_file())
    for count in (1, 2):
        write_record(raw, count=count, at_ns=1, step=1, pid=1, section=b"x" * 32, intervals=1, longest_ns=1)
    assert bytes(raw[offset:]) == bytes(FILE_BYTES - offset), "and no record is written over it"
    assert read_notice(b"") is None
