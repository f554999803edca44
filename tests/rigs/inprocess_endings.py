"""Yet more for the ranks of `tests.rigs.inprocess_ranks`: how one is ended, who leaves last, whose time is over."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import hpc_elastic.inprocess as inprocess
from hpc_elastic.inprocess import store as ring_store
from hpc_elastic.inprocess.monitor_process import NeighbourWatch
from tests.rigs.inprocess_phases import PATIENT
from tests.rigs.inprocess_scenarios import Options, short_timeouts, store_of
from tests.rigs.processes import is_alive

SAVED = 7
"""The exit code of a rank whose handler of SIGTERM has had its time."""


def stubborn(rank: int, folder: Path, options: Options) -> Any:
    """Rank 1 never leaves the function, rank 2 is stopped; each has a handler of SIGTERM that needs a moment."""

    def save(*_: object) -> NoReturn:
        time.sleep(0.5)
        os._exit(SAVED)

    signal.signal(signal.SIGTERM, save)
    arguments = short_timeouts(
        termination_grace_time=timedelta(seconds=30),
        monitor_process_logfile=str(folder / "monitor-{rank}.log"),
    )

    @inprocess.Wrapper(**arguments, **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        while call.iteration == 0 and rank == 1:
            try:
                time.sleep(1000)
            except BaseException:  # for good, not only some times
                pass
        if call.iteration == 0 and rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if world > 1:
            time.sleep(1000)
        return [own, world]

    return function()


def host_leaves(rank: int, folder: Path, options: Options) -> Any:
    """Rank 0, beside which the store is, gives up at once; the others need that store for a while longer."""
    begun = time.monotonic()

    @inprocess.Wrapper(**short_timeouts(**PATIENT), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        if call.iteration == 0:
            if rank == 0:
                raise inprocess.exception.RestartAbort("enough")
            time.sleep(1000)
        time.sleep(1)
        (folder / f"done-{rank}").write_text(json.dumps(time.monotonic()))
        return [call.iteration, int(os.environ["WORLD_SIZE"])]

    try:
        return function()
    except inprocess.exception.RestartAbort:
        done = [json.loads((folder / f"done-{other}").read_text()) for other in (1, 2)]
        return ["left after all others", all(begun < each < time.monotonic() for each in done)]


def completion_is_late(rank: int, folder: Path, options: Options) -> Any:
    """Rank 0 is done, and rank 1 is not within the completion timeout."""
    timeouts = short_timeouts(**PATIENT, completion_timeout=timedelta(seconds=1))

    @inprocess.Wrapper(**timeouts, **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        if rank == 1 and call.iteration == 0:
            time.sleep(1000)
        return [call.iteration, int(os.environ["WORLD_SIZE"])]

    return function()


def nobody_else_comes(rank: int, folder: Path, options: Options) -> Any:
    """Rank 1 makes no call: the initial barrier does not come about."""
    if rank == 1:
        return None
    seconds = {"soft": 0.2, "hard": 0.4, "heartbeat": 0.5, "barrier": 1.0}
    timeouts = {f"{name}_timeout": timedelta(seconds=value) for name, value in seconds.items()}
    intervals = {
        f"{name}_interval": timedelta(seconds=0.1)
        for name in ("monitor_thread", "monitor_process", "progress_watchdog")
    }

    @inprocess.Wrapper(**timeouts, **intervals, **store_of(folder, options))
    def function() -> None:
        pass

    return function()


def dies_at_the_first_barrier(rank: int, folder: Path, options: Options) -> Any:
    """Rank 2 has come to the initial barrier, and is dead when the others come."""
    pid_of_2 = folder / "pid"

    def die_at_the_barrier() -> None:
        main = threading.main_thread().ident or 0
        while True:
            frame = sys._current_frames().get(main)
            while frame is not None and frame.f_code is not ring_store._meet.__code__:
                frame = frame.f_back
            if frame is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)

    if rank == 2:
        pid_of_2.with_suffix(".new").write_text(str(os.getpid()))
        pid_of_2.with_suffix(".new").rename(pid_of_2)
        threading.Thread(target=die_at_the_barrier, daemon=True).start()
    while rank == 1 and (not pid_of_2.exists() or is_alive(int(pid_of_2.read_text()))):
        time.sleep(0.01)

    @inprocess.Wrapper(**short_timeouts(**PATIENT), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        return [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]

    return function()


def monitor_fails(rank: int, folder: Path, options: Options) -> Any:
    """The monitor process of rank 1 meets an error of its own once the function runs."""
    runs = folder / "runs"

    def fail(watch: NeighbourWatch, *_: object) -> list[int]:
        if runs.exists():
            raise ValueError("planted in the monitor process")
        return []

    if rank == 1:
        NeighbourWatch.look = fail  # type: ignore[method-assign, assignment]

    @inprocess.Wrapper(**short_timeouts(**PATIENT), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        if call.iteration == 0:
            if rank == 1:
                runs.touch()
            time.sleep(1000)
        return [call.iteration, int(os.environ["WORLD_SIZE"])]

    return function()
