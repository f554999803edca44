"""The loop of a rehearsal: the script undisturbed, then with one fault after the other; and the verdict on it."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import plural
from hpc_elastic.errors import UsageError
from hpc_elastic.rehearsal.fault_schedule import TOO_SHORT, Disturbance, estimate, why_never
from hpc_elastic.rehearsal.faults import DISK_FULL, KINDS, QUICK, SAVING_KILLED, PlannedFault
from hpc_elastic.rehearsal.injector import NO_SAVE_CAUGHT
from hpc_elastic.rehearsal.journal import LossCurve, StepSeen, step_text
from hpc_elastic.rehearsal.judge import (
    InjectionSeen,
    LossComparison,
    Rehearsed,
    ScriptFailure,
    attribute_failure,
    compare_losses,
    look_back,
)
from hpc_elastic.rehearsal.live_run import LiveRun, LocalRun, RehearsalOptions
from hpc_elastic.rehearsal.saves import FileNames
from hpc_elastic.rehearsal.slurm_run import SlurmRun
from hpc_elastic.run.spec import RunSpec

_SAVE_RUNS = 3
"""Runs without a caught save after which that fault is skipped."""


class RehearsalResult(Struct, frozen=True, kw_only=True):
    options: RehearsalOptions
    found: Rehearsed
    findings: tuple[ScriptFailure, ...]
    skipped: dict[str, str]
    seconds: float

    @property
    def code(self) -> int:
        """The exit code: 0 if all holds, 1 for findings, 2 where a fault that was named was not done."""
        if self.findings:
            return 1
        is_set = self.options.kinds in (KINDS, QUICK)  # those of them that can be done
        return 0 if self.found.injections and (is_set or not self.skipped) else 2


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
