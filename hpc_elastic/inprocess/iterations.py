"""Carries out the table of a call's phases on one rank: one method per phase, which returns the event.

In each iteration a `MonitorThread` runs beside it. It notices a fault of any rank, aborts, and gets the main thread
out.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from msgspec import Struct

from hpc_elastic.inprocess.abort import forget_half_made_groups
from hpc_elastic.inprocess.hooks import RankDiscarded
from hpc_elastic.inprocess.monitor_process import MonitorProcess, RankPlace, StallWatch
from hpc_elastic.inprocess.progress_watchdog import (
    Interruptible,
    ProgressWatchdog,
    RankShouldRestart,
    Reading,
    async_raise,
    reraise_if_unraisable,
    set_aborted,
)
from hpc_elastic.inprocess.replacement import Admissions, AgentLink
from hpc_elastic.inprocess.state import (
    CallEvent,
    CallPhase,
    HealthCheckError,
    InternalError,
    Interruption,
    InterruptionRecord,
    RestartAbort,
    RestartError,
    State,
    Status,
    format_interruption_records,
    next_phase,
)
from hpc_elastic.inprocess.store import COMPLETED, INTERRUPTED, LONGEST_PAUSE, BarrierError, PrefixStore, wait_until
from hpc_elastic.worker_api.records import RestartGroupEvent

if TYPE_CHECKING:
    from hpc_elastic.inprocess.wrap import Wrapper

# Scripts know it as `monitor_thread`, the extension's name.
__all__ = [
    "Iterations",
    "MonitorThread",
    "Rank",
    "RankShouldRestart",
    "SoftTimeout",
    "async_raise",
    "reraise_if_unraisable",
]


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


logger = logging.getLogger(__name__)


class Rank(Struct, kw_only=True):
    state: State
    base: PrefixStore
    watched_base: PrefixStore
    """The same keys, for the monitor thread alone."""
    critical_ranks: tuple[int, ...]
    watchdog: ProgressWatchdog
    process: MonitorProcess
    atomic_lock: Any
    settings: Wrapper
    name: str
    """The call's: the prefix of its keys."""
    agent_link: AgentLink
    admissions: Admissions | None
    """Set where an agent starts fresh processes in dead ones' places."""
    has_completed: bool = False
    """All ranks have completed; else others may continue for long."""

    def announce_end(self) -> None:
        """Report that this rank does not need the store any more. The rank that serves it waits for all others."""
        is_critical = self.state.initial_rank in self.critical_ranks
        if not is_critical:
            self.process.shutdown()  # it uses the store too
        try:
            self.base.record_base_terminated_rank(self.state.initial_rank)
            count, limit = self.state.initial_world_size, self.settings.barrier_timeout.total_seconds()
            if is_critical and not wait_until(
                lambda: self.base.get_base_terminated_count() >= count, limit if self.has_completed else math.inf
            ):
                logger.warning("the restart group's store ends; not all ranks have said that they need it no more")
        except Exception as error:
            logger.warning("rank %d: the restart group's store fails at the end: %s", self.state.rank, error)


