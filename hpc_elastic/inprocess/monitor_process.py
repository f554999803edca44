"""A forked process beside each rank, which lives on when the rank's interpreter is stuck, stopped or dead.

It sends the rank's heartbeats, watches those of the next rank, kills a rank that shows no progress for `hard_timeout`
(SIGCONT, SIGTERM, grace, SIGKILL), and does the dead rank's part at the barriers. It is forked, not started: the
store's factory may be a class of the user's script. The fork comes before the restart group's store and its threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from msgspec import Struct

from hpc_elastic.base.clock import Staleness
from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.base.files import Owner, open_checked
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.inprocess.progress_watchdog import ProgressPage, Reading
from hpc_elastic.inprocess.replacement import PULSE, WITHDRAWN, ReplacementProcess
from hpc_elastic.inprocess.state import Interruption, InterruptionRecord
from hpc_elastic.inprocess.store import COMPLETED, PrefixStore, TCPStore, detect_silence, wait_until

if TYPE_CHECKING:
    from hpc_elastic.inprocess.wrap import Wrapper

logger = logging.getLogger(__name__)

ELSEWHERE = object()
"""Returned instead of a server where another process serves already."""


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


class RankPlace(Struct, frozen=True, kw_only=True):
    iteration: int
    rank: int
    count: int
    initial_rank: int
    call: str


class Unplaced(Struct, frozen=True, kw_only=True):
    """A process that has no place yet, and how its monitor reports its death."""

    call: str
    initial_rank: int
    world_size: int
    replacement: ReplacementProcess | None = None
    """Set where it comes in a dead process' place; else it waits for the first iteration."""

    def report_exit(self, open_store: Callable[[], Any], *, patience: float) -> None:
        """Report its death. `patience` limits the wait for the others to come to the first barrier or to admit it."""
        deadline = time.monotonic() + patience
        base = PrefixStore(self.call, open_store())
        if self.replacement is None:
            while not base.is_released(base.INITIAL_BARRIER):
                if time.monotonic() >= deadline or base.slot_resolution(self.initial_rank):
                    return
                time.sleep(0.02)
            if base.resolve_slot(self.initial_rank, "gone"):
                PrefixStore(0, base).report_gone(self.initial_rank)
                base.record_base_terminated_rank(self.initial_rank)
            return
        base.append_item(WITHDRAWN, self.replacement.uid)
        # Ranks that had read their list before may give a replacement that has just died a place.
        deadline = time.monotonic() + min(patience, 5)
        while time.monotonic() < deadline:
            if (found := self.replacement.place_in(base, base.decided())) is not None:
                PrefixStore(found.iteration, base).report_gone(self.initial_rank)
                return
            time.sleep(0.02)


class MonitorProcess:
    def __init__(self, *, page: ProgressPage, unplaced: Unplaced, settings: Wrapper) -> None:
        self.page = page
        self.unplaced = unplaced
        self.settings = settings
        self._pid = 0
        self._pipe = -1

    def start(self) -> bool:
        """Fork, before the store is made: its server's socket must not live on in the child. Returns whether the
        store's server is open, in that process or elsewhere."""
        reader, self._pipe = os.pipe()
        served_r, served_w = os.pipe()
        main = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: a fork beside threads; this child starts none
            pid = os.fork()
        if pid == 0:
            _run_child(self, main, reader, served_w)
        self._pid = pid
        os.close(reader)
        os.close(served_w)
        with os.fdopen(served_r, "rb") as served:
            return served.read() == b"yes"

    def start_iteration(self, place: RankPlace) -> None:
        """A dead monitor is not noticed here: the other ranks notice."""
        try:
            os.write(self._pipe, f"{dumps(place)}\n".encode())
        except BrokenPipeError:
            logger.warning("initial rank %d: its monitor process is gone", self.unplaced.initial_rank)

    def shutdown(self) -> None:
        if not self._pid:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, b"bye\n")
        os.close(self._pipe)
        pid, self._pid = self._pid, 0
        deadline = time.monotonic() + 5
        try:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() >= deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.002)
        except ChildProcessError:
            pass  # the user's program has collected it


