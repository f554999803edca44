"""Evidence from workers that really fail: each one is a process, started as the agent starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_elastic.failures.error_handler import ProcessFailure
from hpc_elastic.failures.evidence import describe_failure, read_failure, write_evidence
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure

FACTS = WorkerFailure(attempt=0, round=0, host="?", node=0, local_rank=0, global_rank=0, pid=0, exitcode=1, ended_ns=0)
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Worker:
    """A worker that has ended, and its files."""

    folder: Path
    pid: int
    exitcode: int

    @property
    def error_file(self) -> Path:
        return self.folder / "error.json"

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.log").read_text(errors="replace")

    def describe(self) -> WorkerFailure:
        facts = WorkerFailure(
            attempt=0,
            round=1,
            host="n3",
            node=2,
            local_rank=1,
            global_rank=5,
            pid=self.pid,
            exitcode=self.exitcode,
            ended_ns=time.time_ns(),
        )
        return describe_failure(facts=facts, error_file=self.error_file, stderr_log=self.folder / "stderr.log")


def start(folder: Path, argv: list[str]) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        "RANK": "5",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    with open(folder / "stderr.log", "wb") as stderr:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=env, cwd=folder
        )


def run(folder: Path, source: str, *args: str) -> Worker:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    process = start(folder, [sys.executable, "-u", str(script), *args])
    process.communicate(timeout=120)
    return Worker(folder=folder, pid=process.pid, exitcode=process.returncode)


def test_what_python_prints_after_the_exception_does_not_hide_it(tmp_path: Path) -> None:
    worker = run(
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
    assert "while collected" in worker.stderr
    assert "ZeroDivisionError" in worker.stderr
    # Of the rest only what came before it can have led to it: the thread that died.
    assert worker.describe().message == (
        "RuntimeError: the one that matters (logged just before: IndexError: pop from empty list)"
    )


def test_an_exception_between_a_progress_bar_and_what_runs_at_the_exit(tmp_path: Path) -> None:
    worker = run(
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
    assert "]Traceback (most" in worker.stderr
    failure = worker.describe()
    assert failure.message == "ValueError: bad batch 17"
    assert failure.traceback.splitlines()[-1] == failure.message
    assert "in step" in failure.traceback.splitlines()[-3]
    assert failure.stderr_tail.splitlines()[-1] == "wandb: run sunny-sea 59"


def test_a_logged_exception_before_an_exit_code_is_found(tmp_path: Path) -> None:
    worker = run(
        tmp_path,
        """
        import os, traceback
        try:
            {}["lr"]
        except KeyError:
            traceback.print_exc()
            os._exit(4)
        """,
    )
    failure = worker.describe()
    assert failure.exitcode == 4
    assert failure.message == "KeyError: 'lr'"


def test_an_exception_that_was_survived_long_ago_is_not_taken_for_the_end(tmp_path: Path) -> None:
    worker = run(
        tmp_path,
        """
        import os, sys, traceback
        try:
            {}["lr"]
        except KeyError:
            traceback.print_exc()
        for step in range(100):
            print("step", step, file=sys.stderr)
        os._exit(4)
        """,
    )
    failure = worker.describe()
    assert failure.message == "Process failed with exitcode 4"
    assert failure.stderr_tail.endswith("step 99")


@pytest.mark.parametrize("use", ["ours", pytest.param("torch", marks=pytest.mark.torch)])
def test_record(tmp_path: Path, use: str) -> None:
    module = {"ours": "hpc_elastic.failures", "torch": "torch.distributed.elastic.multiprocessing.errors"}[use]
    if use == "torch":
        pytest.importorskip("torch")
    worker = run(
        tmp_path,
        f"""
        from {module} import record
        def step():
            raise ValueError("bad batch 17")
        @record
        def main():
            step()
        main()
        """,
    )
    recorded = json.loads(worker.error_file.read_text())
    assert recorded["message"]["message"] == "ValueError: bad batch 17"
    failure = worker.describe()
    assert failure.message == "ValueError: bad batch 17"
    assert failure.exception_type == "ValueError"
    assert failure.source is EvidenceSource.ERROR_FILE
    assert "in step" in failure.traceback
    # Recorded or not, and by whom: it is the same failure.
    worker.error_file.unlink()
    unrecorded = worker.describe()
    assert unrecorded.source is EvidenceSource.STDERR
    assert unrecorded.fingerprint == failure.fingerprint


def test_the_evidence_is_read_by_torchs_names(tmp_path: Path) -> None:
    worker = run(tmp_path, "raise ValueError('bad')\n")
    failure = worker.describe()
    assert write_evidence(failure, worker.error_file) == ""
    read = ProcessFailure(1, worker.pid, worker.exitcode, str(worker.error_file))
    assert read.message["message"] == "ValueError: bad"
    assert read.message["errorCode"] == 1
    assert read.host == "n3"
    assert read_failure(worker.error_file, facts=FACTS) == failure
    assert oct(worker.error_file.stat().st_mode & 0o777) == "0o600"
