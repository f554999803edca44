"""``hpc_elastic.should_checkpoint``, ``preemption_notice`` and ``on_preemption``: the job is about to end. No torch.

The agents agree on a step, so that all ranks save the same one: a rank reads it from the page that its heartbeats are
written to. Only the process that reports a worker's heartbeats ever sees a notice. For `on_preemption` a thread looks
at that page, five times a second. No signal handler is installed: it works whatever the script does with signals.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from time import CLOCK_BOOTTIME, clock_gettime_ns
from typing import TYPE_CHECKING

from hpc_elastic.worker_api import heartbeat
from hpc_elastic.worker_api.records import STEP_PENDING, Struct


class PreemptionNotice(Struct, frozen=True):
    """The job is going to be ended: by its time limit, a preemption, or ``hpc-elastic requeue``."""

    deadline_ns: int
    """A checkpoint is waited for until then: CLOCK_BOOTTIME of this host, nanoseconds. It may come nearer."""
    step: int | None
    """All ranks save after this step; `None` while it is being agreed on, and where there are no steps to agree on."""
    is_agreed: bool
    """False: the agents are still about to agree; go on training."""

    @property
    def seconds_left(self) -> float:
        """Seconds until `deadline_ns`; never below 0."""
        return max(0.0, (self.deadline_ns - clock_gettime_ns(CLOCK_BOOTTIME)) / 1e9)

    def is_due(self, step: int) -> bool:
        """Return whether to save now, after `step`. Ranks that report their steps are told so after the same one."""
        return self.is_agreed and (self.step is None or step >= self.step)


def preemption_notice() -> PreemptionNotice | None:
    """The notice that this worker's agent has for it, or None. Some microseconds.

    Call it, or `should_checkpoint`, from the first step on: where no worker ever does, no agent waits for a checkpoint.
    """
    notice = _read()
    if notice is not None:
        heartbeat.reporter.pass_on_notice()
    return notice


def _read() -> PreemptionNotice | None:
    found = heartbeat.reporter.read_notice()
    if found is None:
        return None
    step = found.step if found.step >= 0 else None
    return PreemptionNotice(deadline_ns=found.deadline_ns, step=step, is_agreed=found.step != STEP_PENDING)


def should_checkpoint(step: int) -> bool:
    """Report to the agent that `step` is complete; whether to save now because the job is going to be ended.

    For the end of every step, on every rank, with the same count on all: it is a `heartbeat` too. Where it returns
    True, save, call `checkpoint_done`, and either end with 0 or go on; the job is requeued and resumes from there.

    Args:
        step: Whole, 0 or more.

    Returns:
        True from the agreed step on; False otherwise, and outside of a run.

    Raises:
        TypeError, ValueError: as `heartbeat`.
    """
    heartbeat.heartbeat(step)
    notice = _read()
    if notice is None or not notice.is_due(step):
        return False
    heartbeat.reporter.pass_on_notice()
    return True


LOOK_SECONDS = 0.2

if TYPE_CHECKING:
    Callback = Callable[[PreemptionNotice], object]


def on_preemption(callback: Callback) -> Callable[[], None]:
    """Have `callback` called once, with the notice, when it is known when to save.

    It is called in a thread of its own: no place for collectives, which the training loop calls at the same time. Most
    set a flag there, or start to save what needs no other rank; then `checkpoint_done`, or an end with 0, reports that
    all is saved. Where the workers report their steps (`heartbeat`, `should_checkpoint`) the notice has the step after
    which all ranks save. What `callback` raises is printed, and the others are called all the same.

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
    """No locks, which a signal handler could meet: a pop gets an entry once."""

    def __init__(self) -> None:
        self.waiting: dict[int, Callback] = {}
        self._has_started = False

    def start(self) -> None:
        if self._has_started or heartbeat.is_outside():
            return
        self._has_started = True
        # That this worker asks for notices is known from now on, not from the first look of the thread on.
        _read()
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._run, name="hpc_elastic on_preemption", daemon=True).start()

    def _run(self) -> None:
        while _watch is self and not heartbeat.is_outside():
            notice = _read()
            if notice is not None and notice.is_agreed:
                if self.waiting:
                    heartbeat.reporter.pass_on_notice()
                for key in list(self.waiting):
                    if (callback := self.waiting.pop(key, None)) is not None:
                        self._call(callback, notice)
            time.sleep(LOOK_SECONDS)

    def _call(self, callback: Callback, notice: PreemptionNotice) -> None:
        try:
            callback(notice)
        except Exception:
            print("hpc_elastic: a callback of on_preemption failed:", file=sys.stderr)
            traceback.print_exc()


_watch = _Watch()
_keys = count()


def _forget() -> None:
    """A forked child has no thread, and its parent is asked to save."""
    global _watch
    _watch = _Watch()