class Iterations:
    """One call's loop, after the initial barrier or an admission: `terminated` are the places that stayed empty."""

    def __init__(self, rank: Rank, function: Callable[[], Any], *, terminated: Collection[int]) -> None:
        self._call = rank
        self._settings = rank.settings
        self._function = function
        self._store: PrefixStore | None = None
        """The current iteration's store; None before the first iteration barrier of an assignment."""
        self._terminated = set(terminated)
        self._joined: tuple[int, ...] = ()
        self._seen: tuple[tuple[int, str], ...] = ()  # the records of the interruption before
        self._part = Interruptible()
        self._thread: MonitorThread | None = None
        self._value: Any = None
        self._own_fault: Exception | None = None
        self._leaving: BaseException | None = None
        self._interrupted_at = 0.0

    @property
    def _state(self) -> State:
        return self._call.state

    def run(self) -> Any:
        steps: dict[CallPhase, Callable[[], CallEvent]] = {
            CallPhase.ASSIGNING: self._assign,
            CallPhase.STARTING: self._start,
            CallPhase.RUNNING: self._run,
            CallPhase.COMPLETING: self._complete,
            CallPhase.ABORTING: self._abort,
            CallPhase.FINALIZING: self._finalize,
            CallPhase.CHECKING: self._check,
            CallPhase.TERMINATING: self._terminate,
            CallPhase.REPLACING: self._replace,
            CallPhase.LEAVING: self._leave,
        }
        phase = next_phase(CallPhase.JOINING, CallEvent.ALL_CAME)
        try:
            while phase in steps:
                try:
                    event = steps[phase]()
                except BaseException as error:
                    if phase is CallPhase.LEAVING:
                        logger.warning("rank %d can't report that it leaves: %s", self._state.rank, error)
                        break
                    event, self._leaving = CallEvent.FAILED, error
                    # The restart group's store is lost, but for a hook, which may use stores of its own.
                    is_hook = phase in (CallPhase.FINALIZING, CallPhase.CHECKING)
                    if isinstance(error, dist.DistNetworkError) and not is_hook:
                        self._leaving = InternalError(f"the restart group's store fails: {error}")
                        self._leaving.__cause__ = error
                logger.debug("rank %d: %s, while %s", self._state.rank, event.value, phase.value)
                phase = next_phase(phase, event)
            if self._leaving is not None:
                raise self._leaving
            return self._value
        finally:
            # Nothing of the function's stays: exceptions hold frames, and frames hold tensors.
            self._end_thread()
            self._part.close()
            self._own_fault = self._leaving = self._value = None
            self._function = lambda: None

    def _assign(self) -> CallEvent:
        settings = self._settings
        self._store = None
        state, left = settings.rank_assignment(self._state, self._terminated)
        if left:
            shown = ", ".join(map(str, sorted(left)))
            raise RestartError(f"rank_assignment={settings.rank_assignment!r} left terminated ranks: {shown}")
        state.activate_all_ranks()
        if settings.rank_filter is not None:
            state = settings.rank_filter(state)
        state.set_distributed_vars()
        self._call.state = state
        return CallEvent.ASSIGNED

    def _start(self) -> CallEvent:
        state, call = self._state, self._call
        store = self._store = PrefixStore(state.iteration, call.base)
        call.process.start_iteration(
            RankPlace(
                iteration=state.iteration,
                rank=state.rank,
                count=state.world_size,
                initial_rank=state.initial_rank,
                call=call.name,
            )
        )
        state.store = store
        store.put_count(state.world_size)
        store.set_initial_rank(state.rank, state.initial_rank)
        call.watchdog.reset()
        store.iteration_barrier(
            rank=state.rank, rendezvous_count=state.world_size, timeout=self._settings.barrier_timeout
        )
        if not self._interrupted_at:
            return CallEvent.ALL_CAME
        seconds = time.monotonic() - self._interrupted_at
        logger.info("rank %d of %d: iteration %d, %.3f s after the fault was seen", state.rank,
                    state.world_size, state.iteration, seconds)  # fmt: skip
        if call.agent_link.reports and store.is_first("told"):  # one rank reports for all
            call.agent_link.report(
                RestartGroupEvent.RESTARTED,
                rank=state.initial_rank,
                iteration=state.iteration,
                seconds=round(seconds, 4),
                world_size=state.world_size,
                active_world_size=state.active_world_size,
                interruptions=self._seen,
                joined=self._joined,
            )
        return CallEvent.ALL_CAME

    def _run(self) -> CallEvent:
        call, settings, store = self._call, self._settings, self._store
        assert store is not None
        call.watchdog.reset()
        self._value = None
        self._part = Interruptible()
        self._thread = MonitorThread(call, PrefixStore(self._state.iteration, call.watched_base), self._part)
        limit = settings.soft_timeout.total_seconds()
        call.watchdog.show(SoftTimeout(state=self._state, store=store, limit=limit).look)
        self._thread.start()
        try:
            self._value = self._part.run(self._body)
        except RankShouldRestart as error:
            if error.owner is not None and error.owner is not self._part:
                raise  # an outer call's
            if error.owner is None and not self._part.is_wanted:  # the function raised it
                logger.warning("rank %d: the function asks for a restart: %s", self._state.rank, error)
                store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.EXCEPTION))
            return CallEvent.INTERRUPTED
        except Exception as error:
            if not self._part.is_wanted:
                logger.warning("rank %d: %s: %s", self._state.rank, type(error).__name__, error)
                self._own_fault = error
                store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.EXCEPTION))
            # Otherwise the abort is the cause, not this rank.
            return CallEvent.INTERRUPTED
        finally:
            call.watchdog.show(None)
            call.watchdog.reset()
        return CallEvent.DONE

    def _body(self) -> Any:
        state, settings = self._state, self._settings
        if settings.initialize is not None:
            state = self._call.state = settings.initialize(state)
        if settings.health_check is not None:
            settings.health_check(state, None)
        if state.status is Status.INACTIVE:
            while not state.store.wait_for_completed_or_interrupted(3600):
                pass
            return None
        value = self._function()
        state.store.record_completed()
        return value

    def _complete(self) -> CallEvent:
        assert self._store is not None
        rank, count = self._state.rank, self._state.world_size
        if not self._store.completion_barrier(rank, count, self._settings.completion_timeout):
            return CallEvent.INTERRUPTED
        self._call.has_completed = True
        if self._call.admissions is not None:
            self._call.admissions.finish()
        self._end_thread()
        return CallEvent.ALL_COMPLETED

    def _abort(self) -> CallEvent:
        thread = self._thread
        assert thread is not None
        self._interrupted_at = time.monotonic()
        self._value = None
        while not thread.has_aborted.wait(LONGEST_PAUSE):
            pass
        self._end_thread()
        forget_half_made_groups()
        self._call.watchdog.reset()
        if thread.error is not None:
            raise InternalError(f"the restart group's store fails: {thread.error}") from thread.error
        return CallEvent.ABORTED

    def _finalize(self) -> CallEvent:
        if self._settings.finalize is not None:
            self._settings.finalize(self._state, self._own_fault)
        return CallEvent.FINALIZED

    def _check(self) -> CallEvent:
        if self._settings.health_check is not None:
            try:
                self._settings.health_check(self._state, self._own_fault)
            except Exception as error:
                raise HealthCheckError(f"rank {self._state.rank} is not healthy: {error}") from error
        return CallEvent.HEALTHY

    def _terminate(self) -> CallEvent:
        store, state = self._store, self._state
        assert store is not None
        self._pass_termination_barrier(store)
        # The function's frames stay until all have left it: another rank's main thread may be connecting to a store
        # that this rank's function serves, and would try in vain until its timeout.
        self._own_fault = None
        self._part.close()
        self._terminated = store.get_terminated_ranks()
        records = store.get_interruption_records() if self._call.agent_link.reports else ()
        self._seen = tuple(dict.fromkeys((record.rank, record.interruption.name) for record in records))
        while gc.collect():
            pass
        state.advance()
        return CallEvent.ALL_CAME

    def _replace(self) -> CallEvent:
        state, store, admissions = self._state, self._store, self._call.admissions
        self._store = None  # that iteration is over: a rank that leaves now reports it in the next
        if admissions is not None:
            found = admissions.admit(state, store, self._terminated)
            state.world_size = found.world_size
            self._terminated = set(found.empty)
            self._joined = tuple(sorted(found.places.values()))
        return CallEvent.DECIDED

    def _leave(self) -> CallEvent:
        error, state, store = self._leaving, self._state, self._store
        logger.warning("rank %d leaves: %s: %s", state.rank, type(error).__name__, error)
        gives_up = isinstance(error, RestartAbort | InternalError | BarrierError)
        event = RestartGroupEvent.GAVE_UP if gives_up else RestartGroupEvent.LEFT
        reason = f"{type(error).__name__}: {error}"
        self._call.agent_link.report(event, rank=state.initial_rank, iteration=state.iteration, reason=reason)
        if store is None:
            if not isinstance(error, RankDiscarded):  # else all others know
                PrefixStore(state.iteration, self._call.base).report_gone(state.initial_rank)
            return CallEvent.SAID
        if store.outcome() == COMPLETED:
            return CallEvent.SAID
        store.stand_in_for(state.rank, state.world_size, Interruption.BASE_EXCEPTION)
        if self._thread is not None:
            self._thread.has_aborted.wait(self._settings.hard_timeout.total_seconds())
        self._end_thread()
        if not isinstance(error, BarrierError | InternalError):
            self._pass_termination_barrier(store)
        return CallEvent.SAID

    def _pass_termination_barrier(self, store: PrefixStore) -> None:
        rank, count = self._state.rank, self._state.world_size
        store.termination_barrier(rank=rank, rendezvous_count=count, timeout=self._settings.barrier_timeout)

    def _end_thread(self) -> None:
        self._call.watchdog.show(None)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