def _run_child(rank: MonitorProcess, main: int, reader: int, served: int) -> NoReturn:
    status = 1
    try:
        pidfd = os.pidfd_open(main)
        logfile = rank.settings.monitor_process_logfile
        _detach((reader, served, pidfd), None if logfile is None else logfile.format(rank=rank.unplaced.initial_rank))
        server = rank.settings.store_factory.serve_apart(ELSEWHERE, **(rank.settings.store_kwargs or {}))
        os.write(served, b"yes" if server is not None else b"no")
        os.close(served)
        if os.getppid() == main:
            _Monitor(rank, main, reader, pidfd, server is not None and server is not ELSEWHERE).run()
        status = 0
    except BaseException:
        logger.exception("the monitor process fails")
    finally:
        os._exit(status)


def _detach(keep: tuple[int, ...], logfile: str | None) -> None:
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    null = os.open(os.devnull, os.O_RDWR)
    log = null
    if logfile not in (None, os.devnull):
        try:
            log = open_checked(logfile, os.O_WRONLY | os.O_CREAT | os.O_APPEND, owner=Owner.OWN)
        except (OSError, UnsafePathError) as error:
            logger.warning("monitor_process_logfile=%s: the monitor goes on without it: %s", logfile, error)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 20)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    logging.root.setLevel(logging.INFO if logfile else logging.CRITICAL)


