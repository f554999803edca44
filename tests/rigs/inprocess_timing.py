"""What the ranks of `tests.rigs.inprocess_ranks` do for the benchmark: with this package, or with NVIDIA's."""

from __future__ import annotations

import importlib
import logging
import os
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.rigs.inprocess_scenarios import Options, connect, join_group, summed

CHUNK = 100
"""Iterations that are timed together."""


def _arguments(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {"store_kwargs": {"port": int(os.environ["MASTER_PORT"])}}
    if "interval" in options:
        interval = timedelta(seconds=float(options["interval"]))
        names = ("monitor_thread", "monitor_process", "progress_watchdog")
        found |= {f"{name}_interval": interval for name in names} | {"last_call_wait": interval}
    return found


def restart_times(rank: int, folder: Path, options: Options) -> dict[str, Any]:
    """So many restarts in one call, each by an exception on another rank.

    Options: ``restarts``; ``package``, this package or another with its names; ``wait``: what the others are in, an
    ``all_reduce`` or a ``loop`` of short sleeps; ``interval``: of all intervals and of the last call, in seconds.

    Returns:
        Seconds from each exception to the function's next start on this rank, by one clock (of one host); resident MiB,
        threads and descriptors after a tenth of the restarts, and at the end.
    """
    logging.getLogger().setLevel(logging.WARNING)
    package = importlib.import_module(options.get("package", "hpc_elastic.inprocess"))
    count, in_group = int(options["restarts"]), options.get("wait", "all_reduce") == "all_reduce"
    seconds: list[float] = []
    sizes: list[list[float]] = []
    moments = connect()

    def function(call: Any = None) -> None:
        started = time.monotonic()
        iteration = call.iteration
        if iteration:
            seconds.append(started - float(moments.get(f"{folder.name}/fault{iteration - 1}")))
        if iteration in (count // 10, count):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            sizes.append([resident, threading.active_count(), len(os.listdir("/proc/self/fd"))])
        meet = f"{folder.name}/met{iteration}"
        if in_group:
            join_group(folder, str(iteration), moments)
            summed()
        else:
            moments.add(meet, 1)
            while moments.add(meet, 0) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.001)
        if iteration < count:
            if rank == iteration % int(os.environ["WORLD_SIZE"]):
                moments.set(f"{folder.name}/fault{iteration}", str(time.monotonic()))
                raise ValueError("planted")
            if in_group:
                summed()
            while True:
                time.sleep(0.001)
        if in_group:
            dist.destroy_process_group()

    function.__annotations__["call"] = package.CallWrapper
    package.Wrapper(**_arguments(options))(function)()
    return {"seconds": seconds, "sizes": sizes}


def overhead(rank: int, folder: Path, options: Options) -> dict[str, float]:
    """A loop of iterations of a millisecond's work each, with a ping, within the call and without it, in turn.

    Returns:
        The CPU time of the whole process for a chunk, in seconds: the median of each.
    """
    logging.getLogger().setLevel(logging.WARNING)
    package = importlib.import_module(options.get("package", "hpc_elastic.inprocess"))
    work = _millisecond()
    found: dict[str, list[float]] = {"plain": [], "wrapped": []}

    def chunk(ping: Any) -> float:
        began = time.process_time()
        for _ in range(CHUNK):
            for _ in range(work):
                pass
            if ping is not None:
                ping()
        return time.process_time() - began

    def function(call: Any = None) -> None:
        for _ in range(8):
            found["wrapped"].append(chunk(call.ping))

    function.__annotations__["call"] = package.CallWrapper
    chunk(None)
    for number in range(int(options.get("turns", "4"))):
        found["plain"] += [chunk(None) for _ in range(8)]
        arguments = _arguments(options)
        arguments["store_kwargs"]["port"] += number
        package.Wrapper(**arguments)(function)()
    return {name: statistics.median(each) for name, each in found.items()}


def _millisecond() -> int:
    """So many turns of an empty loop take a millisecond."""
    best = float("inf")
    for _ in range(10):
        began = time.process_time()
        for _ in range(100_000):
            pass
        best = min(best, time.process_time() - began)
    return int(100_000 * 0.001 / best)
