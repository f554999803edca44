"""What moving the workers' output costs the agent: seconds of CPU for a GB, by what is printed. No run, no torch.

Each case runs in a process of its own, which does what an agent does with its workers' output; its CPU time is taken,
not the workers'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.table import Number

WORKERS, _MB = 8, 30
_LINES = "b'loss 0.123456 ' * 7 + b'\\n'"
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
    title: str
    line: str = _LINES
    shown: bool = True
    stuck: bool = False
    rotated: bool = False


CASES = (
    Case(title="lines of 100 bytes"),
    Case(title="the same, to the files alone (`--redirects 3`)", shown=False),
    Case(title="the same, rotated at 4 MiB", shown=False, rotated=True),
    Case(title="the same, while nobody reads the job log", stuck=True),
    Case(title="coloured lines", line="b'\\x1b[32mINFO\\x1b[0m ' + b'loss 0.123456 ' * 6 + b'\\n'"),
    Case(title="progress bars", line="b'\\r 50%|#####     | 500/1000 [00:10<00:10, 50.0it/s]'"),
    Case(title="no text and no line ends", line="bytes([255, 254, 0, 195]) * 25"),
)


def measure(*, quick: bool) -> list[Number]:
    found = []
    for number, case in enumerate(CASES[: 2 if quick else None]):
        with tempfile.TemporaryDirectory(prefix="bench-output-") as folder:
            argv = [sys.executable, "-m", "tests.bench.output", str(number), folder]
            cpu, speed, grown = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
        note = f"{speed:.0f} MB/s in all, +{grown:.1f} MiB"
        found.append(Number(title=case.title, unit="s/GB", values=[cpu], note=note))
    return found


def _agent(case: Case, folder: Path) -> tuple[float, float, float]:
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
    memory, workers = _peak_mib(), []
    before, began = time.process_time(), time.monotonic()
    for rank in range(WORKERS):
        worker = spawn.start_worker(
            argv=[sys.executable, "-S", "-c", code], env=dict(os.environ), cwd="/", inherited=inherited, clock=clock,
            pipe_bytes=spawn.pipe_bytes_for(WORKERS),
        )  # fmt: skip
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
    return cpu / pump.read * 1e9, pump.read / seconds / 1e6, _peak_mib() - memory


def _peak_mib() -> float:
    """Not ru_maxrss, which begins with that of who started this process."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    print(json.dumps(_agent(CASES[int(sys.argv[1])], Path(sys.argv[2]))), flush=True)
    os._exit(0)
