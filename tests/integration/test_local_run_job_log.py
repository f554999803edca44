"""One failure in the job log: what a person reads of it there, and how many lines it takes, however many ranks end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.run.paths import ExitCode
from tests.rigs import lockstep
from tests.rigs.local_run import LocalRun

MOST = 25
_ANYWAY = re.compile(
    r"\[hpc-elastic\] |={9}|-{9}|  run directory: |No failures|Ran from |Progress: | {6}hpc_elastic.heartbeat"
    r"|\[node\d\] the fork server is ready"
    r"|.* SUCCEEDED \(exit|\[node\d\] (?:round opened \(round 0\)|round 0: role|closed \()"
    r"|\[node\d:\d+\] (?:rank \d+ (?:of|begins|ends)|step \d+ at|final: )"
)
"""Lines that are there without a failure, or that the script prints."""


def of_failure(log: str) -> list[str]:
    return [line for line in log.splitlines() if not _ANYWAY.match(line)]


@pytest.mark.torch
@pytest.mark.parametrize("is_survived", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_exception_in_a_ddp_script(ddp_run: Callable[..., LocalRun], is_survived: bool) -> None:
    options = [] if is_survived else ["--max-restarts", "0"]
    with ddp_run("--fail", "raise@25", nproc=2, options=options) as run:
        assert run.finish() == (ExitCode.OK if is_survived else ExitCode.WORKERS_FAILED)
        log = run.log()
        lines = of_failure(log)
        assert len(lines) <= MOST, "\n".join(lines)
        assert log.count("Traceback (most recent call last)") == 1, "the cause's, and no consequence's"
        assert "ValueError: bad batch" in log
        assert re.search(r"rank 1 .* in fail \(ddp_script.py:\d+\)", log)
        assert re.search(r"[1-3] other ranks? ended with it: RuntimeError x[1-3]", log)
        assert log.count("restarts exhausted") == (0 if is_survived else 2), "when it was decided, and in the report"
        assert "Traceback" in run.rank(0).stderr.read_text() or "Traceback" in run.rank(2).stderr.read_text()


def test_a_killed_rank_of_64(tmp_path: Path) -> None:
    script = Path(lockstep.__file__).read_text()
    with LocalRun(tmp_path, script, prelude="", nodes=8, nproc=8, heartbeat_ttl=10.0) as run:
        run.until(lambda: run.log().count("step 3 at") == 64, "step of all ranks")
        (pid,) = (process.pid for process in run.processes() if process.environ.get("RANK") == "37")
        os.kill(pid, signal.SIGKILL)
        run.until(lambda: run.log().count(" begins at step ") == 128, "the next round")
        (tmp_path / "end").touch()
        assert run.finish() == ExitCode.OK
        lines = of_failure(run.log())
        assert len(lines) <= MOST, "\n".join(lines)
        assert "Traceback" not in run.log(), "what the others print follows from the one's end"


@pytest.mark.slow
def test_the_same_failure_on_64_ranks(tmp_path: Path) -> None:
    script = """
    tell("here")
    if ROUND == 0:
        wait_for("go")
        raise ValueError("no such file: data.bin")
    """
    with LocalRun(tmp_path, script, nodes=8, nproc=8, heartbeat_ttl=10.0) as run:
        run.wait_moments("here", count=64, round_index=0)
        run.say("go")
        assert run.finish() == ExitCode.OK
        lines = of_failure(run.log())
        assert len(lines) <= MOST, "\n".join(lines)
