"""``hpc_elastic.on_preemption``: have a function called when the job is about to end. No torch.

A thread of this process looks at the page that the agent writes into, as `preemption_notice` does, five times a second.
No signal handler is installed, and none is in the way: it works whatever the script does with signals.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

from hpc_elastic import worker_heartbeat
from hpc_elastic.worker_notice import PreemptionNotice, preemption_notice

LOOK_SECONDS = 0.2

Callback = Callable[[PreemptionNotice], object]


def on_preemption(callback: Callback) -> Callable[[], None]:
    """Have `callback` called once, with the notice, when it is known when to save.

    It is called in a thread of its own: no place for collectives, which the training loop calls at the same time. Most
    set a flag there, or start to save what needs no other rank; then `checkpoint_done`, or an end with 0, says that all
    is saved. Where the workers tell their steps (`heartbeat`, `should_checkpoint`) the notice has the step after which
    all ranks save. What `callback` raises is printed, and the others are called all the same.

    Args:
        callback: Takes the notice. One that comes after the notice is called with it too. In a forked child, a data
            loader's worker for one, and outside of a run it is never called.

    Returns:
        What takes it back; no error where it has been called already.

    Raises:
        TypeError: `callback` can't be called.
    """
    if not callable(callback):
        raise TypeError(f"on_preemption: the callback must be callable, not {type(callback).__name__}")
    watch, key = _watch, next(_keys)
    watch.waiting[key] = callback
    watch.start()

    def take_back() -> None:
        watch.waiting.pop(key, None)

    return take_back


class _Watch:
    """The thread, and for whom it looks. No locks, which a signal handler could meet: a pop gets an entry once."""

    def __init__(self) -> None:
        self.waiting: dict[int, Callback] = {}
        self._has_started = False

    def start(self) -> None:
        if self._has_started or worker_heartbeat.is_outside():
            return
        self._has_started = True
        import threading

        # That this worker heeds notices is known from now on, not from the first look of the thread on.
        preemption_notice()
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._run, name="hpc_elastic on_preemption", daemon=True).start()

    def _run(self) -> None:
        from time import sleep

        while _watch is self and not worker_heartbeat.is_outside():
            notice = preemption_notice()
            if notice is not None and notice.is_agreed:
                for key in list(self.waiting):
                    if (callback := self.waiting.pop(key, None)) is not None:
                        self._call(callback, notice)
            sleep(LOOK_SECONDS)

    def _call(self, callback: Callback, notice: PreemptionNotice) -> None:
        try:
            callback(notice)
        except Exception:
            import sys
            from traceback import print_exc

            print("hpc_elastic: a callback of on_preemption failed:", file=sys.stderr)
            print_exc()


_watch = _Watch()
_keys = count()


def _forget() -> None:
    """In a forked child: the thread is not there, and its parent is the one who is asked to save."""
    global _watch
    _watch = _Watch()
