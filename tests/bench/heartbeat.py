"""What a heartbeat costs the worker, and reading it costs the agent. One process, no run.

::

    python -m tests.bench.heartbeat
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from hpc_elastic.agent.heartbeats import HeartbeatFolder, RoundBeats
from hpc_elastic.worker_api.heartbeat import count_optimizer_steps
from hpc_elastic.worker_api.heartbeat_record import VARIABLE

MOST_MICROSECONDS, MOST_COUNTED_MICROSECONDS = 5.0, 3.0
"""The targets for one `heartbeat`, and for the hook that counts a step of the optimizer."""
_CALLS = 5_000
_REPETITIONS = 15
_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatFigures:
    """Microseconds of CPU time for one call: the median of the repetitions."""

    heartbeat: float
    counted: float
    """The hook after a step of the optimizer; without it the step costs this less."""
    section: float
    idle: float
    """`heartbeat` outside of a run."""
    clock: float
    """`time.time()`, for comparison."""
    read: float
    """The agent's, per worker."""


def measure() -> HeartbeatFigures:
    """Measure in a fresh process each: what a worker has found out about its file it never asks again."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as name:
        beats = RoundBeats(
            HeartbeatFolder(Path(name)), round_index=0, first_rank=0, count=_WORKERS, now=time.monotonic()
        )
        beats.write_lease(2**62, 0)
        spoken = _in_a_process({**os.environ, VARIABLE: beats.paths[0]})
        silent = _in_a_process({key: value for key, value in os.environ.items() if key != VARIABLE})
        read = _microseconds(lambda: beats.read(time.monotonic()), calls=_CALLS // 20) / _WORKERS
    return HeartbeatFigures(
        heartbeat=spoken["heartbeat"],
        counted=spoken["counted"],
        section=spoken["section"],
        idle=silent["heartbeat"],
        clock=spoken["clock"],
        read=read,
    )


def lines(figures: HeartbeatFigures) -> list[str]:
    """For the report."""
    met = "met" if figures.heartbeat <= MOST_MICROSECONDS else "MISSED"
    counted = "met" if figures.counted <= MOST_COUNTED_MICROSECONDS else "MISSED"
    counted = f"target ≤ {MOST_COUNTED_MICROSECONDS:g}: {counted}"
    return [
        "| a worker's heartbeat | µs |",
        "| --- | --- |",
        f"| `hpc_elastic.heartbeat(step=…)` (target ≤ {MOST_MICROSECONDS:g}: {met}) | {figures.heartbeat:.2f} |",
        f"| a counted step of the optimizer ({counted}) | {figures.counted:.2f} |",
        f"| `with hpc_elastic.section(…)`, in and out | {figures.section:.2f} |",
        f"| `heartbeat` outside of a run | {figures.idle:.2f} |",
        f"| `time.time()`, for comparison ({figures.heartbeat / figures.clock:.0f} times that) | {figures.clock:.2f} |",
        f"| reading it, per worker (the agent, as seldom as timeouts allow) | {figures.read:.2f} |",
    ]


def _in_a_process(env: dict[str, str]) -> dict[str, float]:
    argv = [sys.executable, "-m", "tests.bench.heartbeat", "--worker"]
    found: dict[str, float] = json.loads(subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE).stdout)
    return found


def _microseconds(call: Callable[[], object], *, calls: int = _CALLS) -> float:
    times = []
    for _ in range(_REPETITIONS):
        started = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - started) / calls)
    return statistics.median(times) * 1e6


def _worker() -> None:
    import hpc_elastic

    heartbeat, section = hpc_elastic.heartbeat, hpc_elastic.section
    hooks = SimpleNamespace(register_optimizer_step_post_hook=lambda hook: vars(hooks).update(hook=hook))
    sys.modules["torch.optim.optimizer"] = hooks  # type: ignore[assignment]
    count_optimizer_steps()
    optimizer = SimpleNamespace()

    def checkpoint() -> None:
        with section("checkpoint"):
            pass

    figures = {
        "counted": _microseconds(lambda: hooks.hook(optimizer, (), {})) if hasattr(hooks, "hook") else 0.0,
        "heartbeat": _microseconds(lambda: heartbeat(step=7)),
        "section": _microseconds(checkpoint),
        "clock": _microseconds(time.time),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        _worker()
    else:
        print("\n".join(lines(measure())))
