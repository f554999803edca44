"""Workers that are forks of a fork server, beside torchrun's and beside fresh interpreters, on this machine.

The two of a pair take turns, so that whatever else the machine does hits both. A worker is killed once the servers have
imported what the first steps brought along, as they have when a run fails after an hour.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from hpc_elastic.run.paths import RunPaths
from tests.bench.systems import NODES, TORCHRUN, Session, System, ours
from tests.bench.table import Number, ratio
from tests.rigs.event_pairs import read_events

FORKED = ours("forked", "--start-method", "forkserver")
_EIGHT = 8
_QUIET_S = 2.5
"""Longer than the pause after which a server takes in what a worker has imported."""
_LIMIT = 120.0


def measure(*, quick: bool) -> list[Number]:
    """All of them: five minutes, one where `quick`."""
    found = [
        [_restart(system, (repetition + 1) % NODES) for system in (TORCHRUN, FORKED)]
        for repetition in range(1 if quick else 5)
    ]
    (theirs, their_steps), (ours_, our_steps) = (zip(*times, strict=True) for times in zip(*found, strict=True))
    many = _EIGHT if quick else 2 * _EIGHT
    fresh, forked = (_on_one_node(name, many) for name in ("spawn", "forkserver"))
    starts = [(_start(forked), _start(fresh)) for _ in range(1 if quick else 3)]
    eight = starts[0] if quick else [_start(_on_one_node(name, _EIGHT)) for name in ("forkserver", "spawn")]
    forked_seconds, fresh_seconds = ([pair[which].seconds for pair in starts] for which in (0, 1))
    start = f"{many} workers on one node: start → all in the process group, by fresh interpreters'"
    pss = "PSS of 8 workers that have imported torch, the server's own too, by fresh interpreters'"
    third = "third optimizer step done in all 4 ranks"
    return [
        ratio("SIGKILL of a worker → process group up in all 4 ranks, by torchrun's", ours_, theirs, 0.08),
        ratio(f"SIGKILL of a worker → {third}, by torchrun's", our_steps, their_steps, 0.08),
        ratio(start, forked_seconds, fresh_seconds, 0.4),
        ratio(pss, [eight[0].mib], [eight[1].mib], 0.7, unit="MiB"),
    ]


def _on_one_node(method: str, workers: int) -> System:
    return ours(method, "--start-method", method, nodes=1, nproc=workers)


def _restart(system: System, victim: int) -> tuple[float, float]:
    """Seconds from the kill to the process group, and to the third step, of the last rank."""
    with Session(system, "train", limit=_LIMIT) as session:
        session.wait_for_all("step 3", since=session.began)
        if system is FORKED:
            _until_warm(session)
        killed = session.kill_worker(victim)
        third = session.wait_for_all("step 3", since=killed)
        up = session.wait_for_all("group", since=killed)
        session.end_workers()
    print(f"… {system.name}: group {up:.2f} s, third step {third:.2f} s", file=sys.stderr, flush=True)
    return up, third


def _until_warm(session: Session) -> None:
    """Wait until the server of each node has imported what its worker was seen to import, and nothing is new."""
    seen: list[float] = [0.0, time.monotonic()]

    def is_warm() -> bool:
        found = _events(session, "fork_server_ready")
        if len(found) != seen[0]:
            seen[:] = [len(found), time.monotonic()]
        counts = [sum(event["node"] == node for event in found) for node in range(NODES)]
        return min(counts) >= 2 and time.monotonic() - seen[1] > _QUIET_S

    session.wait_until(is_warm, "warm server on each node")


def _events(session: Session, name: str) -> list[dict[str, object]]:
    (run_json,) = (session.folder / "runs").glob("*/run.json")
    return [e for e in read_events(RunPaths(run_json.parent).attempt(0).events) if e["event"] == name]


class Start(NamedTuple):
    seconds: float
    """To the process group."""
    mib: float
    """Of the workers and of the fork server then."""


def _start(system: System) -> Start:
    with Session(system, "torch", limit=_LIMIT) as session:
        seconds = session.wait_for_all("group", since=session.began)
        (agent,) = session.agents()
        pids = [p.pid for p in session.processes() if p.parent == agent.pid and "worker.py" in " ".join(p.argv)]
        mib = sum(_pss(pid) for pid in pids)
        session.end_workers()
    return Start(seconds, mib)


def _pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0
