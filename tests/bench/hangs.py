"""What `hpc-elastic hangs` takes for the dumps of a job of 1,024 ranks with full rings."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.systems import ROOT
from tests.bench.table import Number

RANKS, ENTRIES, CULPRIT = 1024, 2000, 777
NAMES = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast")


def measure(*, quick: bool) -> list[Number]:
    """Seconds by the wall clock, and the memory of the largest process."""
    numbers = []
    for kind in ("JSON",) if quick else ("JSON", "pickle"):
        with tempfile.TemporaryDirectory(prefix="bench-hangs-") as name:
            _write_dumps(Path(name), as_json=kind == "JSON")
            runs = [_run(name) for _ in range(1 if quick else 3)]
        title = f"`hpc-elastic hangs`, {RANKS:,} dumps of {ENTRIES:,} entries, {kind}"
        numbers.append(Number(title=title, unit="s", values=[run[0] for run in runs], goal=5))
        numbers.append(Number(title="its memory", unit="MB", values=[run[1] for run in runs], goal=500))
    return numbers


def _write_dumps(folder: Path, *, as_json: bool) -> None:
    """Rank `CULPRIT` never entered the last collective."""
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}}
    entries = [_entry(5000 + number) for number in range(ENTRIES)]
    waiting = [*entries[:-1], {**entries[-1], "state": "started", "retired": False}]
    for these, whose in ((waiting, range(RANKS)), (entries[:-1], (CULPRIT,))):
        document = {"version": "2.10", "pg_config": groups, "entries": these}
        raw = json.dumps(document).encode() if as_json else pickle.dumps(document, 2)
        for rank in whose:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(raw)


def _entry(sequence: int) -> dict[str, Any]:
    shape, kind, at = [[1024 * (sequence % 50 + 1), 64]], ["BFloat16"], 1795408340817326907 + sequence
    return {
        "record_id": sequence, "pg_id": 0, "process_group": ["0", "default_pg"], "thread_name": "pt_main_thread",
        "thread_id": "140091559750528", "collective_seq_id": sequence, "p2p_seq_id": 0, "op_id": sequence,
        "profiling_name": f"nccl:{NAMES[sequence % len(NAMES)]}", "time_created_ns": at, "input_sizes": shape,
        "input_dtypes": kind, "output_sizes": shape, "output_dtypes": kind, "state": "completed",
        "time_discovered_started_ns": at, "time_discovered_completed_ns": at, "retired": True, "timeout_ms": 600000,
        "is_p2p": False,
    }  # fmt: skip


def _run(folder: str) -> tuple[float, float]:
    began = time.monotonic()
    argv, env = [sys.executable, "-m", "hpc_elastic", "hangs", folder], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    found = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert f"rank {CULPRIT} never entered" in found, found
    return time.monotonic() - began, usage.ru_maxrss * 1024 / 1e6
