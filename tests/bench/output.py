"""What moving the workers' output costs the agent: seconds of CPU for a GB, by what is printed. No run, no torch.

::

    python -m tests.bench.output

Each case runs in a process of its own, which does what an agent does with its workers' output; its CPU time is taken,
not the workers'. Beside it stands ``cat``, which moves the same bytes into the same file and looks at none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

WORKERS = 8
_MB = 30
"""What each worker prints."""
_LINES = "b'loss 0.123456 ' * 7 + b'\\n'"
_COLOURED = "b'\\x1b[32mINFO\\x1b[0m ' + b'loss 0.123456 ' * 6 + b'\\n'"
_BAR = "b'\\r 50%|#####     | 500/1000 [00:10<00:10, 50.0it/s]'"
_NO_TEXT = "bytes([255, 254, 0, 195]) * 25"

_PRODUCER = """
import os, sys
line = {line}
block = line * max(1, 65536 // len(line))
left = {total}
while left > 0:
    left -= os.write(1, block[:left])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row."""

    title: str
    line: str
    shown: bool = True
    stuck: bool = False
    rotated: bool = False


CASES = (
    Case(title="lines of 100 bytes", line=_LINES),
    Case(title="the same, to the files alone (`--redirects 3`)", line=_LINES, shown=False),
    Case(title="the same, rotated at 4 MiB", line=_LINES, shown=False, rotated=True),
    Case(title="the same, while nobody reads the job log", line=_LINES, stuck=True),
    Case(title="coloured lines", line=_COLOURED),
    Case(title="progress bars", line=_BAR),
    Case(title="no text and no line ends", line=_NO_TEXT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one case came to."""

    title: str
    cpu_per_gb: float
    """Seconds of CPU of the agent's process."""
    mb_per_s: float
    """All workers together, workers and agent on the same cores."""
    grown_mib: float
    """Memory that it took beyond what it had before."""


def measure() -> list[Cost]:
    """All cases, and ``cat``."""
    with tempfile.TemporaryDirectory(prefix="bench-output-") as name:
        found = [_cat(Path(name))]
        for number in range(len(CASES)):
            folder = Path(name) / str(number)
            folder.mkdir(mode=0o700)
            argv = [sys.executable, "-m", "tests.bench.output", "--case", str(number), str(folder)]
            done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=300)
            found.append(Cost(**json.loads(done.stdout)))
            shutil.rmtree(folder)
    return found


def lines(costs: list[Cost]) -> list[str]:
    """For the report."""
    return [
        f"| the output of {WORKERS} workers, {_MB} MB each | agent's CPU, s/GB | MB/s in all | memory, MiB |",
        "| --- | --- | --- | --- |",
        *(f"| {c.title} | {c.cpu_per_gb:.2f} | {c.mb_per_s:.0f} | +{c.grown_mib:.1f} |" for c in costs),
    ]


def _cat(folder: Path) -> Cost:
    code = _PRODUCER.format(line=_LINES, total=_MB * 1_000_000)
    began = time.monotonic()
    cats = []
    for number in range(WORKERS):
        producer = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        assert producer.stdout is not None
        with open(folder / f"{number}.log", "wb") as file:
            cats.append((producer, subprocess.Popen(["cat"], stdin=producer.stdout, stdout=file)))
        producer.stdout.close()
    cpu = 0.0
    for producer, cat in cats:
        _, _, usage = os.wait4(cat.pid, 0)
        cpu += usage.ru_utime + usage.ru_stime
        cat.returncode = 0
        producer.wait()
    seconds = time.monotonic() - began
    total = WORKERS * _MB * 1e6
    return Cost(
        title="`cat` for each of them", cpu_per_gb=cpu / total * 1e9, mb_per_s=total / seconds / 1e6, grown_mib=0.0
    )


def _agent(case: Case, folder: Path) -> Cost:
    """In a process of its own."""
    from hpc_elastic.base.clock import SystemClock
    from hpc_elastic.output.job_log import JobLog
    from hpc_elastic.output.pump import LogPump
    from hpc_elastic.run.log_pieces import PieceLimit
    from hpc_elastic.run.option_values import Std
    from hpc_elastic.workers import spawn

    clock = SystemClock()
    inherited = spawn.prepare_agent_process()
    unread = os.pipe()[1]
    log = JobLog(unread if case.stuck else os.open(folder / "job.log", os.O_WRONLY | os.O_CREAT, 0o600))
    limit = PieceLimit(size=4 << 20, count=3) if case.rotated else None
    pump = LogPump(host="node0", clock=clock, job_log=log, limit=limit, node=0)
    code = _PRODUCER.format(line=case.line, total=_MB * 1_000_000)
    memory = _peak_mib()
    workers = []
    before, began = time.process_time(), time.monotonic()
    for rank in range(WORKERS):
        worker = spawn.start_worker(
            argv=[sys.executable, "-S", "-c", code],
            env=dict(os.environ),
            cwd="/",
            inherited=inherited,
            clock=clock,
            pipe_bytes=spawn.pipe_bytes_for(WORKERS),
        )
        root = folder / "round-000" / f"rank-{rank:05d}"
        shown = Std.ALL if case.shown else Std.NONE
        pump.add(rank=rank, worker=worker, stdout=root / "stdout.log", stderr=root / "stderr.log", shown=shown)
        workers.append(worker)
    for worker in workers:
        while not pump.drained(worker.pid, 60):
            pass
    seconds = time.monotonic() - began
    pump.close(10)
    log.close(0.0 if case.stuck else 10)
    cpu = time.process_time() - before
    total = pump.read
    return Cost(
        title=case.title,
        cpu_per_gb=cpu / total * 1e9,
        mb_per_s=total / seconds / 1e6,
        grown_mib=_peak_mib() - memory,
    )


def _peak_mib() -> float:
    """Not ru_maxrss, which begins with that of who started this process."""
    with open("/proc/self/status") as file:
        return int(file.read().partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        cost = _agent(CASES[int(sys.argv[2])], Path(sys.argv[3]))
        print(json.dumps({name: getattr(cost, name) for name in ("title", "cpu_per_gb", "mb_per_s", "grown_mib")}))
        sys.stdout.flush()
        os._exit(0)
    print("\n".join(lines(measure())))
