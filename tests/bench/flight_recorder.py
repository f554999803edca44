"""What `hpc-elastic hangs` takes for the dumps of a large job, and what their collection costs where nothing hangs."""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_elastic.agent.flight_recorder import FlightRecorders
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.worker_api.flight_recorder import ASK, VARIABLE
from tests.bench.agent_numbers import Number
from tests.bench.systems import NODES, ROOT, Session, System, ours

RANKS, ENTRIES = 1024, 2000
CULPRIT = 777
NAMES = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast")


def measure(*, quick: bool) -> list[Number]:
    """Both formats, by processes of their own: the wall clock's seconds, the memory of the largest process."""
    numbers = []
    for kind in ("JSON",) if quick else ("JSON", "pickle"):
        with tempfile.TemporaryDirectory(prefix="bench-hangs-") as name:
            write_dumps(Path(name), as_json=kind == "JSON")
            runs = [_run([sys.executable, "-m", "hpc_elastic", "hangs", name]) for _ in range(1 if quick else 3)]
        title = f"`hpc-elastic hangs`, {RANKS:,} dumps of {ENTRIES:,} entries, {kind}"
        numbers.append(Number(title=title, unit="s", values=[run[0] for run in runs], goal=5))
        numbers.append(Number(title="its memory", unit="MB", values=[run[1] for run in runs], goal=500))
    return [*numbers, _agent(), _restart(1 if quick else 7)]


def _agent() -> Number:
    """What one agent does about the recorders of 8 ranks from a start to the next where nothing hangs."""
    values = []
    for index in range(50):
        with tempfile.TemporaryDirectory(prefix="bench-hangs-") as name:
            began = time.perf_counter()
            recorders = FlightRecorders(Path(name), round_index=index, clock=SystemClock())
            opened = [recorders.environment(rank, {})[VARIABLE] for rank in range(8)]
            spent = time.perf_counter() - began
            for path in opened:
                os.mkfifo(f"{path}.{os.getpid()}{ASK}")
            began = time.perf_counter()
            for rank in range(8):
                recorders.forget(rank)
            values.append(1e3 * (spent + time.perf_counter() - began))
    return Number(
        title="collecting them: an agent's own time where nothing hangs, 8 ranks", unit="ms", values=values, goal=50
    )


def _restart(sessions: int) -> Number:
    """SIGKILL of a worker in a gloo group → the last new worker's first line: with the recorder's pipes and without."""
    with_pipes, without = (ours(name) for name in ("recorder", "no recorder"))
    without.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # gloo's pipe is opened at the end of `import torch`
    found: dict[str, list[float]] = {with_pipes.name: [], without.name: []}
    for repetition in range(sessions):
        for system in (with_pipes, without):
            found[system.name].append(_kill(system, repetition % NODES))
    recorded, plain = found[with_pipes.name], found[without.name]
    return Number(
        title="collecting them: SIGKILL of a worker → last worker's first line, beside the same without it",
        unit="s more",
        values=[one - other for one, other in zip(recorded, plain, strict=True)],
        goal=0.05,
        note=f"{statistics.median(recorded):.3f} and {statistics.median(plain):.3f} s",
    )


def _kill(system: System, victim: int) -> float:
    with Session(system, "torch", "wait", limit=120.0) as session:
        session.wait_for_all("group", since=session.began)
        found = session.wait_for_all("line", since=session.kill_worker(victim))
        session.wait_for_all("group", since=session.began)
        session.let_workers_end()
        session.wait_for_end()
    return found


def write_dumps(folder: Path, *, as_json: bool) -> None:
    """A job whose rank `CULPRIT` never entered the last collective; every ring has wrapped."""
    ranks = str(list(range(RANKS)))
    entries = [_entry(5000 + number) for number in range(ENTRIES)]
    waiting = [*entries[:-1], {**entries[-1], "state": "started", "retired": False}]
    for these, whose in ((waiting, range(RANKS)), (entries[:-1], (CULPRIT,))):
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        document = {"version": "2.10", "pg_config": groups, "entries": these}
        raw = json.dumps(document).encode() if as_json else pickle.dumps(document, 2)
        for rank in whose:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(raw)


def _entry(sequence: int) -> dict[str, Any]:
    shape, kind = [[1024 * (sequence % 50 + 1), 64]], ["BFloat16"]
    return {
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "thread_name": "pt_main_thread",
        "thread_id": "140091559750528",
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{NAMES[sequence % len(NAMES)]}",
        "time_created_ns": 1795408340817326907 + sequence,
        "input_sizes": shape,
        "input_dtypes": kind,
        "output_sizes": shape,
        "output_dtypes": kind,
        "state": "completed",
        "time_discovered_started_ns": 1795408340817326907 + sequence,
        "time_discovered_completed_ns": 1795408340817326907 + sequence,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
    }


def _run(argv: Sequence[str]) -> tuple[float, float]:
    began = time.monotonic()
    process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert f"rank {CULPRIT} never entered" in said, said
    return time.monotonic() - began, usage.ru_maxrss * 1024 / 1e6
