"""The thread that waits for files, so that nobody else has to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.loop import FileExecutor, FilesystemHangsError
from hpc_elastic.run.agent_events import RoundFinal
from hpc_elastic.run.events import EventLog
from tests.rigs.event_pairs import read_events


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
    assert line.startswith("a file operation failed: ZeroDivisionError: division by zero (test_base_file_executor.py:")


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


def test_who_does_not_get_an_answer_hears_so_in_time(mount: Mount) -> None:
    files = FileExecutor()
    began = time.monotonic()
    with pytest.raises(FilesystemHangsError, match="has not answered"):
        files.do(mount.ask, within=0.1)
    assert isinstance(FilesystemHangsError(), OSError)
    assert time.monotonic() - began < 5
    assert files.stuck_for() > 0.05


def test_who_comes_later_does_not_wait_as_long_again(mount: Mount) -> None:
    files = FileExecutor()
    with pytest.raises(FilesystemHangsError):
        files.do(mount.ask, within=0.3)
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


def test_events_are_written_when_the_disk_is_back_and_nobody_waited(tmp_path: Path, mount: Mount) -> None:
    tmp_path.chmod(0o700)
    files = FileExecutor()
    files.post(mount.ask)
    events = EventLog(tmp_path, role="agent", host="h", node=0, uid="u", clock=SystemClock(), files=files)
    for index in range(5):
        events.write(RoundFinal(round=index))
    assert list(tmp_path.iterdir()) == []
    mount.answers.set()
    events.close()
    assert [event["round"] for event in read_events(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_log_of_events_is_closed_in_time_although_the_disk_hangs(tmp_path: Path, mount: Mount) -> None:
    tmp_path.chmod(0o700)
    files = FileExecutor()
    files.post(mount.ask)
    events = EventLog(tmp_path, role="agent", host="h", node=0, uid="u", clock=SystemClock(), files=files)
    events.write(RoundFinal(round=0))
    began = time.monotonic()
    events.close(within=0.1)
    assert time.monotonic() - began < 5


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
