"""What the ranks of `tests.rigs.inprocess_ranks` do. Each takes initial rank, folder and options, and returns JSON."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpc_elastic.inprocess as inprocess
from hpc_elastic.inprocess.abort import cut, open_sockets, ports
from hpc_elastic.inprocess.progress_watchdog import RankShouldRestart
from hpc_elastic.inprocess.tools.inject_fault import Fault, strike
from tests.rigs.swallowing import in_c_callback, in_destructor, in_except, in_generator

Options = dict[str, str]

GLOO_TIMEOUT = timedelta(seconds=60)
"""Far longer than any scenario may take: what waits it out fails."""


def store_of(folder: Path, options: Options, port_offset: int = 0) -> dict[str, Any]:
    """The wrapper's arguments for the store that the options name."""
    kind = options.get("store", "tcp")
    if kind == "shared":
        path = folder / "ring"
        return {"store_factory": inprocess.store.SharedFileStore, "store_kwargs": {"path": str(path)}}
    if kind == "file":
        kwargs = {"file_name": str(folder / "ring-file")}
        return {"store_factory": inprocess.store.FileStore, "store_kwargs": kwargs}
    return {"store_kwargs": {"port": int(os.environ["MASTER_PORT"]) + port_offset}}


def short_timeouts(**other: Any) -> dict[str, Any]:
    """Of a rank that hangs: 3 s to the interruption, 9 s to the kill (a busy machine must hit no healthy one)."""
    return {
        "soft_timeout": timedelta(seconds=3),
        "hard_timeout": timedelta(seconds=9),
        "heartbeat_timeout": timedelta(seconds=20),
        "barrier_timeout": timedelta(seconds=40),
        "progress_watchdog_interval": timedelta(seconds=0.1),
        "monitor_thread_interval": timedelta(seconds=0.1),
        "monitor_process_interval": timedelta(seconds=0.1),
        "termination_grace_time": timedelta(seconds=0.3),
        **other,
    }


def connect() -> dist.TCPStore:
    """To the rig's server, for the groups of one scenario: before it begins, where that is no part of what is tried.

    torch 2.13 takes 5 s for a new connection now and then: longer than a healthy rank may show no progress here.
    """
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["GROUP_STORE_PORT"]), is_master=False, timeout=GLOO_TIMEOUT
    )


def join_group(folder: Path, name: str, store: dist.Store | None = None) -> None:
    """A gloo group of the ranks that are active now, over the rig's server: as under an agent, which serves a store."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store or connect()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"{folder.name}/{name}", store),
        rank=rank,
        world_size=world_size,
        timeout=GLOO_TIMEOUT,
    )


def summed() -> float:
    """How many ranks take part in an all-reduce."""
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value.item())


def counted_run(folder: Path, name: str, fault: Callable[[], None] | None, arguments: dict[str, Any]) -> Any:
    """One wrapped call; `fault` happens in its first iteration, while all others are in a collective.

    Returns:
        The last iteration's number, the ranks that took part in it, the rank and world size, and the seconds from the
        fault to the function's next start.
    """
    seconds: list[float] = []
    store = connect()

    @inprocess.Wrapper(**arguments)
    def function(call: inprocess.CallWrapper) -> list[float]:
        if seconds:
            seconds[0] = time.monotonic() - seconds[0]
        else:
            seconds.append(time.monotonic())  # another rank's fault may come while this one is still on its way
        join_group(folder, f"{name}-{call.iteration}", store)
        together = summed()
        if call.iteration == 0:
            seconds[0] = time.monotonic()
            if fault is not None:
                fault()
            summed()  # never comes about: a rank is missing
        dist.destroy_process_group()
        return [call.iteration, together, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]

    return [*function(), seconds[0]]


def traces() -> dict[str, Any]:
    """What a call might leave behind in this process."""
    gc.collect()
    children = [int(pid) for pid in Path("/proc/self/task").glob("*/children") for pid in pid.read_text().split()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": children,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "handler": str(signal.getsignal(signal.SIGRTMIN + 9)),
        "frozen": gc.get_freeze_count(),
        "helper": dist.distributed_c10d._new_process_group_helper.__name__,
        "interruptible": len(inprocess.progress_watchdog.Interruptible.__mro__),
    }


# --- faults of the function that do not end the process


def _raise() -> None:
    raise ValueError("planted")


def _ask_for_a_restart() -> None:
    raise RankShouldRestart("as I please")


def gentle_faults(rank: int, folder: Path, options: Options) -> dict[str, Any]:
    """One call after the other in the same processes: rank 1's fault, while the others are where `elsewhere` says."""
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Callable[[], None], Callable[[], None] | None]] = {
        "exception": (_raise, None),
        "own_wish": (_ask_for_a_restart, None),
        "except": (_raise, in_except),
        "destructor": (_raise, in_destructor),
        "generator": (_raise, in_generator),
        "c_callback": (_raise, in_c_callback),
        "never_ending_sleep": (lambda: time.sleep(1000), None),
    }
    before = None
    for number, (name, (fault, elsewhere)) in enumerate(cases.items()):
        arguments = store_of(folder, options, number)
        if name == "never_ending_sleep":
            arguments |= short_timeouts(hard_timeout=timedelta(seconds=30))
        found[name] = counted_run(folder, name, fault if rank == 1 else elsewhere, arguments)
        if before is None:
            before = traces()  # torch itself keeps a descriptor or a thread from its first group on
    found["before"], found["after"] = before, traces()
    return found


