"""Reading workers' output and its times on another host, on mounts that cache for a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_elastic.output.log_files import LogFile
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.output.log_streams import read_round_marks, streams_of
from hpc_elastic.output.log_times import TimesFile, times_path
from hpc_elastic.run.log_pieces import PieceLimit, piece_path
from hpc_elastic.run.paths import AttemptPaths
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator, require_fuse

MINUTE = MountSettings(attributes=60, directories=60)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The same folder on two hosts."""
    require_fuse()
    with NfsEmulator(tmp_path, settings=MINUTE) as emulator:
        yield emulator.paths[0], emulator.paths[1]


def eventually(condition: Callable[[], object], *, seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


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
        assert eventually(lambda number=number: read(b"line %d %s" % (number, b"x" * 32))), f"line {number}"
    assert [line.split()[1] for line in found] == [b"%d" % number for number in range(8)]
    assert os.path.exists(piece_path(here.rank(0, 3).stdout, 2))
    assert eventually(lambda: read_round_marks(there.round_dir(0)).of(3, 1).last_us == 8_000_000)
