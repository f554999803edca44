"""One run, and the faults that are injected into it, each when it trains again after the one before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

from hpc_elastic.rehearsal.injector import NO_SAVE_CAUGHT, NotNow
from hpc_elastic.rehearsal.journal import LossCurve
from hpc_elastic.rehearsal.judge import (
    DISK_FULL,
    NODE_KILLED,
    NOTICE,
    SAVING_KILLED,
    WORKER_EXCEPTION,
    WORKER_KILLED,
    InjectionSeen,
    Kind,
    Need,
    PlannedFault,
    look_back,
)
from hpc_elastic.rehearsal.live_run import PLANT_SIGNAL, LiveRun
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.tree import node_key

_SAVE_SECONDS = 30.0
"""Longest wait for a save that a fault has to interrupt; longer where the undisturbed run saves rarely."""
TOO_SHORT = "the script was at its end first; let it do more steps"
_SIGNALS = {WORKER_KILLED: signal.SIGKILL, WORKER_EXCEPTION: PLANT_SIGNAL}


def why_never(kind: Kind, spec: RunSpec, course: LossCurve, folder: Path) -> str:
    """Why a fault is impossible in this rehearsal, whose runs are below `folder`; empty: it is possible."""
    lacks = {
        Need.SECOND_NODE: spec.max_nodes + spec.spares < 2,
        Need.SAVES: not course.saves,
        Need.SMALL_DISK: _free(str(folder)) > 1 << 30,
    }
    return kind.need.value if kind.need is not None and lacks.get(kind.need) else ""


class Disturbance:
    def __init__(self, run: LiveRun, course: LossCurve, *, report: Callable[[str], None]) -> None:
        self._run = run
        self._course = course
        self._report = report
        self.injections: list[InjectionSeen] = []
        self.skipped: dict[str, str] = {}
        self.why = ""
        self._pending: InjectionSeen | None = None
        self._undo_at: float | None = None
        """When a lasting fault has to be undone, by this machine's wall clock."""
        self._waiting: list[PlannedFault] = []
        self._restarts: list[float] = []
        self._next_step = 0
        """How many steps of the undisturbed run come before the next fault."""

    def go(self, waiting: list[PlannedFault]) -> None:
        self._waiting = waiting
        gap = max(1, len(self._course) // (len(waiting) + 3))  # the last one has an effect, too
        self._next_step = gap
        for _ in self._run.looks():
            self._settle()
            if self._pending is None and waiting and self._is_due():
                self._do(waiting)
                self._next_step = self._course.progress(self._run.journal.steps) + gap
        if (code := self._run.code) is None:
            self.why = f"no step for {self._run.options.patience:g} s; see {self._run.log}"
            return
        self._settle()
        if code == 0 and self._pending is not None:
            # It came to its end before the fault had an effect: once more, early in another run.
            late = self.injections.pop().fault
            if self.injections:
                waiting.insert(0, late)
            else:
                self._skip(late, TOO_SHORT)
        if code != 0:
            result = self._run.result()
            reason = f": {result.reason}" if result is not None else ""
            self.why = f"the run ended with exit code {code}{reason}; hpc-elastic report {self._run.paths.root}"

    def undo(self) -> None:
        self._fill_path.unlink(missing_ok=True)

    @property
    def _fill_path(self) -> Path:
        return self._run.paths.root.parent / ".rehearsal-fills-the-disk"

    def _skip(self, fault: PlannedFault, why: str) -> None:
        self.skipped[fault.kind.name] = why
        self._report(f"  not done: {fault.kind.name}: {why}")

    def _is_due(self) -> bool:
        journal = self._run.journal
        last = journal.last
        if last is None or last.place != self._run.members.place:
            return False
        # All ranks train: one that still loads gives no heartbeat whose end would show.
        if self._course.reporters - {step.rank for step in journal.steps if step.place == last.place}:
            return False
        return self._next_step <= self._course.progress(journal.steps) < len(self._course)

    def _settle(self) -> None:
        injection, journal = self._pending, self._run.journal
        if injection is None:
            return
        kind = injection.fault.kind
        if self._undo_at is not None and time.time() < self._undo_at:
            if kind == DISK_FULL:
                take_all_space(self._fill_path)
                return
        elif self._undo_at is not None:
            self._undo_at = None
            self.undo()
            if kind == NOTICE and self._run.is_in_attempt(injection.before[0]):
                with suppress(NotNow):  # the job that was announced to end has not begun again by itself, or just now
                    self._run.restart()
        seconds = look_back(injection, journal, (), self._course).seconds
        if seconds is not None:
            self._pending = None
            self._restarts.append(seconds)
            left = estimate(self._course, len(self._waiting), self._restarts, done=self._course.progress(journal.steps))
            self._report(f"    trains again after {self._restarts[-1]:.1f} s; {left} to go")

    def _do(self, waiting: list[PlannedFault]) -> None:
        place, fault = self._run.members.place, waiting[0]
        assert place is not None
        try:
            at, what, lasts = self._inject(fault)
        except NotNow as reason:
            self._run.journal.read()  # the workers may have come to their end meanwhile
            is_at_end = self._course.progress(self._run.journal.steps) >= len(self._course)
            if self._run.poll() is None and not is_at_end:
                self._skip(waiting.pop(0), str(reason))
            return  # or its end came first: in another run
        del waiting[0]
        self._pending = InjectionSeen(fault=fault, what=what, at=at, before=place)
        self._undo_at = at + lasts if lasts else None
        self.injections.append(self._pending)
        self._report(f"  {fault}{f': {what}' if what else ''}")

    def _inject(self, fault: PlannedFault) -> tuple[float, str, float]:
        kind = fault.kind
        if kind == SAVING_KILLED:
            return self._kill_while_saving()
        if kind == NOTICE:
            at = time.time()
            self._run.notice()
            return at, "", self._run.spec.signal_grace
        if kind == DISK_FULL:
            at = time.time()
            take_all_space(self._fill_path)
            return at, str(self._fill_path.parent), fault.seconds
        workers = self._run.members.workers()
        if not workers:
            raise NotNow("no worker runs")
        worker = workers[fault.number % len(workers)]
        injector = self._run.injector_of(worker.node)
        if kind == NODE_KILLED:
            at = injector.signal_node(node_key(self._run.spec.cluster, worker.node), signal.SIGKILL)
            return at, worker.host, 0.0
        return injector.signal(worker.pid, _SIGNALS[kind]), f"rank {worker.rank} on {worker.host}", 0.0

    def _kill_while_saving(self) -> tuple[float, str, float]:
        seconds, reason = max(_SAVE_SECONDS, 3 * self._course.seconds / self._course.saves), NotNow(NO_SAVE_CAUGHT)
        for injector in self._run.injectors():
            try:
                at, name = injector.kill_in_save(self._run.names, seconds)
            except NotNow as error:
                reason = error
            else:
                return at, f"while {name} was written", 0.0
        raise reason


def estimate(course: LossCurve, faults: int, restarts: Sequence[float], *, done: int = 0) -> str:
    """``about 90 s``: the time of a run with this many faults from here, by the duration of earlier restarts."""
    steps = len(course) - done + faults * len(course) / (course.saves + 1) / 2
    seconds = steps * course.seconds / max(1, len(course)) + faults * (
        mean(restarts) if restarts else course.until_first
    )
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


def take_all_space(path: Path) -> None:
    """Called repeatedly while the disk has to be full: freed blocks come back."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        most, block = 1 << 26, os.fstatvfs(fd).f_frsize
        while (size := min(_free(str(path)), most)) >= block:
            try:
                os.posix_fallocate(fd, os.fstat(fd).st_size, size)
            except OSError:
                most = size // 2  # not all that is free can be had: others write too, and a tmpfs gives all or nothing
    finally:
        os.close(fd)


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
