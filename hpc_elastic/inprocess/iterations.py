"""Carries out the table of `hpc_elastic.inprocess.life` on one rank: a method per phase, each says what happened."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from msgspec import Struct, field

from hpc_elastic.inprocess.abort import forget_half_made_groups
from hpc_elastic.inprocess.interrupt import Interruptible, RankShouldRestart
from hpc_elastic.inprocess.life import Event, Phase, next_phase
from hpc_elastic.inprocess.monitor_process import MonitorProcess, Place
from hpc_elastic.inprocess.monitor_thread import MonitorThread, SoftTimeout
from hpc_elastic.inprocess.progress_watchdog import ProgressWatchdog
from hpc_elastic.inprocess.rank_assignment import RankDiscarded
from hpc_elastic.inprocess.replacement import Replacements, Surroundings
from hpc_elastic.inprocess.settings import Settings
from hpc_elastic.inprocess.state import (
    HealthCheckError,
    InternalError,
    Interruption,
    InterruptionRecord,
    RestartAbort,
    RestartError,
    State,
    Status,
)
from hpc_elastic.inprocess.store import COMPLETED, LONGEST_PAUSE, BarrierError, PrefixStore
from hpc_elastic.worker_api.restart_group import RestartGroupEvent

logger = logging.getLogger(__name__)


class Rank(Struct, kw_only=True):
    """What one call has on one rank, as long as it lasts."""

    state: State
    base: PrefixStore
    watched_base: PrefixStore
    """The same keys, for the monitor thread alone."""
    critical_ranks: tuple[int, ...]
    watchdog: ProgressWatchdog
    process: MonitorProcess
    atomic_lock: Any
    settings: Settings
    name: str = ""
    """The call's: the prefix of its keys."""
    surroundings: Surroundings = field(default_factory=Surroundings)
    replacements: Replacements | None = None
    """Where an agent starts fresh processes in dead ones' places."""
    has_completed: bool = False
    """Whether all ranks have completed; else others may go on for long."""

    def announce_end(self) -> None:
        """This rank needs the store no more. Where the store is in this process: wait for all others to say so."""
        is_critical = self.state.initial_rank in self.critical_ranks
        if not is_critical:
            self.process.shutdown()  # it uses the store too
        try:
            self.base.record_base_terminated_rank(self.state.initial_rank)
            if is_critical:
                self._wait_for_all()
        except Exception as error:
            logger.warning("rank %d: the restart group's store fails at the end: %s", self.state.rank, error)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self.settings.barrier_timeout.total_seconds()
        pause = 0.002
        while self.base.get_base_terminated_count() < self.state.initial_world_size:
            if self.has_completed and time.monotonic() >= deadline:
                logger.warning("the restart group's store ends; not all ranks have said that they need it no more")
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)