class _Monitor:
    def __init__(self, rank: MonitorProcess, main: int, reader: int, pidfd: int, serves: bool) -> None:
        settings = rank.settings
        self._main = main
        self._pidfd = pidfd
        self._reader = reader
        self._settings = settings
        self._rank = rank
        self._interval = settings.monitor_process_interval.total_seconds()
        self._hard_timeout = settings.hard_timeout.total_seconds()
        self._heartbeat_timeout = settings.heartbeat_timeout.total_seconds()
        self._barrier_timeout = settings.barrier_timeout.total_seconds()
        self._serves = serves
        self._raw: Any = None
        self._base: Any = None
        self._store: Any = None
        self._place: RankPlace | None = None
        self._stall = StallWatch(self._hard_timeout)
        self._hearts: NeighbourWatch | None = None
        self._has_lost_store = False
        self._unread = b""
        self._has_ended = False

    def run(self) -> None:
        try:
            cause = self._watch()
            if cause is not None:
                self._do_dead_ranks_part(cause)
                if self._serves:
                    self._serve_the_others()
        except dist.DistNetworkError:
            logger.warning("the restart group's store is lost")
        except Exception:
            logger.exception("the monitor process ends")
            if self._place is None:
                return
            own_end = InterruptionRecord(self._place.rank, Interruption.MONITOR_PROCESS_EXCEPTION)
            with contextlib.suppress(Exception):  # the store is what failed
                self._store.record_interrupted(own_end)

    def _watch(self) -> Interruption | None:
        next_look, reader = time.monotonic(), self._reader
        while True:
            ready = wait_readable([self._pidfd, reader], max(0.0, next_look - time.monotonic()))
            if self._reader in ready and not self._read_messages():
                if self._has_ended:
                    return None
                reader = -1  # closed: it is dead, or another program now
            if self._pidfd in ready:
                return Interruption.TERMINATED
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + self._interval
            if self._place is not None:
                self._watch_others()
                if self._stall.is_stalled(self._rank.page.read(), time.monotonic()):
                    self._kill()
                    return Interruption.HARD_TIMEOUT

    def _read_messages(self) -> bool:
        raw = os.read(self._reader, 65536)
        *lines, self._unread = (self._unread + raw).split(b"\n")
        for line in lines:
            if line == b"bye":
                self._has_ended = True
                return False
            self._place = place = loads(RankPlace, line.decode())
            self._hearts = NeighbourWatch(rank=place.rank, count=place.count, timeout=self._heartbeat_timeout)
            self._store = None
            self._watch_others()
        return bool(raw)

    def _open_raw(self, *, within: float | None = None) -> Any:
        if self._raw is None:
            TCPStore.is_client_only = True  # in this process alone
            factory, kwargs = self._settings.store_factory, dict(self._settings.store_kwargs or {})
            if within is not None and factory.__init__ is TCPStore.__init__:
                own = kwargs.get("timeout", timedelta(seconds=300))
                kwargs["timeout"] = min(own, timedelta(seconds=within))
            self._raw = factory(**kwargs)
            if isinstance(self._raw, dist.TCPStore):
                detect_silence(self._raw.port, self._heartbeat_timeout)
        return self._raw

    def _open_base(self) -> Any:
        """The call's part of the store. Raises torch.distributed.DistNetworkError: the store is lost."""
        if self._has_lost_store:
            raise dist.DistNetworkError("the restart group's store is lost")
        if self._base is None:
            known = self._place or self._rank.unplaced
            self._base = PrefixStore(known.call, self._open_raw())
        return self._base

    def _watch_others(self) -> None:
        if self._has_lost_store:
            return  # the rank notices by itself, and ends
        try:
            self._beat()
        except dist.DistNetworkError as error:
            logger.warning("the restart group's store is lost: %s", error)
            self._has_lost_store = True

    def _beat(self) -> None:
        place, hearts = self._place, self._hearts
        assert place is not None
        assert hearts is not None
        if self._store is None:
            self._store = PrefixStore(place.iteration, self._open_base())
        store = self._store
        store.send_heartbeat(place.rank)
        if place.rank == 0:
            self._base.add(PULSE, 1)
        counts = {rank: store.get_heartbeat(rank) for rank in hearts.watched}
        for rank in hearts.look(counts, time.monotonic()):
            if store.outcome() == COMPLETED or store.is_released(store.TERMINATION_BARRIER):
                continue  # it is done with this iteration, and its monitor with it
            logger.warning("rank %d does not respond", rank)
            initial = store.find_initial_rank(rank)
            store.stand_in_for(rank, place.count, Interruption.UNRESPONSIVE)
            if initial is not None:
                self._base.record_base_terminated_rank(initial)

    def _kill(self) -> None:
        logger.error("process %d shows no progress for %g s: it is killed", self._main, self._hard_timeout)
        for signum in (signal.SIGCONT, signal.SIGTERM):
            self._send(signum)
        if not wait_readable([self._pidfd], self._settings.termination_grace_time.total_seconds()):
            self._send(signal.SIGKILL)
            wait_readable([self._pidfd], self._barrier_timeout)

    def _send(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def _do_dead_ranks_part(self, cause: Interruption) -> None:
        # Its last message may still be in the pipe.
        while wait_readable([self._reader], 0) and self._read_messages():
            pass
        place, store = self._place, self._store
        if self._has_ended or self._has_lost_store:  # without the store all ranks end
            return
        if place is None:
            patience = self._barrier_timeout  # as long as any rank waits for another one
            self._rank.unplaced.report_exit(lambda: self._open_raw(within=patience), patience=patience)
            return
        if store.outcome() != COMPLETED:
            store.stand_in_for(place.rank, place.count, cause)
            wait_until(lambda: bool(store.is_released(store.TERMINATION_BARRIER)), self._barrier_timeout)
            if place.rank not in store.get_terminated_ranks():
                PrefixStore(place.iteration + 1, self._base).report_gone(place.initial_rank)
        self._base.record_base_terminated_rank(place.initial_rank)

    def _serve_the_others(self) -> None:
        base = self._open_base()
        ages: Staleness[str] = Staleness()
        patience = self._barrier_timeout + self._heartbeat_timeout
        while base.get_base_terminated_count() < self._rank.unplaced.world_size:
            now = time.monotonic()
            if ages.observe(PULSE, int(base.add(PULSE, 0)), now) >= patience:
                return
            time.sleep(min(0.1, self._interval))
