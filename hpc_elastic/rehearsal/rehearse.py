"""A rehearsal: the script undisturbed, then with one fault after the other; and its outcome as text, page and JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.codec import to_json
from hpc_elastic.base.text import plural
from hpc_elastic.errors import UsageError
from hpc_elastic.rehearsal.fault_schedule import TOO_SHORT, Disturbance, estimate, why_never
from hpc_elastic.rehearsal.injector import NO_SAVE_CAUGHT, FileNames
from hpc_elastic.rehearsal.journal import LossCurve, StepSeen, step_text
from hpc_elastic.rehearsal.judge import (
    DISK_FULL,
    KINDS,
    QUICK,
    SAVING_KILLED,
    InjectionSeen,
    LossComparison,
    PlannedFault,
    Rehearsed,
    ScriptFailure,
    attribute_failure,
    compare_losses,
    find_remarks,
    look_back,
)
from hpc_elastic.rehearsal.live_run import LiveRun, LocalRun, RehearsalOptions, SlurmRun
from hpc_elastic.report.render_html import render_page
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


_VERDICTS = ("holds", "guilty", "not certain")
_HEAD = ("fault", "hit", "resumed at", "done again", "trains again after", "notice")


def rows(injections: Sequence[InjectionSeen]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [_HEAD]
    for injection in injections:
        if injection.resumed is not None:
            resumed, redone = f"step {step_text(injection.resumed)}", str(injection.redone)
        else:
            resumed, redone = ("trained on", "-") if injection.trained_at is not None else ("never", "-")
        found.append(
            (
                str(injection.fault),
                injection.what or "-",
                resumed,
                redone,
                f"{injection.seconds:.1f} s" if injection.seconds is not None else "never",
                "-" if injection.used_notice is None else "used" if injection.used_notice else "not used",
            )
        )
    return found


def verdict_lines(outcome: RehearsalResult) -> list[str]:
    found, comparison = outcome.found, outcome.found.comparison
    lines = [_losses(comparison, outcome.options.tolerance)]
    lines += [f"not done: {name}: {why}" for name, why in outcome.skipped.items()]
    lines += [f"remark: {text}" for text in find_remarks(found)]
    lines += [f"GUILTY: {finding.text}" for finding in outcome.findings]
    if not outcome.findings:
        lacks = f"; not tried: {', '.join(outcome.skipped)}" if outcome.skipped else ""
        lines.append(f"{_VERDICTS[outcome.code]}: {plural(len(found.injections), 'fault')}{lacks}")
    return lines


def _losses(comparison: LossComparison, tolerance: float) -> str:
    if comparison.divergence is not None and not comparison.repeatable:
        return (
            f"losses: the script does not repeat itself: two undisturbed runs differ, too (by up to "
            f"{comparison.largest:.2%}); seed its random generators, or give a larger --tolerance"
        )
    if not comparison.compared:
        return "losses: none to compare: print them, or hpc_elastic.heartbeat(step, loss=loss), or --losses"
    if comparison.divergence is not None:
        one = comparison.divergence
        where = f"step {step_text(one.step)} of run {one.run}, attempt {one.place[0]} round {one.place[1]}"
        return f"losses: they part at {where}, by {one.by:.2%}; at most by {comparison.largest:.2%}"
    return (
        f"losses: {comparison.compared} compared, equal to those of the undisturbed run within {tolerance:g} "
        f"(at most {comparison.largest:.1e} off)"
    )


def as_text(outcome: RehearsalResult) -> str:
    parts = []
    if outcome.found.injections:
        table = rows(outcome.found.injections)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        parts.append("\n".join(line.rstrip() for line in lines))
    parts.append("\n".join(verdict_lines(outcome)))
    return "\n\n".join(parts) + "\n"


def as_json(outcome: RehearsalResult) -> dict[str, Any]:
    found, comparison = outcome.found, outcome.found.comparison
    return {
        "version": 1,
        "holds": outcome.code == 0,
        "seconds": round(outcome.seconds, 3),
        "steps": found.steps,
        "tolerance": outcome.options.tolerance,
        "losses": {
            "compared": comparison.compared,
            "largest_difference": comparison.largest,
            "repeatable": comparison.repeatable,
            "parts": None if comparison.divergence is None else to_json(comparison.divergence),
        },
        "faults": [
            {
                "fault": injection.fault.kind.name,
                "number": injection.fault.number,
                "run": injection.run,
                "hit": injection.what,
                "resumed": None if injection.resumed is None else list(injection.resumed),
                "done_again": injection.redone,
                "seconds": injection.seconds,
                "used_notice": injection.used_notice,
            }
            for injection in found.injections
        ],
        "remarks": list(find_remarks(found)),
        "guilty": [{"of": finding.guilt.value, "text": finding.text} for finding in outcome.findings],
        "not_done": [f"{name}: {why}" for name, why in outcome.skipped.items()],
    }


def as_page(outcome: RehearsalResult) -> str:
    """A page with the look of report.html, and without anything from elsewhere."""
    options, lines = outcome.options, verdict_lines(outcome)
    head, *faults = rows(outcome.found.injections)
    return render_page(
        "rehearsal/page.html",
        title=f"Rehearsal of {options.spec.name}",
        verdict=_VERDICTS[outcome.code],
        tone=("good", "bad", "warn")[outcome.code],
        findings=[line for line in lines if _is_verdict(line)],
        others=[line for line in lines if not _is_verdict(line)],
        facts=(
            ("script", str(options.spec.entrypoint)),
            ("steps", str(outcome.found.steps)),
            ("took", f"{outcome.seconds:.0f} s"),
        ),
        head=head,
        faults=faults,
    )


def _is_verdict(line: str) -> bool:
    return line.startswith(("GUILTY", *_VERDICTS))
