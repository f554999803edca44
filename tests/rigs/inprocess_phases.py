"""More for the ranks of `tests.rigs.inprocess_ranks`: deaths in each phase, several faults at once, groups and gaps."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hpc_elastic.inprocess as inprocess
from tests.rigs.inprocess_scenarios import Options, connect, join_group, short_timeouts, store_of, summed
from tests.rigs.processes import is_alive

PATIENT = {"soft_timeout": timedelta(seconds=25), "hard_timeout": timedelta(seconds=35)}
"""Nobody hangs in these; a busy machine is to interrupt nobody."""


def kill_soon(seconds: float) -> None:
    """This process, while its main thread goes on to where it waits for the others."""

    def strike() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


class Stage:
    """Which phase the last rank dies in, in each iteration; rank 0 keeps it waiting there where that is needed."""

    def __init__(self, phases: list[str], folder: Path) -> None:
        self.phases = phases
        self.folder = folder

    def meets(self, phase: str, state: Any) -> bool:
        return state.iteration < len(self.phases) and self.phases[state.iteration] == phase

    def happen(self, phase: str, state: Any, *, soon: bool = False) -> None:
        if not self.meets(phase, state):
            return
        if state.rank == state.world_size - 1 and state.rank:
            if soon:
                (self.folder / f"victim-{state.iteration}-{os.getpid()}").touch()
                kill_soon(0.1)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        elif soon and state.world_size > 1 and state.rank == 0:
            deadline = time.monotonic() + 20
            while not self._victim_is_dead(state.iteration) and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(1.2)  # for the word of its monitor process, which looks ten times a second

    def _victim_is_dead(self, iteration: int) -> bool:
        names = (path.name for path in self.folder.glob(f"victim-{iteration}-*"))
        return any(not is_alive(int(name.rpartition("-")[2])) for name in names)

    def hooks(self) -> dict[str, Any]:
        stage = self

        class Stop(inprocess.abort.AbortTorchDistributed):
            def __call__(self, state: Any) -> Any:
                stage.happen("abort", state)
                return super().__call__(state)

        class End(inprocess.finalize.Finalize):
            def __call__(self, state: Any, train_ex: Exception | None = None) -> Any:
                stage.happen("finalize", state)
                return state, train_ex

        class Check(inprocess.health_check.HealthCheck):
            def __call__(self, state: Any, train_ex: Exception | None = None) -> Any:
                if state.status is inprocess.state.Status.ABORTED:
                    stage.happen("check", state)
                    stage.happen("terminating", state, soon=True)
                else:
                    stage.happen("check before", state)
                return state, train_ex

        class Start(inprocess.initialize.Initialize):
            def __call__(self, state: Any) -> Any:
                stage.happen("initialize", state)
                return state

        class Assign(inprocess.rank_assignment.ShiftRanks):
            def __call__(self, state: Any, terminated_ranks: Any) -> Any:
                state, left = super().__call__(state, terminated_ranks)
                stage.happen("assign", state)
                stage.happen("starting", state, soon=True)
                return state, left

        return {
            "abort": Stop(), "finalize": End(), "health_check": Check(), "initialize": Start(),
            "rank_assignment": Assign(),
        }  # fmt: skip


def phases(rank: int, folder: Path, options: Options) -> Any:
    """In each iteration the last rank dies in the next of the phases named; those after a fault begin with rank 0's.

    Returns:
        Of each iteration in which the function ran on this rank: iteration, rank, world size.
    """
    stage = Stage(options["phases"].replace("-", " ").split(","), folder)
    seen: list[list[int]] = []

    @inprocess.Wrapper(**short_timeouts(**PATIENT), **stage.hooks(), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[list[int]]:
        own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        seen.append([call.iteration, own, world])
        join_group(folder, str(call.iteration))  # a store of its own: who waits in it is freed
        assert summed() == world
        if call.iteration < len(stage.phases):
            phase = stage.phases[call.iteration]
            if phase == "completing":
                if own == world - 1:
                    kill_soon(0.1)
                    dist.destroy_process_group()
                    return seen  # done: it waits for the others
            elif phase in ("abort", "finalize", "check", "terminating") and own == 0:
                raise ValueError("planted")
            time.sleep(1000)
        dist.destroy_process_group()
        return seen

    return function()


def meet(store: Any, key: str, count: int) -> None:
    """Wait until `count` ranks have called this."""
    store.add(key, 1)
    while store.add(key, 0) < count:
        time.sleep(0.001)


def at_once(rank: int, folder: Path, options: Options) -> Any:
    """Several faults in one iteration: exceptions on ranks 0 and 1, a KeyboardInterrupt on the one before the last,
    the last one killed; each as soon as all have met."""
    store = connect()

    @inprocess.Wrapper(**short_timeouts(**PATIENT), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        join_group(folder, str(call.iteration), store)
        if call.iteration == 0:
            try:
                meet(store, f"{folder.name}/met", world)
            finally:  # also where another's fault came first
                if own == world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if own == world - 2:
                    raise KeyboardInterrupt
            if own < 2:
                raise ValueError("planted")
            time.sleep(1000)
        together = summed()
        dist.destroy_process_group()
        return [call.iteration, own, world, int(together)]

    return function()


def assigned(rank: int, folder: Path, options: Options) -> Any:
    """Rank 1 is killed, and the others are given their numbers as the option `how` says."""
    hooks = inprocess.rank_assignment
    pairs = hooks.FilterGroupedByKey(str(rank // 2), lambda count: count == 2)
    chosen = {
        "gaps": hooks.FillGaps(),
        "pairs": inprocess.Compose(hooks.ShiftRanks(), pairs),
    }[options["how"]]
    store = connect()
    inner: Any = chosen

    @inprocess.Wrapper(rank_assignment=inner, **short_timeouts(**PATIENT), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        join_group(folder, str(call.iteration), store)
        together = summed()
        if call.iteration == 0:
            if own == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            summed()
        dist.destroy_process_group()
        return [call.iteration, own, world, int(together)]

    return function()