def hooks(rank: int, folder: Path, options: Options) -> list[str]:
    """Rank 1 fails in `initialize`, then in the health check, then in the function; what was called, in order."""
    seen: list[str] = []

    class Start(inprocess.initialize.Initialize):
        def __call__(self, state: Any) -> Any:
            seen.append(f"initialize {state.iteration}")
            if state.iteration == 0 and rank == 1:
                raise ValueError("planted")
            return state

    class Check(inprocess.health_check.HealthCheck):
        def __call__(self, state: Any, train_ex: Exception | None = None) -> Any:
            seen.append(f"check {type(train_ex).__name__}")
            if rank == 1 and state.iteration == 1 and state.status is inprocess.state.Status.ACTIVE:
                raise KeyError("planted")
            return state, train_ex

    class End(inprocess.finalize.Finalize):
        def __call__(self, state: Any, train_ex: Exception | None = None) -> Any:
            seen.append(f"finalize {type(train_ex).__name__}")
            return state, train_ex

    class Stop(inprocess.abort.AbortTorchDistributed):
        def __call__(self, state: Any) -> Any:
            seen.append(f"abort {threading.current_thread() is threading.main_thread()}")
            return super().__call__(state)

    @inprocess.Wrapper(
        initialize=Start(), abort=Stop(), finalize=End(), health_check=Check(), **store_of(folder, options)
    )
    def function(call: inprocess.CallWrapper) -> None:
        seen.append(f"function {call.iteration}")
        join_group(folder, str(call.iteration))
        summed()
        if call.iteration == 2:
            if rank == 1:
                raise ValueError("planted")
            summed()
        dist.destroy_process_group()

    function()
    return seen


def leaving(rank: int, folder: Path, options: Options) -> Any:
    """The last rank leaves as the option `how` says; the others finish without it."""
    how = options["how"]
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1

    class End(inprocess.finalize.Finalize):
        def __call__(self, state: Any, train_ex: Exception | None = None) -> Any:
            if how == "finalize" and is_last:
                raise KeyError("finalize")
            return state, train_ex

    class Check(inprocess.health_check.HealthCheck):
        def __call__(self, state: Any, train_ex: Exception | None = None) -> Any:
            if how == "health_check" and is_last and state.status is inprocess.state.Status.ABORTED:
                raise KeyError("check")
            return state, train_ex

    def fault() -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "abort":
            raise inprocess.exception.RestartAbort("enough")
        raise ValueError("planted")

    arguments = {"finalize": End(), "health_check": Check(), **store_of(folder, options)}
    return counted_run(folder, "leaving", fault if is_last else None, arguments)


