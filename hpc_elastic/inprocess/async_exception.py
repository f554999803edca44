"""Raising an exception in another thread, and raising one again that was swallowed. No torch."""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def async_raise(tid: int, exc_type: type[BaseException], event: threading.Event | None = None) -> None:
    """Raise `exc_type` in another thread, when it executes its next bytecode.

    The ring itself does not use this: a signal reaches a thread in a system call, too.

    Args:
        tid: The thread's ``ident``.
        exc_type: A class; the exception is made there.
        event: Waited for first.

    Raises:
        RuntimeError: there is no such thread.
    """
    if event is not None:
        event.wait()
    if sys.is_finalizing():
        return
    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(tid), ctypes.py_object(exc_type))
    if found != 1:
        raise RuntimeError(f"async_raise: no thread {tid}")


def _is_running(function: Callable[..., Any], ident: int) -> bool:
    """Whether that thread is in a call of `function`."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Iterator[None]:
    """While it lasts: an `exc_type` that a destructor or a callback swallows is raised again in the main thread.

    The ring's own `RankShouldRestart` needs no such thing; for other exceptions, this is it.
    """
    before = sys.unraisablehook
    main = threading.main_thread().ident or 0

    def hook(args: Any) -> None:
        before(args)
        if issubclass(args.exc_type, exc_type) and not sys.is_finalizing():
            # No threading.Thread: its start waits, and the exception would come in there, to be swallowed once more.
            _thread.start_new_thread(raise_outside, ())

    def raise_outside() -> None:
        while _is_running(hook, main):
            time.sleep(0.0005)
        async_raise(main, exc_type)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
