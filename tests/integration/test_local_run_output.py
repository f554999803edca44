"""What workers print, in amounts and shapes that nobody planned for: nothing waits, nothing grows, nothing is cut."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpc_elastic.base.outcome import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.processes import resident_mb

AGENT_LIMIT_MB = 63.0

_FLOOD = """
import hashlib

digest = hashlib.sha256()
line = b"".join(b"%07d %s\\n" % (number, b"x" * 91) for number in range(10000))
for _ in range(300):
    digest.update(line)
    sys.stdout.buffer.write(line)
sys.stdout.buffer.flush()
tell("printed", sha=digest.hexdigest())
wait_for("end")
"""
_ENDLESS_LINE = """
piece = b"y" * (1 << 20)
for _ in range(100):
    sys.stdout.buffer.write(piece)
sys.stdout.buffer.flush()
sys.stderr.write("a prompt without an end of line: ")
sys.stderr.flush()
tell("printed")
wait_for("end")
"""


def test_flood_is_in_the_file_to_the_last_byte(tmp_path: Path) -> None:
    """300 MB from one worker, all of it for the job log too, which may drop what it can't keep up with, aloud."""
    with LocalRun(tmp_path, "if RANK == 0:" + _FLOOD.replace("\n", "\n    "), nodes=2) as run:
        (printed,) = run.wait_moments("printed", count=1)
        assert resident_mb(run.agent(0).pid, peak=True) < AGENT_LIMIT_MB
        run.say("end")
        assert run.finish() == ExitCode.OK
        digest = hashlib.sha256()
        with open(run.rank(0).stdout, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        assert run.rank(0).stdout.stat().st_size == 300 * 10000 * 100
        assert digest.hexdigest() == printed["sha"]
        with open(run.log_path, "rb") as file:
            lines = [line for line in file if line.startswith(b"[node0:0] ")]
        others = [line for line in lines if not line.endswith(b"x" * 91 + b"\n") or len(line) != 10 + 100]
        assert len(lines) == 3_000_000 or others
        assert all(b"bytes dropped: the job log could not keep up" in line for line in others)
        run.log_path.unlink()
        run.rank(0).stdout.unlink()


def test_line_without_an_end(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _ENDLESS_LINE, nodes=1) as run:
        run.wait_moments("printed", count=1)
        # The unfinished line is shown while the worker still waits behind it.
        run.until(lambda: "[node0:0] a prompt without an end of line: " in run.log(), "unfinished line")
        assert resident_mb(run.agent(0).pid, peak=True) < AGENT_LIMIT_MB
        run.say("end")
        assert run.finish() == ExitCode.OK
        assert run.rank(0).stdout.stat().st_size == 100 << 20
        assert run.rank(0).stderr.read_text() == "a prompt without an end of line: "
        run.rank(0).stdout.unlink()


def test_last_words_of_a_worker_that_dies(tmp_path: Path) -> None:
    script = """
    tell("here")
    others_in_round()
    if ROUND == 0 and RANK == 1:
        os.write(1, b"".join(b"step %d\\n" % step for step in range(20000)) + b"the very last")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with LocalRun(tmp_path, script) as run:
        assert run.finish() == ExitCode.OK
        text = run.rank(1).stdout.read_text()
        assert text.splitlines() == [*(f"step {step}" for step in range(20000)), "the very last"]
        assert "[node1:1] the very last" in run.log().splitlines()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    script = 'sys.stdout.buffer.write(bytes(range(256)) + b"\\n\\xff\\xfe end\\n")'
    with LocalRun(tmp_path, script, nodes=1) as run:
        assert run.finish() == ExitCode.OK
        raw = bytes(range(256)) + b"\n\xff\xfe end\n"
        assert run.rank(0).stdout.read_bytes() == raw
        assert b"[node0:0] \xff\xfe end\n" in run.log_path.read_bytes()
