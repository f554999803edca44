"""A start, a worker's SIGKILL and an agent's memory, beside torchrun's: 4 nodes with 1 worker each, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.bench.systems import NODES, OURS, ROOT, TORCHRUN, Session, System
from tests.bench.table import Number, ratio
from tests.rigs.processes import resident_mb

_ROWS = (
    ("start → last worker's first line, by torchrun's", 0.25),
    ("SIGKILL of a worker → last worker's first line, by torchrun's", 0.1),
    ("start → process group up in all ranks, by torchrun's", None),
    ("SIGKILL of a worker → process group up in all ranks, by torchrun's", 0.6),
)


def measure(*, quick: bool) -> list[Number]:
    """Five minutes; one where `quick`."""
    found: dict[str, list[tuple[float, ...]]] = {OURS.name: [], TORCHRUN.name: []}
    sizes: list[float] = []
    for repetition in range(1 if quick else 5):
        for system in (TORCHRUN, OURS):
            plain = _kill(system, "plain", "line", repetition % NODES)
            found[system.name].append(plain + _kill(system, "torch", "group", repetition % NODES, sizes))
    pairs = zip(_ROWS, zip(*found[OURS.name], strict=True), zip(*found[TORCHRUN.name], strict=True), strict=True)
    rows = [ratio(title, ours, theirs, goal) for (title, goal), ours, theirs in pairs]
    rows.append(Number(title="agent, resident, the largest of them", unit="MB", values=sizes, goal=32))
    command = [os.path.join(os.path.dirname(sys.executable), "hpc-elastic"), "--help"]
    helps, bare = (_wall(argv, 3 if quick else 11) for argv in (command, [sys.executable, "-c", "pass"]))
    return [*rows, ratio("`hpc-elastic --help`, by `python -c pass`", helps, bare, 10)]


def _kill(system: System, kind: str, last: str, victim: int, sizes: list[float] | None = None) -> tuple[float, float]:
    """Seconds from the start, and from a worker's SIGKILL, to a moment of the last rank. The job ends with 0."""
    with Session(system, kind) as session:
        start = session.wait_for_all(last, since=session.began)
        if sizes is not None and system is OURS:
            sizes.append(max(resident_mb(agent.pid) for agent in session.agents()))
        again = session.wait_for_all(last, since=session.kill_worker(victim))
        session.end_workers()
    return start, again


def _wall(argv: list[str], repetitions: int) -> list[float]:
    times = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=60, check=True)
        times.append(time.perf_counter() - began)
    return times[1:]  # the first one warms the disk's cache
