"""A rehearsal: the script undisturbed, then with one fault after the other, each when it trains again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from hpc_elastic.base.text import plural
from hpc_elastic.errors import UsageError
from hpc_elastic.rehearsal.injector import NO_SAVE_CAUGHT, FileNames, NotNow
from hpc_elastic.rehearsal.journal import LossCurve, StepSeen, step_text
from hpc_elastic.rehearsal.judge import (
    DISK_FULL,
    NODE_KILLED,
    NOTICE,
    SAVING_KILLED,
    WORKER_EXCEPTION,
    WORKER_KILLED,
    InjectionSeen,
    Kind,
    LossComparison,
    Need,
    PlannedFault,
    RehearsalResult,
    Rehearsed,
    attribute_failure,
    compare_losses,
    look_back,
)
from hpc_elastic.rehearsal.live_run import PLANT_SIGNAL, LiveRun, LocalRun, RehearsalOptions, SlurmRun
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


_SAVE_RUNS = 3
"""Runs without a caught save after which that fault is skipped."""


class Rehearsal:
    def __init__(self, options: RehearsalOptions, *, report: Callable[[str], None]) -> None:
        self._options = options
        self._report = report
        self._names = FileNames()
        self._course = LossCurve((), started=0.0)
        self._steps: dict[int, list[StepSeen]] = {}
        self._complete: set[int] = set()
        self._injections: list[InjectionSeen] = []
        self._skipped: dict[str, str] = {}
        self._failed: list[str] = []
        self._left: list[str] = []

    def run(self) -> RehearsalResult:
        """Raises UsageError: the script fails, reports no steps, or keeps its checkpoints where both runs find them."""
        began = time.monotonic()
        self._report("the script undisturbed; then it is known how long the faults take")
        run = self._run_undisturbed("undisturbed")
        if not run.journal.steps:
            raise UsageError(
                "the script reported no steps: print 'step N loss=X', call hpc_elastic.heartbeat(step, loss=loss), or "
                f"name a pattern with --losses or a file with --losses-file; what it printed: {run.log}"
            )
        saves = max(len(run.saved_at), len(run.journal.saves))
        self._course = LossCurve(run.journal.steps, started=run.started, saves=saves)
        self._report(f"  {plural(len(self._course), 'step')} in {time.monotonic() - began:.0f} s")
        self._disturb_all()
        found = Rehearsed(
            comparison=self._compare(),
            injections=tuple(self._injections),
            first=self._course.first,
            steps=len(self._course),
            failed=tuple(self._failed),
            left=tuple(self._left),
        )
        return RehearsalResult(
            options=self._options,
            found=found,
            findings=attribute_failure(found),
            skipped=self._skipped,
            seconds=time.monotonic() - began,
        )

    def _live_run(self, name: str, spec: RunSpec) -> LiveRun:
        if self._options.job is not None:
            return SlurmRun(self._options, spec, name, self._names, report=self._report)
        return LocalRun(self._options, spec, name, self._names)

    def _run_undisturbed(self, name: str) -> LiveRun:
        # It fails by itself: at once.
        run = self._live_run(name, replace(self._options.spec, max_restarts=0, max_requeues=0))
        try:
            run.start()
            for _ in run.looks():
                pass
        finally:
            run.end()
        self._left += run.leftovers()
        if run.code is None:
            raise UsageError(f"undisturbed, the script did no step for {run.options.patience:g} s; see {run.log}")
        if run.code != 0:
            result = run.result()
            reason = f" ({result.reason})" if result is not None else ""
            raise UsageError(
                f"undisturbed, the script ends with exit code {run.code}{reason}; see {run.log}. "
                f"It runs in {run.work}: files that it reads there are linked with --input, "
                "{folder} in its arguments is that folder"
            )
        return run

    def _disturb_all(self) -> None:
        waiting: list[PlannedFault] = []
        for kind in self._options.kinds:
            if why := why_never(kind, self._options.spec, self._course, self._options.folder):
                self._skipped[kind.name] = why
            else:
                seconds = self._course.full_seconds if kind == DISK_FULL else 0.0
                waiting.append(PlannedFault(number=len(waiting) + 1, kind=kind, seconds=seconds))
        number = idle = 0
        while waiting:
            number += 1
            restarts = [one.seconds for one in self._injections if one.seconds is not None]
            self._report(f"with {plural(len(waiting), 'fault')}: {estimate(self._course, len(waiting), restarts)}")
            before = len(waiting)
            self._disturb(number, waiting)
            if self._failed or any(injection.trained_at is None for injection in self._injections):
                break  # a script that does not come back from one fault shows nothing by others
            idle = idle + 1 if len(waiting) == before else 0
            is_saving = bool(waiting) and waiting[0].kind == SAVING_KILLED
            if idle == (_SAVE_RUNS if is_saving else 1):
                self._skipped[waiting.pop(0).kind.name] = NO_SAVE_CAUGHT if is_saving else TOO_SHORT
                idle = 0

    def _disturb(self, number: int, waiting: list[PlannedFault]) -> None:
        run = self._live_run(f"disturbed-{number}", self._options.spec)
        disturbed = Disturbance(run, self._course, report=self._report)
        try:
            run.start()
            disturbed.go(waiting)
        finally:
            disturbed.undo()
            run.end()
        self._steps[number] = list(run.journal.steps)
        first = run.journal.steps[0].position if run.journal.steps else None
        if first is not None and self._course.first is not None and first > self._course.first:
            raise UsageError(
                f"a fresh run began at step {step_text(first)}: the script finds the checkpoint of the run before; "
                "have it save in its working directory, or give it {folder} in its arguments"
            )
        if run.code == 0:
            self._complete.add(number)
        self._injections += [
            look_back(
                replace(injection, run=number, why_stuck=disturbed.why), run.journal, run.saved_at, self._course,
                is_asked=bool(run.spec.preemption_signal),
            )
            for injection in disturbed.injections
        ]  # fmt: skip
        self._skipped |= disturbed.skipped
        if disturbed.why and not any(injection.trained_at is None for injection in self._injections):
            self._failed.append(disturbed.why)
        self._left += run.leftovers()

    def _compare(self) -> LossComparison:
        tolerance = self._options.tolerance
        comparison = compare_losses(self._course.steps, self._steps, tolerance=tolerance, complete=self._complete)
        if comparison.divergence is None:
            return comparison
        self._report("the losses part: undisturbed once more, to see whether the script repeats itself")
        again = self._run_undisturbed("undisturbed-again")
        own = compare_losses(self._course.steps, {0: again.journal.steps}, tolerance=tolerance)
        is_noise = own.divergence is not None and own.largest >= 0.1 * comparison.largest
        return replace(comparison, repeatable=not is_noise)
