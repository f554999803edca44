"""Watches the main thread's progress from outside, and gets it out of the function. It needs nothing but Python.

Progress is two counters that another thread, and another process, watch change.
The automatic one counts on when the main thread executes bytecode: a *pending call* of the interpreter, which the main
thread makes between two bytecodes, is libc's ``sem_post`` itself. No Python code of ours runs there that could swallow
an exception. The manual one counts the function's own pings, from the first on.

What gets it out is a signal whose handler raises `RankShouldRestart`, only where the main thread is inside the frame of
`Interruptible.run`: it can't come too late. Where the exception was swallowed it is raised again, after `GRACE` seconds
for what handles it (``finally``, ``except``), or after the program's own handler of SIGTERM, to which the monitor
process gives a grace.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import mmap
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeVar

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


logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE = 10.0
"""Seconds for code that runs because of the exception, before it is raised there again."""
REPEAT = 0.05


class RankShouldRestart(BaseException):
    """Raised in the main thread to get it out of the wrapped function. Let it pass.

    A function that raises it itself asks for a restart: all ranks are started again, and this one caused it.
    """

    owner: object = None
    """The call that it belongs to: each of nested calls takes its own. None: the function itself raised it, for the
    innermost."""


class Interruptible:
    """A part of the main thread's work that another thread may interrupt, once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._frame: FrameType | None = None
        self._wanted: str | None = None
        self._raised: RankShouldRestart | None = None
        self._raised_at = 0.0
        self._places: list[str] = []
        self._left = threading.Event()

    @property
    def is_wanted(self) -> bool:
        return self._wanted is not None

    def run(self, body: Callable[[], T]) -> T:
        """Call `body` in the main thread. An interruption raises RankShouldRestart, whose `owner` is this object."""
        self._frame = sys._getframe()
        _active.append(self)
        try:
            return body()
        finally:
            self._leave()

    def interrupt(self, why: str) -> None:
        """Make the main thread leave `run`. Any thread may call it any number of times; it returns at once."""
        if self._wanted is None:
            self._wanted = why
        if self._frame is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def wait_until_left(self, seconds: float) -> bool:
        """Interrupt the main thread repeatedly, for up to `seconds`; returns whether it is out of `run`."""
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0:
            if self._left.wait(min(left, REPEAT)):
                return True
            self.interrupt(self._wanted or "")
        return self._left.is_set()

    def insist(self, stop: threading.Event) -> None:
        """Interrupt repeatedly until the main thread has left, or `stop` is set."""
        while not self._left.wait(REPEAT) and not stop.is_set():
            self.interrupt(self._wanted or "")
        for place in self._places[:-1]:
            logger.debug("RankShouldRestart was swallowed; it had been raised at %s", place)

    def close(self) -> None:
        """Forget what happened: it may hold the function's frames."""
        self._leave()
        self._raised = None

    def _leave(self) -> None:
        self._frame = None
        if self in _active:
            _active.remove(self)
        self._left.set()

    def raise_if_inside(self, frame: FrameType | None) -> None:
        """Called in the main thread, by the signal's handler."""
        target = self._frame
        if self._wanted is None or target is None:
            return
        place, at_the_end = frame, getattr(signal.getsignal(signal.SIGTERM), "__code__", None)
        while frame is not None and frame is not target:
            if frame.f_code is at_the_end:
                return
            frame = frame.f_back
        if frame is None:
            return
        if self._is_on_its_way(sys.exc_info()[1]) and self._clock() - self._raised_at < GRACE:
            return
        error = RankShouldRestart(self._wanted)
        error.owner = self
        self._raised, self._raised_at = error, self._clock()
        if place is not None:
            self._places.append(f"{place.f_code.co_filename}:{place.f_lineno}")
        raise error

    def _is_on_its_way(self, handled: BaseException | None) -> bool:
        seen: set[int] = set()
        while handled is not None and id(handled) not in seen:
            if handled is self._raised:
                return True
            seen.add(id(handled))
            handled = handled.__context__
        return False


SIGNAL = signal.SIGRTMIN + 9
"""A real-time signal that neither Python, torch, NCCL nor Slurm uses; taken while a wrapped call lasts."""

_active: list[Interruptible] = []
_abort = threading.local()


def set_aborted(part: Interruptible | None) -> None:
    """Set the part of the main thread's work that this thread, which aborts, interrupts."""
    _abort.part = part


def aborted() -> Interruptible | None:
    """The part that this thread aborts; None where it aborts no wrapped call."""
    found: Interruptible | None = getattr(_abort, "part", None)
    return found


def _handle(signum: int, frame: FrameType | None) -> None:
    for each in tuple(_active):
        each.raise_if_inside(frame)


class SignalHandler:
    """Takes the signal for a ``with`` block; afterwards it is as it was."""

    def __enter__(self) -> SignalHandler:
        self._before: Any = signal.signal(SIGNAL, _handle)
        return self

    def __exit__(self, *_: object) -> None:
        # The thread that sends it has ended, and the main thread has executed bytecode since: none is on its way.
        signal.signal(SIGNAL, signal.SIG_DFL if self._before is None else self._before)


def async_raise(tid: int, exc_type: type[BaseException], event: threading.Event | None = None) -> None:
    """Raise `exc_type`, a class, in the thread with ident `tid`, when it executes its next bytecode, after `event`."""
    if event is not None:
        event.wait()
    if sys.is_finalizing():
        return
    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(tid), ctypes.py_object(exc_type))
    if found != 1:
        raise RuntimeError(f"async_raise: no thread {tid}")


@contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Iterator[None]:
    """Raise an `exc_type` that a destructor or a callback swallows again in the main thread, within a ``with`` block.

    `RankShouldRestart` does not need it: it is raised again anyway.
    """
    before = sys.unraisablehook
    main = threading.main_thread().ident or 0

    def hook(args: Any) -> None:
        before(args)
        if issubclass(args.exc_type, exc_type) and not sys.is_finalizing():
            # No threading.Thread: its start waits, and the exception would come in there, to be swallowed once more.
            _thread.start_new_thread(raise_outside, ())

    def raise_outside() -> None:
        while hook.__code__ in [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames().get(main))]:
            time.sleep(0.0005)
        async_raise(main, exc_type)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
