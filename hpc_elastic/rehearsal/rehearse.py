"""The loop of a rehearsal: the script undisturbed, then with one fault after the other; and the verdict on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.errors import UsageError
from hpc_elastic.options.run_request import SlurmJob
from hpc_elastic.rehearsal.aftermath import look_back
from hpc_elastic.rehearsal.disturb import Disturbance, FaultQueue
from hpc_elastic.rehearsal.faults import Fault, Kind, plan
from hpc_elastic.rehearsal.journal import Course, Source, StepSeen, step_text
from hpc_elastic.rehearsal.judge import (
    Comparison,
    Finding,
    InjectionSeen,
    Rehearsed,
    compare_losses,
    find_guilt,
)
from hpc_elastic.rehearsal.live_run import LiveRun, LocalRun, Stage
from hpc_elastic.rehearsal.saves import WrittenNames
from hpc_elastic.rehearsal.slurm_run import SlurmRun
from hpc_elastic.run.option_values import SectionTimeouts
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.run.suspicions import HangSettings, OnHang

_MOST_RUNS = 20
HANG_SECONDS = 15.0
"""A hang is found after so long at the earliest, where the user gives no timeouts: the end of a process takes time."""


class Wish(Struct, frozen=True, kw_only=True):
    """How the rehearsal is asked for."""

    spec: RunSpec
    folder: Path
    """Where all of it is kept; made here."""
    kinds: tuple[Kind, ...]
    seed: int
    minutes: float | None
    """How long faults go on; None: until each kind was there once."""
    tolerance: float
    source: Source
    patience: float
    """Seconds without a step after which the run counts as stuck."""
    inputs: tuple[Path, ...] = ()
    watched: tuple[Path, ...] = ()
    job: SlurmJob | None = None
    """Of each run, on the cluster; None: they run here."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What the rehearsal came to."""

    wish: Wish
    found: Rehearsed
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]
    """Faults that were not done, and why."""
    seconds: float
    undisturbed_seconds: float


def rehearse(wish: Wish, *, env: Mapping[str, str], report: Callable[[str], None]) -> Outcome:
    """Run the script, disturb it, and judge.

    Args:
        wish: What is asked for.
        env: For the runs.
        report: Takes a line of what is done.

    Raises:
        UsageError: the script can't be rehearsed: it fails undisturbed, reports no steps, or keeps its checkpoints
            where both runs find them.
    """
    return _Rehearsal(wish, env, report).run()


