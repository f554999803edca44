"""The thread that watches one iteration: it notices a fault anywhere, aborts, and gets the main thread out."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from hpc_elastic.inprocess.interrupt import (
    Interruptible,
    RankShouldRestart,
    async_raise,
    reraise_if_unraisable,
    set_aborted,
)
from hpc_elastic.inprocess.progress_watchdog import Reading, StallWatch
from hpc_elastic.inprocess.state import Interruption, InterruptionRecord, State, Status, format_interruption_records
from hpc_elastic.inprocess.store import INTERRUPTED

if TYPE_CHECKING:
    from hpc_elastic.inprocess.iterations import Rank

__all__ = ["MonitorThread", "RankShouldRestart", "SoftTimeout", "async_raise", "reraise_if_unraisable"]

logger = logging.getLogger(__name__)


class SoftTimeout:
    """Interrupts the iteration, once, when this rank shows no progress."""

    def __init__(self, *, state: State, store: Any, limit: float) -> None:
        self._state = state
        self._store = store
        self._limit = limit
        self._stall = StallWatch(limit)
        self._has_reported = False

    def look(self, reading: Reading) -> None:
        if self._has_reported or not self._stall.is_stalled(reading, time.monotonic()):
            return
        self._has_reported = True
        logger.warning("rank %d shows no progress for %g s", self._state.rank, self._limit)
        try:
            self._store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.SOFT_TIMEOUT))
        except RuntimeError as error:
            logger.warning("rank %d: the restart group's store fails: %s", self._state.rank, error)


class MonitorThread(threading.Thread):
    """One iteration's watcher. It ends with the iteration, however that ends."""

    def __init__(self, call: Rank, store: Any, part: Interruptible) -> None:
        """`store` is used by no other thread."""
        super().__init__(name=f"inprocess-monitor-{call.state.iteration}", daemon=True)
        self._call = call
        self._state = call.state
        self._store = store
        self._part = part
        self._stop_wanted = threading.Event()
        self.has_aborted = threading.Event()
        """Set however this ended: the main thread may continue."""
        self.error: Exception | None = None
        """The store's failure: the restart group can't continue."""

    def run(self) -> None:
        try:
            if self._store.wait_for_outcome() == INTERRUPTED:
                self._call.watchdog.hold()  # from now on, leaving is the only progress
                self._store.answer(self._state.rank, self._state.world_size)
                self._store.wait_for_answers(self._call.settings.last_call_wait.total_seconds())
                self._get_main_thread_out(format_interruption_records(self._store.get_interruption_records()))
        except Exception as error:
            self.error = error
            if not self._stop_wanted.is_set():
                self._call.watchdog.hold()
                self._get_main_thread_out(f"the restart group's store fails: {error}")
        finally:
            self.has_aborted.set()

    def shutdown(self) -> None:
        self._stop_wanted.set()
        if self.ident is not None:
            self.join(5)
            if self.is_alive():
                logger.warning("rank %d: the monitor thread does not end: its store does not answer", self._state.rank)

    def _get_main_thread_out(self, why: str) -> None:
        state = self._state
        logger.info("rank %d: iteration %d is interrupted: %s", state.rank, state.iteration, why)
        with self._call.atomic_lock:
            state.status = Status.ABORTING
            if self._call.settings.abort is not None:
                set_aborted(self._part)
                try:
                    self._call.settings.abort(state)
                except Exception:
                    logger.exception("rank %d: abort failed; the restart continues", state.rank)
            state.status = Status.ABORTED
            self._part.interrupt(why)
        self.has_aborted.set()
        self._part.insist(self._stop_wanted)
