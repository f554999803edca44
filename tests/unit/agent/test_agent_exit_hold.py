"""Workers of one node end together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpc_elastic.agent.function_call import ExitHold

_PROGRAM = """
import sys
from hpc_elastic.agent.function_call import ExitHold
hold = ExitHold(sys.argv[1], local_rank=int(sys.argv[2]), local_world_size=int(sys.argv[3]))
print("started", flush=True)
sys.stdin.readline()
hold.wait()
"""


class Sibling:
    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(path), str(rank), str(size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout.readline() == b"started\n"

    def returns(self) -> None:
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def ends(self) -> bool:
        try:
            return self.process.wait(timeout=30) == 0
        finally:
            self.process.kill()

    def is_held(self, path: Path, rank: int) -> bool:
        while path.read_bytes()[rank : rank + 1] != b"r":
            assert self.process.poll() is None
        return self.process.poll() is None


def test_one_that_has_returned_waits_for_the_others(tmp_path: Path) -> None:
    path = tmp_path / "hold"
    first = Sibling(path, 0, 2)
    first.returns()
    assert first.is_held(path, 0), "the other has not started yet"
    second = Sibling(path, 1, 2)
    assert first.process.poll() is None
    second.returns()
    assert first.ends()
    assert second.ends()


def test_one_that_was_killed_is_waited_for_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "hold"
    first, second = Sibling(path, 0, 2), Sibling(path, 1, 2)
    first.returns()
    assert first.is_held(path, 0)
    second.process.kill()
    assert first.ends()
    second.process.wait()


def test_without_others_or_without_a_file_no_worker_is_held(tmp_path: Path) -> None:
    ExitHold(str(tmp_path / "hold"), local_rank=0, local_world_size=1).wait()
    assert not (tmp_path / "hold").exists()
    ExitHold(str(tmp_path / "no" / "hold"), local_rank=0, local_world_size=2).wait()
    ExitHold("", local_rank=0, local_world_size=2).wait()
