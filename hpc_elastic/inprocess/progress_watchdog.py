"""Detects missing progress: two counters that another thread, and another process, watch change.

The automatic one counts on when the main thread executes bytecode: a *pending call* of the interpreter, which the main
thread makes between two bytecodes, is libc's ``sem_post`` itself. No Python code of ours runs there that could swallow
an exception. The manual one counts the function's own pings, from the first on.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hpc_elastic.base.clock import Staleness

_FIELDS = struct.Struct("=qq?q?")


class Reading(NamedTuple):
    """`manual` counts the function's pings, of which the first arms its timeout; `epoch` changes when both restart."""

    automatic: int = 0
    manual: int = 0
    armed: bool = False
    epoch: int = 0
    paused: bool = False


class ProgressPage:
    """The counters, in memory that a forked process shares. One process writes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, reading: Reading) -> None:
        _FIELDS.pack_into(self._memory, 0, *reading)

    def read(self) -> Reading:
        return Reading(*_FIELDS.unpack_from(self._memory, 0))

    def close(self) -> None:
        self._memory.close()


class StallWatch:
    """Judges when a counter has stood still for too long, by the observer's monotonic clock alone."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ages: Staleness[str] = Staleness()

    def is_stalled(self, reading: Reading, now: float) -> bool:
        if reading.paused:
            self._ages = Staleness()  # both limits begin again afterwards
            return False
        # The epoch is part of what is compared: both counters start again with it.
        automatic = self._ages.observe("automatic", (reading.epoch, reading.automatic), now)
        manual = self._ages.observe("manual", (reading.epoch, reading.manual), now)
        return automatic >= self._limit or (reading.armed and manual >= self._limit)


class _BytecodeProbe:
    """Counts the pending calls that the main thread has made. A process has one, which is never freed: the interpreter
    may hold on to a call for as long as the main thread is away."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._semaphore = ctypes.create_string_buffer(128)  # sem_t has 32 bytes on x86-64 and aarch64
        self._take = libc.sem_trywait
        if libc.sem_init(self._semaphore, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._add.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._lock = threading.Lock()
        self._is_waiting = False
        self._count = 0

    def look(self) -> int:
        with self._lock:
            if self._is_waiting and self._take(self._semaphore) == 0:
                self._is_waiting = False
                self._count += 1
            if not self._is_waiting:
                self._is_waiting = self._add(self._post, ctypes.addressof(self._semaphore)) == 0
            return self._count


_probe: _BytecodeProbe | None = None
_probe_lock = threading.Lock()


def _bytecode_probe() -> _BytecodeProbe:
    global _probe
    with _probe_lock:
        _probe = _probe or _BytecodeProbe()
        return _probe


class ProgressWatchdog:
    """Keeps a page's counters: a thread for the automatic one, `ping` for the manual one."""

    def __init__(self, page: ProgressPage, *, interval: float) -> None:
        self._page = page
        self._interval = interval
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._automatic = self._manual = self._epoch = 0
        self._armed = False
        self._is_held = False
        self._pauses = 0
        self._look: Callable[[Reading], None] | None = None
        self._thread = threading.Thread(target=self._run, name="inprocess-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, look: Callable[[Reading], None] | None) -> None:
        """Call `look` with the counters after each interval, in the watchdog's thread; None: no more."""
        self._look = look

    def ping(self) -> None:
        """Count a sign of the function's progress. The first one of an iteration arms the manual timeout."""
        self._manual += 1
        self._armed = True
        self._write()

    def reset(self) -> None:
        """Restart both timeouts; the manual one is disarmed."""
        self._armed = self._is_held = False
        self._epoch += 1
        self._write()

    def pause(self) -> None:
        """Suspend both timeouts until `resume` was called as often."""
        with self._lock:
            self._pauses += 1
        self._write()

    def resume(self) -> None:
        with self._lock:
            self._pauses -= 1
        self._write()

    def hold(self) -> None:
        """Stop counting until `reset`: a main thread that does not leave, whatever it does, makes no progress."""
        self._is_held = True
        self._write()

    def shutdown(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _write(self) -> None:
        # A main thread that is to leave is not protected: `hold` wins.
        paused = self._pauses > 0 and not self._is_held
        self._page.write(
            Reading(automatic=self._automatic, manual=self._manual, armed=self._armed, epoch=self._epoch, paused=paused)
        )

    def _run(self) -> None:
        probe = _bytecode_probe()
        while not self._stop.wait(self._interval):
            seen = probe.look()
            if not self._is_held:
                self._automatic = seen
            self._write()
            look = self._look
            if look is not None:
                look(self._page.read())


class NeighbourWatch:
    """Finds dead ranks among the next ones: watches one, and all when that was silent for half of `timeout`."""

    def __init__(self, *, rank: int, count: int, timeout: float) -> None:
        self._successors = [(rank + step) % count for step in range(1, count)]
        self._timeout = timeout
        self._ages: Staleness[int] = Staleness()
        self._dead: set[int] = set()
        self._is_suspicious = False

    @property
    def watched(self) -> list[int]:
        left = [rank for rank in self._successors if rank not in self._dead]
        return left if self._is_suspicious else left[:1]

    def look(self, counts: Mapping[int, int], now: float) -> list[int]:
        """The ranks found dead by this look, by the counters of those `watched` and monotonic seconds."""
        silent = {rank: self._ages.observe(rank, count, now) for rank, count in counts.items()}
        found = sorted(rank for rank, seconds in silent.items() if seconds >= self._timeout)
        self._dead.update(found)
        self._is_suspicious = any(seconds >= self._timeout / 2 for seconds in silent.values())
        return found
