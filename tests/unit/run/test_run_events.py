"""The event log: one writer, readers that meet anything, a full disk that loses nothing it can keep."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.run import events
from hpc_elastic.run.events import EventLog
from tests.rigs.event_pairs import event_of, read_events


class CountingClock:
    """Each look is a nanosecond later."""

    def __init__(self) -> None:
        self.now = 1000

    def monotonic(self) -> float:
        return float(self.now)

    def time_ns(self) -> int:
        self.now += 1
        return self.now

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        return stop.is_set()


def open_log(folder: Path, *, uid: str = "u1", role: str = "agent", node: int = 3) -> EventLog:
    return EventLog(folder, role=role, host="nid003", node=node, uid=uid, clock=CountingClock())


def names(tmp_path: Path) -> list[str]:
    return [event["event"] for event in read_events(tmp_path / "events")]


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_events_come_back_with_their_head_and_in_order(tmp_path: Path) -> None:
    assert names(tmp_path) == []
    log = open_log(tmp_path / "events")
    log.write(event_of("started", path=tmp_path, raw="\udcff"))  # what is no JSON becomes text
    log.write(event_of("worker_failed", message='two\nlines, "quoted", ünïcode'))
    log.close()
    log.close()
    head = {"v": 1, "host": "nid003", "node": 3, "role": "agent"}
    assert list(read_events(tmp_path / "events")) == [
        {**head, "t": 1001, "n": 0, "event": "started", "path": str(tmp_path), "raw": "\udcff"},
        {**head, "t": 1002, "n": 1, "event": "worker_failed", "message": 'two\nlines, "quoted", ünïcode'},
    ]


def test_each_writer_has_a_file_of_its_own_and_none_takes_another_s(tmp_path: Path) -> None:
    open_log(tmp_path / "events", uid="a").close()
    open_log(tmp_path / "events", uid="b").close()
    open_log(tmp_path / "events", uid="a", role="supervisor", node=-1).close()
    with pytest.raises(FileExistsError):
        open_log(tmp_path / "events", uid="a")
    assert len(os.listdir(tmp_path / "events")) == 3
    assert {os.stat(tmp_path / "events" / name).st_mode & 0o777 for name in os.listdir(tmp_path / "events")} == {0o600}


def test_a_full_disk_never_raises_and_the_lines_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path / "events")
    log.write(event_of("before"))
    with monkeypatch.context() as full:
        full.setattr(events.os, "pwrite", refusing(errno.ENOSPC))
        log.write(event_of("during", k=1))
        log.write(event_of("during", k=2))
        assert names(tmp_path) == ["before"]
    log.write(event_of("after"))
    log.close()
    found = [(event["n"], event["event"]) for event in read_events(tmp_path / "events")]
    assert found == [(0, "before"), (1, "during"), (2, "during"), (3, "after")]


def test_what_the_disk_drops_after_it_was_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS client does on a full disk: the write succeeds, and fsync tells that it did not."""
    log = open_log(tmp_path / "events")
    log.write(event_of("one"))
    pwrite = os.pwrite

    def into_the_cache(fd: int, data: bytes, offset: int) -> int:
        return pwrite(fd, bytes(len(data)), offset)

    with monkeypatch.context() as patched:
        patched.setattr(events.os, "pwrite", into_the_cache)
        patched.setattr(events.os, "fdatasync", refusing(errno.ENOSPC))
        log.write(event_of("two"))
        log.write(event_of("three"))
    log.write(event_of("four"))
    log.close()
    assert names(tmp_path) == ["one", "two", "three", "four"]
    (path,) = (tmp_path / "events").iterdir()
    assert b"\0" not in path.read_bytes()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_filesystem_without_fsync_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    offsets = []
    pwrite = os.pwrite

    def noted(fd: int, data: bytes, offset: int) -> int:
        offsets.append(offset)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(events.os, "fdatasync", refusing(number))
    monkeypatch.setattr(events.os, "pwrite", noted)
    log = open_log(tmp_path / "events")
    for name in ("one", "two"):
        log.write(event_of(name))
    log.close()
    assert names(tmp_path) == ["one", "two"]
    assert len(offsets) == 2


def test_a_line_that_was_cut_by_a_full_disk_is_written_again_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path / "events")
    pwrite = os.pwrite
    with monkeypatch.context() as full:
        full.setattr(events.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
        log.write(event_of("cut"))
        assert names(tmp_path) == []
    log.write(event_of("whole"))
    log.close()
    assert names(tmp_path) == ["cut", "whole"]


def test_what_a_long_full_disk_costs_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path / "events")
    with monkeypatch.context() as full:
        full.setattr(events.os, "pwrite", refusing(errno.EDQUOT))
        for k in range(1005):
            log.write(event_of("during", k=k))
    log.close()
    found = list(read_events(tmp_path / "events"))
    assert found[-1]["event"] == "events_dropped"
    kept = [e["k"] for e in found if e["event"] == "during"]
    assert found[-1]["text"] == f"{1005 - len(kept)} events lost: the disk was full"
    assert kept == list(range(1005 - len(kept), 1005))


def test_no_file_stays_open_between_two_lines(tmp_path: Path) -> None:
    """A process that is started meanwhile inherits none, and hangs with no mount that hangs."""
    log = open_log(tmp_path / "events", uid="a")
    log.write(event_of("worker_failed"))
    opened = {
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if int(name) > 2 and os.path.lexists(f"/proc/self/fd/{name}")
    }
    assert not [path for path in opened if path.startswith(f"{tmp_path}")]


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_of_ours_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    log = open_log(tmp_path / "events")
    log.write(event_of("one"))
    log.close()
    planted = tmp_path / "events" / "agent-00009-x.jsonl"
    line = b'{"event": "planted"}\n'
    writer = -1
    if kind == "fifo":
        os.mkfifo(planted)
        writer = os.open(planted, os.O_RDWR | os.O_NONBLOCK)
        os.write(writer, line)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(line)
        planted.symlink_to(tmp_path / "elsewhere")
    else:
        planted.mkdir()
    try:
        assert names(tmp_path) == ["one"]
    finally:
        if writer >= 0:
            os.close(writer)