class _Rehearsal:
    def __init__(self, wish: Wish, env: Mapping[str, str], report: Callable[[str], None]) -> None:
        self._wish = wish
        self._report = report
        self._stage = Stage(source=wish.source, names=WrittenNames(), inputs=wish.inputs, watched=wish.watched, env=env)
        self._course = Course((), has_heartbeats=False, started=0.0)
        self._steps: dict[int, list[StepSeen]] = {}
        self._complete: set[int] = set()
        self._injections: list[InjectionSeen] = []
        self._skipped: list[str] = []
        self._failed: list[str] = []
        self._left: list[str] = []
        self._began = time.monotonic()

    def run(self) -> Outcome:
        before = time.monotonic()
        self._undisturbed()
        undisturbed_seconds = time.monotonic() - before
        self._disturb_all()
        comparison = self._compare()
        found = Rehearsed(
            comparison=comparison,
            injections=tuple(self._injections),
            first=self._course.first,
            steps=len(self._course),
            failed=tuple(self._failed),
            left=tuple(self._left),
        )
        return Outcome(
            wish=self._wish,
            found=found,
            findings=find_guilt(found),
            skipped=tuple(self._skipped),
            seconds=time.monotonic() - self._began,
            undisturbed_seconds=undisturbed_seconds,
        )

    def _live_run(self, name: str, spec: RunSpec | None = None) -> LiveRun:
        wish = self._wish
        chosen, folder = spec or wish.spec, wish.folder / name
        if wish.job is not None:
            return SlurmRun(replace(wish.job, spec=chosen), folder, self._stage, report=self._report)
        return LocalRun(chosen, folder, self._stage)

    # -- undisturbed -----------------------------------------------------------------------------------------------

    def _undisturbed(self) -> None:
        self._report("undisturbed")
        run, steps = self._run_undisturbed("undisturbed")
        if not steps:
            raise UsageError(
                "the script reported no steps: print 'step N loss=X', call hpc_elastic.heartbeat(step, loss=loss), or "
                f"name a pattern with --losses or a file with --losses-file; what it printed: {run.log}"
            )
        self._course = Course(steps, has_heartbeats=run.journal.has_heartbeats, started=run.started)
        losses = sum(step.loss is not None for step in steps)
        self._report(f"  {len(self._course)} steps, {losses} losses")

    def _run_undisturbed(self, name: str) -> tuple[LiveRun, list[StepSeen]]:
        run = self._live_run(
            name, replace(self._wish.spec, max_restarts=0, max_requeues=0)
        )  # it fails by itself: at once
        deadline = time.monotonic() + self._wish.patience
        seen = 0
        try:
            run.start()
            while (code := run.poll()) is None:
                if len(run.journal.steps) > seen or run.is_queued:
                    seen, deadline = len(run.journal.steps), time.monotonic() + self._wish.patience
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"undisturbed, the script did no step for {self._wish.patience:g} s; see {run.log}"
                    )
                run.wait()
            run.poll()
        finally:
            run.end()
        self._left += run.leftovers()
        if code != 0:
            result = run.result()
            reason = f" ({result.reason})" if result is not None else ""
            raise UsageError(
                f"undisturbed, the script ends with exit code {code}{reason}; see {run.log}. It runs in {run.work}: "
                "files that it reads there are linked with --input, {folder} in its arguments is that folder"
            )
        return run, list(run.journal.steps)

    # -- disturbed -------------------------------------------------------------------------------------------------

    def _disturb_all(self) -> None:
        wish = self._wish
        planned: Iterator[Fault] = plan(wish.seed, wish.kinds)
        if wish.minutes is None:
            planned = islice(planned, len(wish.kinds))
        until = self._began + 60 * wish.minutes if wish.minutes is not None else float("inf")
        number, waiting = 0, FaultQueue(planned)
        while waiting.peek() is not None and number < _MOST_RUNS and time.monotonic() < until:
            number += 1
            before = len(self._injections) + len(self._skipped)
            self._disturb(number, waiting, until)
            if self._failed or any(injection.trained_at is None for injection in self._injections):
                break  # a script that does not come back from one fault shows nothing by others
            if len(self._injections) + len(self._skipped) == before:
                fault = waiting.take()
                self._skipped.append(f"{fault}: the script ends before; let it do more steps")

    def _disturb(self, number: int, waiting: FaultQueue, until: float) -> None:
        run = self._live_run(f"disturbed-{number}", self._finding_hangs())
        disturbed = Disturbance(run, self._course, patience=self._wish.patience, report=self._report)
        try:
            run.start()
            disturbed.go(waiting, until)
            run.poll()
        finally:
            disturbed.undo()
            run.end()
        self._steps[number] = list(run.journal.steps)
        self._check_start(run)
        if disturbed.code == 0:
            self._complete.add(number)
        self._injections += [
            look_back(number, run, injection, disturbed.why, self._course) for injection in disturbed.injections
        ]
        self._skipped += disturbed.skipped
        if disturbed.why and not any(injection.trained_at is None for injection in self._injections):
            self._failed.append(disturbed.why)
        self._left += run.leftovers()

    def _finding_hangs(self) -> RunSpec:
        """The run, but for how soon a hang is found: by what the undisturbed run's steps took."""
        spec = self._wish.spec
        if Kind.WORKER_HANG not in self._wish.kinds:
            return spec
        limit = max(HANG_SECONDS, 5 * self._course.longest)
        if not spec.section_timeouts and self._course.has_heartbeats:
            setup = max(60.0, 5 * self._course.until_first)
            spec = replace(spec, section_timeouts=SectionTimeouts(seconds={"setup": setup, "step": limit}))
        if spec.hangs == HangSettings():
            spec = replace(spec, hangs=HangSettings(action=OnHang.ACT, least=limit))
        return spec

    def _check_start(self, run: LiveRun) -> None:
        first = run.journal.steps[0].position if run.journal.steps else None
        if first is not None and self._course.first is not None and first > self._course.first:
            raise UsageError(
                f"a fresh run began at step {step_text(first)}: the script finds the checkpoint of the run before; "
                "have it save in its working directory, or give it {folder} in its arguments"
            )

    def _compare(self) -> Comparison:
        comparison = self._compared()
        if comparison.parting is None:
            return comparison
        self._report("the losses part: undisturbed once more, to see whether the script repeats itself")
        _, again = self._run_undisturbed("undisturbed-again")
        own = compare_losses(self._course.steps, {0: again}, tolerance=self._wish.tolerance)
        is_noise = own.parting is not None and own.largest >= 0.1 * comparison.largest
        return Comparison(
            compared=comparison.compared,
            parting=comparison.parting,
            largest=comparison.largest,
            missing=comparison.missing,
            repeatable=not is_noise,
        )

    def _compared(self) -> Comparison:
        return compare_losses(self._course.steps, self._steps, tolerance=self._wish.tolerance, complete=self._complete)