class Iterations:
    """One call's loop."""

    def __init__(self, rank: Rank, function: Callable[[], Any], *, terminated: Collection[int] = ()) -> None:
        """Args:
        rank: Past the initial barrier, or taken in by a restart group that runs.
        function: What to call.
        terminated: For the first assignment: the places that stayed empty, where this is a fresh process.
        """
        self._call = rank
        self._settings = rank.settings
        self._function = function
        self._store: PrefixStore | None = None
        """Of the iteration that lasts; None before the first iteration barrier of an assignment."""
        self._terminated = set(terminated)
        self._joined: tuple[int, ...] = ()
        self._seen: tuple[tuple[int, str], ...] = ()
        """What interrupted the iteration before."""
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
        """From the first assignment on.

        Raises:
            BaseException: what ended this rank.
        """
        steps: dict[Phase, Callable[[], Event]] = {
            Phase.ASSIGNING: self._assign,
            Phase.STARTING: self._start,
            Phase.RUNNING: self._run,
            Phase.COMPLETING: self._complete,
            Phase.ABORTING: self._abort,
            Phase.FINALIZING: self._finalize,
            Phase.CHECKING: self._check,
            Phase.TERMINATING: self._terminate,
            Phase.REPLACING: self._replace,
            Phase.LEAVING: self._leave,
        }
        phase = next_phase(Phase.JOINING, Event.ALL_CAME)
        try:
            while phase in steps:
                try:
                    event = steps[phase]()
                except BaseException as error:
                    if phase is Phase.LEAVING:
                        logger.warning("rank %d can't say that it leaves: %s", self._state.rank, error)
                        break
                    event, self._leaving = Event.FAILED, _with_cause(phase, error)
                logger.debug("rank %d: %s, while %s", self._state.rank, event.value, phase.value)
                phase = next_phase(phase, event)
            if self._leaving is not None:
                raise self._leaving
            return self._value
        finally:
            self._forget()

    # --- the phases

    def _assign(self) -> Event:
        state, settings = self._state, self._settings
        self._store = None
        state, left = settings.rank_assignment(state, self._terminated)
        if left:
            shown = ", ".join(map(str, sorted(left)))
            raise RestartError(f"rank_assignment={settings.rank_assignment!r} left terminated ranks: {shown}")
        state.activate_all_ranks()
        if settings.rank_filter is not None:
            state = settings.rank_filter(state)
        state.set_distributed_vars()
        self._call.state = state
        return Event.ASSIGNED

    def _start(self) -> Event:
        state, call = self._state, self._call
        store = self._store = PrefixStore(state.iteration, call.base)
        call.process.start_iteration(
            Place(
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
        if self._interrupted_at:
            self._report_restarted(time.monotonic() - self._interrupted_at)
        return Event.ALL_CAME

    def _report_restarted(self, seconds: float) -> None:
        state = self._state
        logger.info("rank %d of %d: iteration %d, %.3f s after the fault was seen", state.rank,
                    state.world_size, state.iteration, seconds)  # fmt: skip
        if self._call.surroundings.reports and state.store.is_first("told"):  # one rank reports for all
            self._call.surroundings.report(
                RestartGroupEvent.RESTARTED,
                rank=state.initial_rank,
                iteration=state.iteration,
                seconds=round(seconds, 4),
                world_size=state.world_size,
                active_world_size=state.active_world_size,
                interruptions=self._seen,
                joined=self._joined,
            )

    def _run(self) -> Event:
        call, settings, store = self._call, self._settings, self._store
        assert store is not None
        call.watchdog.reset()
        self._value = None
        self._part = Interruptible()
        self._thread = MonitorThread(
            state=self._state,
            store=PrefixStore(self._state.iteration, call.watched_base),
            part=self._part,
            atomic_lock=call.atomic_lock,
            abort=settings.abort,
            last_call_wait=settings.last_call_wait.total_seconds(),
            hold=call.watchdog.hold,
        )
        limit = settings.soft_timeout.total_seconds()
        call.watchdog.show(SoftTimeout(state=self._state, store=store, limit=limit).look)
        self._thread.start()
        try:
            self._value = self._part.run(self._body)
        except RankShouldRestart as error:
            if error.owner is not None and error.owner is not self._part:
                raise  # an outer call's
            if error.owner is None and not self._part.is_wanted:  # the function's own wish
                logger.warning("rank %d: the function asks for a restart: %s", self._state.rank, error)
                store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.EXCEPTION))
            return Event.INTERRUPTED
        except Exception as error:
            if not self._part.is_wanted:
                logger.warning("rank %d: %s: %s", self._state.rank, type(error).__name__, error)
                self._own_fault = error
                store.record_interrupted(InterruptionRecord(self._state.rank, Interruption.EXCEPTION))
            # Otherwise the abort is the cause, not this rank.
            return Event.INTERRUPTED
        finally:
            call.watchdog.show(None)
            call.watchdog.reset()
        return Event.DONE

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

    def _complete(self) -> Event:
        assert self._store is not None
        has_completed = self._store.completion_barrier(
            rank=self._state.rank,
            rendezvous_count=self._state.world_size,
            timeout=self._settings.completion_timeout,
        )
        if not has_completed:
            return Event.INTERRUPTED
        self._call.has_completed = True
        if self._call.replacements is not None:
            self._call.replacements.finish()
        self._end_thread()
        return Event.ALL_COMPLETED

    def _abort(self) -> Event:
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
        return Event.ABORTED

    def _finalize(self) -> Event:
        if self._settings.finalize is not None:
            self._settings.finalize(self._state, self._own_fault)
        return Event.FINALIZED

    def _check(self) -> Event:
        if self._settings.health_check is not None:
            try:
                self._settings.health_check(self._state, self._own_fault)
            except Exception as error:
                raise HealthCheckError(f"rank {self._state.rank} is not healthy: {error}") from error
        return Event.HEALTHY

    def _terminate(self) -> Event:
        store, state = self._store, self._state
        assert store is not None
        store.termination_barrier(
            rank=state.rank, rendezvous_count=state.world_size, timeout=self._settings.barrier_timeout
        )
        # Until all have left the function, its frames stay: another rank's main thread may be connecting to a store
        # that this rank's function serves, and would try in vain until its timeout.
        self._own_fault = None
        self._part.close()
        self._terminated = store.get_terminated_ranks()
        records = store.get_interruption_records() if self._call.surroundings.reports else ()
        self._seen = tuple(dict.fromkeys((record.rank, record.interruption.name) for record in records))
        while gc.collect():
            pass
        state.advance()
        return Event.ALL_CAME

    def _replace(self) -> Event:
        state, store, replacements = self._state, self._store, self._call.replacements
        self._store = None  # that iteration is over: who leaves now says so in the next
        if replacements is not None:
            found = replacements.admit(state, store, self._terminated)
            state.world_size = found.world_size
            self._terminated = set(found.empty)
            self._joined = tuple(sorted(found.places.values()))
        return Event.DECIDED

    def _leave(self) -> Event:
        """Report it to the others, in whatever iteration they are."""
        error, state, store = self._leaving, self._state, self._store
        logger.warning("rank %d leaves: %s: %s", state.rank, type(error).__name__, error)
        gives_up = isinstance(error, RestartAbort | InternalError | BarrierError)
        event = RestartGroupEvent.GAVE_UP if gives_up else RestartGroupEvent.LEFT
        reason = f"{type(error).__name__}: {error}"
        self._call.surroundings.report(event, rank=state.initial_rank, iteration=state.iteration, reason=reason)
        if store is None:
            if not isinstance(error, RankDiscarded):  # else all others know
                PrefixStore(state.iteration, self._call.base).report_gone(state.initial_rank)
            return Event.SAID
        if store.outcome() == COMPLETED:
            return Event.SAID
        store.stand_in_for(state.rank, state.world_size, Interruption.BASE_EXCEPTION)
        if self._thread is not None:
            self._thread.has_aborted.wait(self._settings.hard_timeout.total_seconds())
        self._end_thread()
        if not isinstance(error, BarrierError | InternalError):
            store.termination_barrier(
                rank=state.rank, rendezvous_count=state.world_size, timeout=self._settings.barrier_timeout
            )
        return Event.SAID

    # --- helpers

    def _end_thread(self) -> None:
        self._call.watchdog.show(None)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _forget(self) -> None:
        """Nothing of the function's stays: exceptions hold frames, and frames hold tensors."""
        self._end_thread()
        self._part.close()
        self._own_fault = self._leaving = None
        self._value = None
        self._function = lambda: None


def _with_cause(phase: Phase, error: BaseException) -> BaseException:
    """`error`, or its meaning where the restart group's store is lost; a hook may use stores of its own."""
    if phase in (Phase.FINALIZING, Phase.CHECKING) or not isinstance(error, dist.DistNetworkError):
        return error
    failure = InternalError(f"the restart group's store fails: {error}")
    failure.__cause__ = error
    return failure
