"""Evidence from workers that really fail: each one is a process, started as the agent starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.worker_failure import WorkerFailure

ROOT = Path(__file__).resolve().parents[2]


def fail(folder: Path, source: str, *args: str) -> tuple[WorkerFailure, str]:
    """Run a script as the agent starts it. Returns what is found of its failure, and its stderr."""
    script, stderr = folder / "train.py", folder / "stderr.log"
    script.write_text(textwrap.dedent(source))
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), "PYTHONFAULTHANDLER": "1"}
    env |= {"PYTHONPATH": str(ROOT), "RANK": "5", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    with open(stderr, "wb") as file:
        done = subprocess.Popen(
            [sys.executable, "-u", str(script), *args], stdin=subprocess.DEVNULL, stderr=file, env=env
        )
    facts = WorkerFailure(pid=done.pid, exitcode=done.wait(120), global_rank=5, ended_ns=time.time_ns())
    failure = describe_failure(facts=facts, error_file=folder / "error.json", stderr_log=stderr)
    return failure, stderr.read_text(errors="replace")


def test_what_python_prints_after_the_exception_does_not_hide_it(tmp_path: Path) -> None:
    failure, stderr = fail(
        tmp_path,
        """
        import atexit, sys, threading
        class Noisy:
            def __del__(self):
                raise OSError("while collected")
        keep = Noisy()
        atexit.register(lambda: 1 / 0)
        thread = threading.Thread(target=lambda: [].pop())
        thread.start(); thread.join()
        raise RuntimeError("the one that matters")
        """,
    )
    assert "while collected" in stderr
    assert "ZeroDivisionError" in stderr
    # Of the rest only what came before it can have led to it: the thread that died.
    assert failure.message == (
        "RuntimeError: the one that matters (logged just before: IndexError: pop from empty list)"
    )


def test_an_exception_between_a_progress_bar_and_what_runs_at_the_exit(tmp_path: Path) -> None:
    failure, stderr = fail(
        tmp_path,
        """
        import atexit, sys
        @atexit.register
        def bye():
            for n in range(60):
                print("wandb: run", sys.argv[1], n, file=sys.stderr)
        def step():
            raise ValueError("bad batch 17")
        print(end="\\r 40%|####      | 2/5 [00:01<00:02]", file=sys.stderr, flush=True)
        step()
        """,
        "sunny-sea",
    )
    assert "]Traceback (most" in stderr
    assert failure.message == "ValueError: bad batch 17"
    assert failure.traceback.splitlines()[-1] == failure.message
    assert "in step" in failure.traceback.splitlines()[-3]
    assert failure.stderr_tail.splitlines()[-1] == "wandb: run sunny-sea 59"
