"""In-process restart beside NVIDIA's: from an exception on one rank to the last rank's next start, and what it costs.

NVIDIA's is installed from the package registry, into a folder of its own; where that can't be had, this package is
measured alone.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.table import Number, ratio
from tests.rigs.inprocess_ranks import Job, run_jobs

THEIRS, THEIR_VERSION = "nvidia_resiliency_ext.inprocess", "0.4.1"
INSTALL_SECONDS = 120


def measure(*, quick: bool) -> list[Number]:
    """A quick run leaves 8 ranks and the thousand restarts out."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        search = _find_theirs(Path(folder))
        for ranks in (4,) if quick else (4, 8):
            for interval in ("",) if quick else ("", "0.05"):
                found.append(_compared(ranks, search, restarts=10 if quick else 40, interval=interval))
    restarts = 20 if quick else 1000
    job = _run(f"restart_times:4:restarts={restarts}:deadline={60 + restarts}")
    grown = [max(after[n] - before[n] for before, after in (r["sizes"] for r in job.results)) for n in range(3)]
    note = f"growth over the last {restarts - restarts // 10}: {grown[0]:.1f} MiB, {grown[1]:g} threads"
    title = f"the same out of a blocked gloo all-reduce, 4 ranks, {restarts} restarts"
    found.append(Number(title=title, unit="ms", values=_milliseconds(job), note=note))
    job = _run(f"overhead:2:turns={2 if quick else 6}")
    share = 100 * (statistics.median(result["wrapped"] / result["plain"] for result in job.results) - 1)
    title = "CPU that the call adds to a loop of 1 ms iterations with a ping"
    return [*found, Number(title=title, unit="%", values=[share], goal=1)]


def _find_theirs(folder: Path) -> str | None:
    """Where their package can be imported from: "" for as it is, a folder, or None: nowhere."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--target", str(folder), f"nvidia-resiliency-ext=={THEIR_VERSION}", "pyyaml", "defusedxml"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return str(folder) if done.returncode == 0 else None


def _run(job: str, *, search: str = "") -> Job:
    with tempfile.TemporaryDirectory() as folder:
        (found,) = run_jobs(Path(folder), job, search=search)
    assert all(ending.exit_code == 0 for ending in found.ranks), found.output
    return found


def _milliseconds(job: Job) -> list[float]:
    """Of each restart: until the last rank."""
    return [1000 * max(times) for times in zip(*(result["seconds"] for result in job.results), strict=True)]


def _compared(ranks: int, search: str | None, *, restarts: int, interval: str) -> Number:
    """Restarts while the other ranks are in a loop of Python: NVIDIA's does not get out of a blocked gloo operation."""
    options = "wait=loop" + (f":interval={interval}" if interval else "")
    ours = _milliseconds(_run(f"restart_times:{ranks}:restarts={restarts}:{options}"))
    what = f"raise → function runs on all of {ranks} ranks, {'intervals of 50 ms' if interval else 'default settings'}"
    if search is None:
        return Number(title=what, unit="ms", values=ours)
    job = _run(f"restart_times:{ranks}:restarts={max(3, restarts // 4)}:{options}:package={THEIRS}", search=search)
    middles = [statistics.median(ours)], [statistics.median(_milliseconds(job))]
    return ratio(f"{what}, by NVIDIA's {THEIR_VERSION}", *middles, 1.0 if interval else 0.15, unit="ms")
