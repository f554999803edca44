"""What an agent spends on the evidence of 8 failed workers: each way of failing, in a fresh process each time.

CPU time: one thread, and on a machine that does nothing else the same as by the wall clock. An agent has imported what
it needs for that before its first worker starts, and so has the process here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.systems import ROOT
from tests.bench.table import Number

WORKERS = 8
GOAL_MS = 50.0
_NOISE = "loss 0.123456789 and some words to fill a line of a log file that is read\n" * 3000
_TRACE = "Traceback (most recent call last):\n" + '  File "/u/train.py", line 3, in step\n    x()\n' * 30
_THREAD = "Thread 0x00007f1542893b90 (most recent call first):\n" + '  File "/u/t.py", line 3 in wait\n' * 12

_CHILD = """
import json, os, sys, time
import hpc_elastic.agent.main
from hpc_elastic.agent import rounds
rounds.load()
from pathlib import Path
from hpc_elastic.failures.worker_failure import WorkerFailure
folder, exitcode, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
facts = [WorkerFailure(attempt=0, round=0, host="n1", node=0, local_rank=rank, global_rank=rank, pid=9,
                       exitcode=exitcode, ended_ns=time.time_ns()) for rank in range(count)]
times = []
for turn in ("first", "again"):
    began = time.process_time()
    from hpc_elastic.failures.evidence import describe_failure, write_evidence
    for rank in range(count):
        place = folder / turn / str(rank)
        failure = describe_failure(facts=facts[rank], error_file=place / "error.json", stderr_log=place / "stderr.log")
        problem = write_evidence(failure, place / "error.json")
        assert not problem and failure.problem[:4] in ("", "cut:"), (problem, failure.problem)
    times.append(1000 * (time.process_time() - began))
print(json.dumps([*times, failure.message[:100]]))
"""


_LONG = f"ValueError: {'x' * 10_000_000}"
_WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG 1 Rank 7] Process group watchdog thread terminated with exception: [Rank 7] "
    "Watchdog caught collective operation timeout: ran for 600061 milliseconds before timing out.\n"
    f"Fatal Python error: Aborted\n\n{_THREAD * 99}Current {_THREAD[0].lower()}{_THREAD[1:]}"
)


def _recorded(message: str) -> str:
    info = {"py_callstack": f"{_TRACE}{message}\n", "timestamp": "1700000001"}
    return json.dumps({"message": {"message": message, "extraInfo": info}})


_BAD = "ValueError: bad batch 7"
_WAYS = (
    ("that raised", 1, f"{_NOISE}{_TRACE}{_BAD}\n", "", _BAD),
    ("whose failure torch's `@record` wrote", 1, f"{_NOISE}{_TRACE}{_BAD}\n", _recorded(_BAD), _BAD),
    ("that NCCL's watchdog ended, stacks of 100 threads", -6, _NOISE + _WATCHDOG, "", "c10::DistBackendError: [PG 1"),
    ("with a message of 10 MB on stderr", 1, f"{_NOISE}{_TRACE}{_LONG}\n", "", "ValueError: xxx"),
    ("with a message of 10 MB, recorded", 1, "", _recorded(_LONG), "ValueError: xxx"),
)
"""Workers, exit code, stderr, error file, begin of the message in the evidence."""


def measure(*, quick: bool) -> list[Number]:
    """Milliseconds of CPU, of all workers together: 20 s; 6 s where `quick`."""
    found = []
    for title, exitcode, stderr, error_file, message in _WAYS:
        pairs = [_once(exitcode, stderr, error_file, message) for _ in range(3 if quick else 9)]
        for which, values in zip(("", ", again"), zip(*pairs, strict=True), strict=True):
            if not which or title == _WAYS[0][0]:
                found.append(Number(title=f"{WORKERS} workers {title}{which}", unit="ms", values=values, goal=GOAL_MS))
    return found


def _once(exitcode: int, stderr: str, error_file: str, message: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for turn in ("first", "again"):
            for rank in range(WORKERS):
                place = Path(folder) / turn / str(rank)
                place.mkdir(parents=True)
                (place / "stderr.log").write_text(stderr)
                if error_file:
                    (place / "error.json").write_text(error_file)
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, folder, str(exitcode), str(WORKERS)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True, text=True,
        )  # fmt: skip
    first, again, found = json.loads(done.stdout)
    assert found.startswith(message), f"the evidence says {found!r}, not {message!r}"
    return first, again
