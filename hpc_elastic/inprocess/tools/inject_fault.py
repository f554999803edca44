"""Plants one fault on some ranks, after a delay, to try out how a program handles it."""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct

from hpc_elastic.inprocess.iterations import async_raise

logger = logging.getLogger(__name__)


class Fault(enum.Enum):
    """The kinds of faults. Only those of the GPU need one."""

    GPU = enum.auto()
    """A device-side assert, which spoils the CUDA context."""
    GPU_SLEEP = enum.auto()
    """A kernel that does not end."""
    ASYNC_EXC = enum.auto()
    """An exception in the main thread, at its next bytecode."""
    SIGNAL_EXC = enum.auto()
    """An exception in the main thread, by a handler of SIGUSR1."""
    ABORT = enum.auto()
    GIL = enum.auto()
    """C code that holds the interpreter's lock for years."""
    SEGFAULT = enum.auto()
    INT = enum.auto()
    KILL = enum.auto()
    TERM = enum.auto()
    STOP = enum.auto()


class InjectedException(Exception):
    """Raised by `Fault.ASYNC_EXC` and `Fault.SIGNAL_EXC`."""


class Plan(Struct, frozen=True, kw_only=True):
    ranks: tuple[int, ...]
    fault: Fault
    delay: float


def planned(
    faults: Sequence[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    world_size: int,
) -> Plan:
    """The plan of `inject_fault` with the same arguments. Raises ValueError: there is no fault to choose from."""
    if not faults:
        raise ValueError("inject_fault: there is no fault to choose from")
    rng = random.Random(seed)
    seconds = rng.uniform(*delay) if isinstance(delay, tuple) else float(delay)
    wanted = rng.randint(*num_faults) if isinstance(num_faults, tuple) else num_faults
    candidates = range(min(keep_alive, world_size), world_size)
    ranks = rng.sample(candidates, min(wanted, len(candidates)))
    return Plan(ranks=tuple(sorted(ranks)), fault=rng.choice(list(faults)), delay=seconds)


def inject_fault(
    faults: Sequence[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callable[[], Any] | None = None,
) -> None:
    """Plant a fault, and return. Call it on all ranks, with the same arguments.

    Args:
        faults: One of them is chosen.
        num_faults: How many ranks are hit, or the range to choose from.
        keep_alive: Number of ranks that are spared, from rank 0.
        delay: Seconds from now, or the range to choose from.
        seed: Seeds all choices. Give each iteration its own.
        callback: Called on the ranks that are hit, right before.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan = planned(faults, num_faults, keep_alive, delay, seed, world_size)
    if rank not in plan.ranks:
        return
    logger.info("rank %d: %s in %.3f s", rank, plan.fault.name, plan.delay)
    if plan.fault is Fault.SIGNAL_EXC:

        def raise_injected(*_: object) -> None:
            raise InjectedException("injected by a signal")

        signal.signal(signal.SIGUSR1, raise_injected)

    def strike_later() -> None:
        time.sleep(plan.delay)
        if callback is not None:
            callback()
        strike(plan.fault)

    threading.Thread(target=strike_later, name="inject-fault", daemon=True).start()


def strike(fault: Fault) -> None:
    """Cause the fault in this process, now; not every fault returns."""
    main = threading.main_thread().ident or 0
    match fault:
        case Fault.GPU:
            values = torch.zeros(1, device="cuda")
            values[torch.ones(1, dtype=torch.int64, device="cuda")] = 1
            torch.cuda.synchronize()
        case Fault.GPU_SLEEP:
            torch.cuda._sleep(1 << 62)
        case Fault.ASYNC_EXC:
            async_raise(main, InjectedException)
        case Fault.SIGNAL_EXC:
            signal.pthread_kill(main, signal.SIGUSR1)
        case Fault.INT:
            signal.pthread_kill(main, signal.SIGINT)
        case Fault.ABORT:
            os.abort()
        case Fault.GIL:
            re.match(r"(a?){40}a{40}", "a" * 40)
        case Fault.SEGFAULT:
            ctypes.string_at(1)
        case Fault.KILL | Fault.TERM | Fault.STOP:
            os.kill(os.getpid(), signal.Signals[f"SIG{fault.name}"])