def deaths(rank: int, folder: Path, options: Options) -> Any:
    """In each iteration the last rank meets the next of the faults named; rank 0 is left."""
    faults = options["faults"].split(",")
    first = int(os.environ["WORLD_SIZE"])
    seen: list[list[int]] = []
    store = connect()

    arguments = short_timeouts()
    if not {"gil", "stop"} & set(faults):  # nobody hangs: nobody's silence is to be judged
        arguments |= {"soft_timeout": timedelta(seconds=25), "hard_timeout": timedelta(seconds=35)}

    @inprocess.Wrapper(**arguments, **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[list[int]]:
        world = int(os.environ["WORLD_SIZE"])
        seen.append([call.iteration, int(os.environ["RANK"]), world])
        join_group(folder, str(call.iteration), store)
        summed()
        if call.iteration < len(faults):
            victim = int(options["victim"]) if "victim" in options else first - 1 - call.iteration
            if rank == victim:
                die(faults[call.iteration])
            summed()
        dist.destroy_process_group()
        return seen

    return function()


def die(how: str) -> None:
    """By the code of `inject_fault`; a signal of the process' own may take a moment."""
    strike(Fault[how.upper()])
    time.sleep(1000)


def lost_node(rank: int, folder: Path, options: Options) -> Any:
    """The last rank and its monitor process die together: nobody is left to say so."""
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1

    arguments = short_timeouts(
        soft_timeout=timedelta(seconds=20),
        hard_timeout=timedelta(seconds=30),
        heartbeat_timeout=timedelta(seconds=5),
    )
    # In a sleep, not in a collective: gloo would see the other end closed.
    elsewhere = lambda: time.sleep(1000)  # noqa: E731
    return counted_run(
        folder, "lost", (lambda: lose("node")) if is_last else elsewhere, {**arguments, **store_of(folder, options)}
    )


def lost_host(rank: int, folder: Path, options: Options) -> Any:
    """The victim loses what the option `what` says: its node, that serves the store, or less of it."""
    seen: list[list[int]] = []
    arguments = short_timeouts(
        soft_timeout=timedelta(seconds=40),
        hard_timeout=timedelta(seconds=50),
        barrier_timeout=timedelta(seconds=60),
        heartbeat_timeout=timedelta(seconds=10),
    )
    store = connect()
    began = time.monotonic()

    @inprocess.Wrapper(**arguments, **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[list[int]]:
        nonlocal began
        world = int(os.environ["WORLD_SIZE"])
        seen.append([call.iteration, int(os.environ["RANK"]), world])
        join_group(folder, str(call.iteration), store)
        assert summed() == world
        began = time.monotonic()
        if call.iteration == 0:
            if rank == int(options["victim"]):
                lose(options["what"])
            (summed if options.get("elsewhere") == "collective" else lambda: time.sleep(1000))()
        dist.destroy_process_group()
        return seen

    try:
        result: Any = function()
    except inprocess.exception.InternalError as error:
        result = [f"InternalError: {error}", time.monotonic() - began]
    return [result, traces()["children"]]


def lose(what: str) -> None:
    """This rank's node, or its monitor process, or its connections to the restart group's store."""
    if what == "connection":
        for fd, inode in open_sockets().items():
            if ports(fd)[1] == int(os.environ["MASTER_PORT"]):
                cut(fd, inode)
        return
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            os.kill(int(child), signal.SIGKILL)
    if what == "node":
        os.kill(os.getpid(), signal.SIGKILL)


def spares(rank: int, folder: Path, options: Options) -> Any:
    """Four ranks, two of which are active; rank 0's function fails for good, and a spare takes over."""
    started: list[int] = []

    class Stop(inprocess.initialize.Initialize):
        def __call__(self, state: Any) -> Any:
            if rank == 1 and state.iteration == 1:
                raise inprocess.exception.RestartAbort("rank 1 has had enough")
            return state

    @inprocess.Wrapper(
        initialize=Stop(),
        rank_filter=inprocess.rank_filter.MaxActiveWorldSize(2),
        **store_of(folder, options),
    )
    def function(call: inprocess.CallWrapper) -> str:
        started.append(call.iteration)
        join_group(folder, str(call.iteration))
        together = summed()
        if call.iteration == 0:
            if rank == 1:
                raise ValueError("planted")
            summed()
        dist.destroy_process_group()
        return f"{together:g} of {os.environ['WORLD_SIZE']}"

    return [function(), started]


def pings(rank: int, folder: Path, options: Options) -> Any:
    """Rank 1 pings once and then loops: only the manual timeout can see that."""

    @inprocess.Wrapper(**short_timeouts(hard_timeout=timedelta(seconds=30)), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> int:
        if call.iteration == 0:
            if rank == 1:
                call.ping()
            while rank == 1 or call.iteration == 0:
                time.sleep(0.01)
        return call.iteration

    return function()


def protected(rank: int, folder: Path, options: Options) -> Any:
    """Rank 1 makes no progress for longer than the soft timeout, where that is allowed; then where it is not."""

    @inprocess.Wrapper(**short_timeouts(hard_timeout=timedelta(seconds=30)), **store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[int]:
        if call.iteration == 0:
            with call.disable_hang_protection(), call.disable_hang_protection():
                time.sleep(6.0 if rank == 1 else 0.0)
            passed.append(call.iteration)
            while rank == 0:
                time.sleep(0.01)
            time.sleep(1000)
        return passed

    passed: list[int] = []
    return function()


def nested(rank: int, folder: Path, options: Options) -> Any:
    """A wrapped call in a wrapped call: the inner one restarts alone, then the outer one restarts both."""
    seen: list[str] = []

    def inner(outer: inprocess.CallWrapper) -> str:
        arguments = store_of(folder, options, 1 + outer.iteration)

        @inprocess.Wrapper(**arguments)
        def function(call: inprocess.CallWrapper) -> str:
            seen.append(f"{outer.iteration}.{call.iteration}")
            if call.iteration == 0 and rank == 1 and outer.iteration == 0:
                raise ValueError("inner")
            if call.iteration == 0 and outer.iteration == 0:
                time.sleep(1000)
            return seen[-1]

        return function()

    @inprocess.Wrapper(**store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> list[str]:
        inner(call)
        if call.iteration == 0:
            if rank == 1:
                raise ValueError("outer")
            time.sleep(1000)
        return seen

    return function()


def held_tensors(rank: int, folder: Path, options: Options) -> Any:
    """Whether what the function held is gone when it starts again, and after the call."""
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Holder:
        pass

    @inprocess.Wrapper(**store_of(folder, options))
    def function(call: inprocess.CallWrapper) -> int:
        alive.append(sum(each() is not None for each in held))
        mine = Holder()
        mine.me = mine  # type: ignore[attr-defined]
        held.append(weakref.ref(mine))
        if call.iteration < 3:
            if rank == call.iteration % 2:
                raise ValueError("planted")
            time.sleep(1000)
        return call.iteration

    result = function()
    gc.collect()
    return [result, alive, sum(each() is not None for each in held)]
