"""What a worker learns of a notice, from the page that its agent writes into."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc_elastic
from hpc_elastic import worker_heartbeat
from hpc_elastic.heartbeat_record import (
    FILE_BYTES,
    NO_STEP,
    STEP_PENDING,
    VARIABLE,
    HeartbeatRecord,
    NoticeRecord,
    empty_file,
    pack_notice,
    read_notice,
    read_record,
)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a worker that is this process."""
    path = tmp_path / "page"
    path.write_bytes(empty_file())
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(worker_heartbeat, "_speaker", worker_heartbeat._Speaker())
    yield path
    if worker_heartbeat._speaker._lock_fd >= 0:
        os.close(worker_heartbeat._speaker._lock_fd)


def tell(page: Path, *, step: int, serial: int = 1, seconds: float = 60.0) -> None:
    deadline = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)
    offset, raw = pack_notice(NoticeRecord(serial=serial, deadline_ns=deadline, step=step))
    with open(page, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(raw)


def said(page: Path) -> HeartbeatRecord:
    record = read_record(page.read_bytes())
    assert record is not None
    return record


def test_all_save_after_the_step_that_is_agreed(page: Path) -> None:
    assert not hpc_elastic.should_checkpoint(6)
    assert hpc_elastic.preemption_notice() is None
    tell(page, step=STEP_PENDING)
    assert not hpc_elastic.should_checkpoint(7), "it is being agreed on"
    notice = hpc_elastic.preemption_notice()
    assert notice is not None
    assert (notice.step, notice.is_agreed) == (None, False)
    tell(page, step=9, serial=2)
    assert [hpc_elastic.should_checkpoint(step) for step in (8, 9, 10)] == [False, True, True]
    notice = hpc_elastic.preemption_notice()
    assert notice is not None
    assert notice.step == 9
    assert 58 < notice.seconds_left <= 60


def test_where_no_step_is_agreed_it_is_due_at_once(page: Path) -> None:
    tell(page, step=NO_STEP, seconds=-5)
    assert hpc_elastic.should_checkpoint(0)
    notice = hpc_elastic.preemption_notice()
    assert notice is not None
    assert (notice.step, notice.seconds_left) == (None, 0.0)


def test_the_agent_learns_who_asks_and_who_has_been_told(page: Path) -> None:
    hpc_elastic.heartbeat(1)
    assert not said(page).heeds_notices
    hpc_elastic.preemption_notice()
    assert (said(page).heeds_notices, said(page).is_told, said(page).step) == (True, False, 1)
    count = said(page).count
    hpc_elastic.preemption_notice()
    assert said(page).count == count, "once"
    tell(page, step=4)
    hpc_elastic.preemption_notice()
    assert said(page).is_told


def test_asking_alone_does_not_end_the_setup(page: Path) -> None:
    hpc_elastic.preemption_notice()
    assert said(page).section == "setup"


def test_it_is_a_heartbeat_too_and_refuses_what_that_refuses(page: Path) -> None:
    hpc_elastic.should_checkpoint(3)
    assert (said(page).step, said(page).section) == (3, "step")
    with pytest.raises(ValueError, match="step=-1 must be 0 or more"):
        hpc_elastic.should_checkpoint(-1)


def test_outside_of_a_run_there_is_never_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(worker_heartbeat, "_speaker", worker_heartbeat._Speaker())
    assert not hpc_elastic.should_checkpoint(3)
    assert hpc_elastic.preemption_notice() is None


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
        worker_heartbeat.write_record(
            raw, count=count, at_ns=1, step=1, pid=1, section=b"x" * 32, intervals=1, longest_ns=1
        )
    assert bytes(raw[offset:]) == bytes(FILE_BYTES - offset), "and no record is written over it"
    assert read_notice(b"") is None
