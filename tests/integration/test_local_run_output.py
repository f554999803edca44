"""What workers print, in amounts and shapes that nobody planned for: nothing waits, nothing grows, nothing is cut."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.run.paths import ExitCode
from tests.rigs.local_run import LocalRun
from tests.rigs.processes import resident_mb

AGENT_LIMIT_MB = 63.0

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


def test_line_without_an_end(tmp_path: Path) -> None:
    with LocalRun(tmp_path, _ENDLESS_LINE, nodes=1) as run:
        run.wait_moments("printed", count=1)
        # The unfinished line is shown while the worker still waits behind it.
        run.until(lambda: "[node0:0] a prompt without an end of line: " in run.log(), "unfinished line")
        assert resident_mb(run.agent(0).pid, peak=True) < AGENT_LIMIT_MB
        run.finish_well()
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
