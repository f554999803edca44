"""A worker's failure as the agent describes it, by what the worker printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.failure_text import FailureText
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure


def described(folder: Path, stderr: str, stdout: str | None = None, **facts: Any) -> WorkerFailure:
    """The failure of rank 1, with pid 7 and exit code 1, or as `facts` say; there is no error file."""
    (folder / "stderr.log").write_text(stderr, encoding="utf-8")
    if stdout is not None:
        (folder / "stdout.log").write_text(stdout)
    return describe_failure(
        facts=WorkerFailure(**{"exitcode": 1, "global_rank": 1, "pid": 7, **facts}),
        error_file=folder / "none.json",
        stderr_log=folder / "stderr.log",
        stdout_log="" if stdout is None else folder / "stdout.log",
    )


def traceback_in(text: str) -> FailureText:
    """The last uncaught exception in `text`, which has one."""
    found = find_python_traceback(text)
    assert found is not None
    return found
