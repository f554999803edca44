"""Getting the main thread out of the function: a signal whose handler raises `RankShouldRestart`.

The handler raises only where the main thread is inside the frame of `Interruptible.run`: it can't come too late. Where
the exception was swallowed it is raised again, after `GRACE` seconds for what handles it (``finally``, ``except``), or
after the program's own handler of SIGTERM, to which the monitor process gives a grace. No torch.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

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
