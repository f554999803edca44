"""What one host writes and another reads while the run goes on, on mounts that cache for a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.files import make_private_dir, read_json, write_json
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.launch.batch import write_back
from hpc_elastic.output.log_files import LogFile, TimesFile, times_path
from hpc_elastic.output.log_reader import OutputReader, Place
from hpc_elastic.output.log_streams import read_round_marks, streams_of
from hpc_elastic.report.collect import collect_run
from hpc_elastic.run.control_events import RoundOpened
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.log_pieces import PieceLimit, piece_path
from hpc_elastic.run.paths import AttemptPaths
from tests.rigs.event_pairs import read_events
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.run_builder import RunBuilder, make_failure
from tests.rigs.waiting import until

MINUTE = MountSettings(attributes=60, directories=60)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    with NfsEmulator(tmp_path, settings=MINUTE) as emulator:
        yield emulator.paths[0], emulator.paths[1]


def test_an_event_is_seen_elsewhere_while_its_log_is_open(clients: tuple[Path, Path]) -> None:
    here, there = clients
    clock = SystemClock()
    for files in (None, FileExecutor(clock=clock)):
        name = f"events-{files is None}"
        events = EventLog(here / name, role="agent", host="n1", node=0, uid="0", clock=clock, files=files)
        for count in (1, 2):
            events.write(RoundOpened(round=count))
            until(lambda name=name, count=count: len(list(read_events(there / name))) == count)
        events.close()


def test_the_job_log_is_seen_elsewhere_while_it_is_open(clients: tuple[Path, Path]) -> None:
    here, there = clients
    fd = os.open(here / "job.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    assert write_back(fd, SystemClock(), interval=0.05)
    for text in ("one\n", "two\n"):
        os.write(fd, text.encode())
        until(lambda text=text: (there / "job.log").read_text().endswith(text))
    assert (there / "job.log").read_text() == "one\ntwo\n"
    os.close(fd)


def test_a_pipe_needs_no_writing_back() -> None:
    read, write = os.pipe()
    assert not write_back(write, SystemClock())
    os.close(read)
    os.close(write)
    assert not write_back(write, SystemClock())


def test_a_file_that_was_missed_once_is_found_as_soon_as_it_is_there(clients: tuple[Path, Path]) -> None:
    """A client remembers for a minute what it did not find, unless it is asked about the folder."""
    here, there = clients
    (here / "attempt-000").mkdir()
    assert read_json(there / "attempt-000" / "result.json") == "missing"
    write_json(here / "attempt-000" / "result.json", {"exit_code": 0})
    assert read_json(there / "attempt-000" / "result.json") == {"exit_code": 0}
    write_json(here / "attempt-000" / "result.json", {"exit_code": 75})
    assert read_json(there / "attempt-000" / "result.json") == {"exit_code": 75}


def test_a_report_shows_the_failure_that_an_earlier_one_on_this_host_came_too_early_for(
    clients: tuple[Path, Path],
) -> None:
    here, there = clients
    run = RunBuilder(here / "run", nodes=1)
    run.attempt(0)
    run.round(0, 0, at=1.0)
    rank = run.paths.attempt(0).rank(0, 0).root
    for folder in (rank.parent.parent, rank.parent, rank):
        make_private_dir(folder)
    (attempt,) = collect_run(there / "run").attempts
    assert attempt.rounds[0].failures == ()
    run.fail(make_failure(0, at=2.0, exception="ValueError: bad batch"))
    (attempt,) = collect_run(there / "run").attempts
    (failure,) = attempt.rounds[0].failures
    assert "loss.backward()" in failure.traceback, "from error.json, which was not there before"


def test_what_grows_is_rotated_and_was_not_there_before(clients: tuple[Path, Path]) -> None:
    here, there = (AttemptPaths(client / "attempt-000") for client in clients)
    for folder in (here.root, here.round_dir(0), here.rank(0, 3).root):
        folder.mkdir(mode=0o700)
    reader = OutputReader(there.rank(0, 3).stdout)
    assert reader.read() is None, "and the client remembers that"
    assert [stream.rank for stream in streams_of(there, 0)] == [3, 3]
    times = TimesFile(times_path(here.round_dir(0), 1))
    found: list[bytes] = []

    def read(line: bytes) -> bool:
        chunk = reader.read()
        if chunk is not None:
            found.extend(chunk.data.splitlines())
        return line in found

    for number in range(8):  # 40 bytes each: a new piece for every third
        log = LogFile(
            here.rank(0, 3).stdout,
            on_end=list,
            on_loss=lambda *_: None,
            limit=PieceLimit(size=100, count=9),
            times=times.stream(3, 1),
        )
        log.write(b"line %d %s\n" % (number, b"x" * 32), now=0.0, at_us=1_000_000 * (number + 1))
        log.finish(now=float(number))
        until(lambda number=number: read(b"line %d %s" % (number, b"x" * 32))), f"line {number}"
    assert [line.split()[1] for line in found] == [b"%d" % number for number in range(8)]
    assert os.path.exists(piece_path(here.rank(0, 3).stdout, 2))
    until(lambda: read_round_marks(there.round_dir(0)).of(3, 1).time_at(Place(99, 0)) == 8_000_000)
