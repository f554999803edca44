"""What a heartbeat costs the worker, and reading it costs the agent. No run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from hpc_elastic.agent.heartbeats import HeartbeatFolder, RoundBeats
from hpc_elastic.worker_api.heartbeat import count_optimizer_steps
from hpc_elastic.worker_api.records import VARIABLE
from tests.bench.table import Number

_CALLS, _REPETITIONS, _WORKERS = 5_000, 15, 8
_ROWS: tuple[tuple[str, str, float | None], ...] = (
    ("heartbeat", "`hpc_elastic.heartbeat(step=…)`", 5.0),
    ("counted", "a counted step of the optimizer", 3.0),
    ("section", "`with hpc_elastic.section(…)`, in and out", None),
    ("clock", "`time.time()`, for comparison", None),
)


def measure(*, quick: bool) -> list[Number]:
    """Microseconds of CPU, in a fresh process each: what a worker has found out about its file it never asks again."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as name:
        folder = HeartbeatFolder(Path(name))
        beats = RoundBeats(folder, round_index=0, first_rank=0, count=_WORKERS, now=time.monotonic())
        beats.write_lease(2**62, 0)
        inside = _in_a_process({**os.environ, VARIABLE: beats.paths[0]})
        outside = _in_a_process({key: value for key, value in os.environ.items() if key != VARIABLE})
        read = _microseconds(lambda: beats.read(time.monotonic()), calls=_CALLS // 20) / _WORKERS
    rows = [Number(title=title, unit="µs", values=[inside[key]], goal=goal) for key, title, goal in _ROWS]
    rows.append(Number(title="`heartbeat` outside of a run", unit="µs", values=[outside["heartbeat"]]))
    return [*rows, Number(title="reading it, per worker (the agent, rarely)", unit="µs", values=[read])]


def _in_a_process(env: dict[str, str]) -> dict[str, float]:
    argv = [sys.executable, "-m", "tests.bench.heartbeat"]
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

    hooks = SimpleNamespace(register_optimizer_step_post_hook=lambda hook: vars(hooks).update(hook=hook))
    sys.modules["torch.optim.optimizer"] = hooks  # type: ignore[assignment]
    count_optimizer_steps()
    optimizer = SimpleNamespace()

    def checkpoint() -> None:
        with hpc_elastic.section("checkpoint"):
            pass

    figures = {
        "counted": _microseconds(lambda: hooks.hook(optimizer, (), {})) if hasattr(hooks, "hook") else 0.0,
        "heartbeat": _microseconds(lambda: hpc_elastic.heartbeat(step=7)),
        "section": _microseconds(checkpoint),
        "clock": _microseconds(time.time),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    _worker()
