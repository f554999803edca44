"""One run, and the faults that are done to it, each when it trains again after the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain

from hpc_elastic.rehearsal.faults import NATURES, Effect, Fault
from hpc_elastic.rehearsal.injections import Injection, RunInjector
from hpc_elastic.rehearsal.injector import NotNow
from hpc_elastic.rehearsal.journal import Course
from hpc_elastic.rehearsal.live_run import LiveRun


class FaultQueue:
    """The faults that are still to be done."""

    def __init__(self, planned: Iterator[Fault]) -> None:
        self._planned = planned
        self._next = next(planned, None)

    def peek(self) -> Fault | None:
        return self._next

    def take(self) -> Fault | None:
        fault, self._next = self._next, next(self._planned, None)
        return fault

    def put_back(self, fault: Fault) -> None:
        """It comes next again."""
        if self._next is not None:
            self._planned = chain([self._next], self._planned)
        self._next = fault


class Disturbance:
    """One run, and the faults that are done to it."""

    def __init__(self, run: LiveRun, course: Course, *, patience: float, report: Callable[[str], None]) -> None:
        """Args:
        run: Not started yet, or just now.
        course: The undisturbed run.
        patience: Seconds without a step after which the run counts as stuck.
        report: Takes a line of what is done.
        """
        self._run = run
        self._course = course
        self._patience = patience
        self._report = report
        self._injectors = RunInjector(run)
        self.injections: list[Injection] = []
        self.code: int | None = None
        self.skipped: list[str] = []
        """Faults that were not done, and why."""
        self.why = ""
        """Why it did not come to its end."""
        self._pending: Injection | None = None
        self._wait_for = 0
        """So many steps of the undisturbed run are to be done before the next fault."""
        self._quiet_since = time.monotonic()
        self._seen = 0

    def go(self, waiting: FaultQueue, until: float) -> None:
        """Until the run is over, stuck, or there are no more faults and it ends by itself."""
        self._plan_next(waiting)
        while True:
            self.code = self._run.poll()
            if self.code is not None:
                break
            self._run.wait()
            if len(self._run.journal.steps) > self._seen or self._run.is_queued:
                self._seen, self._quiet_since = len(self._run.journal.steps), time.monotonic()
            self._settle()
            if time.monotonic() - self._quiet_since > self._patience:
                self.why = f"no step for {self._patience:g} s; see {self._run.log}"
                return
            if self._pending is None and time.monotonic() < until and self._is_due(waiting):
                self._do(waiting)
        self._run.poll()
        if self.code == 0 and self._pending is not None:
            self._settle()
        if self.code == 0 and (late := self._pending) is not None:
            # It came to its end before the fault had an effect: once more, early in another run.
            late.undo()
            self.injections.remove(late)
            if self.injections:
                waiting.put_back(late.fault)
            else:
                self._skip(f"{late.fault.title}: the script was at its end first; let it do more steps")
        if self.code != 0:
            result = self._run.result()
            self.why = f"the run ended with exit code {self.code}"
            if result is not None:
                self.why += f": {result.reason}"
            self.why += f"; hpc-elastic report {self._run.paths.root}"

    def _skip(self, text: str) -> None:
        self.skipped.append(text)
        self._report(f"  not done: {text}")

    def undo(self) -> None:
        for injection in self.injections:
            injection.undo()

    def _plan_next(self, waiting: FaultQueue) -> None:
        fault = waiting.peek()
        if fault is not None:
            done, total = self._course.progress(self._run.journal.steps), len(self._course)
            self._wait_for = done + max(1, round(total * fault.gap / 12))

    def _is_due(self, waiting: FaultQueue) -> bool:
        last = self._run.journal.last
        if waiting.peek() is None or last is None or last.place != self._run.members.place:
            return False
        # All ranks train: one that still loads gives no heartbeat whose end would show.
        if self._course.reporters - {step.rank for step in self._run.journal.steps if step.place == last.place}:
            return False
        done = self._course.progress(self._run.journal.steps)
        return self._wait_for <= done < len(self._course)

    def _do(self, waiting: FaultQueue) -> None:
        fault = waiting.take()
        place = self._run.members.place
        if fault is None or place is None:
            return
        need = self._injectors.missing(fault.kind)
        try:
            if need is not None:
                raise NotNow(need.value)
            injection = self._injectors.do(fault, place)
        except NotNow as reason:
            self._skip(f"{fault.title}: {reason}")
            self._plan_next(waiting)
            return
        self._report(f"  {fault}{f': {injection.what}' if injection.what else ''}")
        self.injections.append(injection)
        self._pending = injection
        self._quiet_since = time.monotonic()
        self._plan_next(waiting)

    def _settle(self) -> None:
        """Whether the last fault is over, and the training goes on."""
        injection = self._pending
        if injection is None:
            return
        if injection.undo_at is not None and time.time() < injection.undo_at:
            injection.keep_up()
        elif injection.undo_at is not None:
            injection.undo_at = None
            injection.undo()
            if injection.killed_at_end:
                self._injectors.end_announced(injection)
        restarts = NATURES[injection.fault.kind].effect is Effect.RESTART
        first = self._run.journal.first_after(injection.at, beyond=injection.before)
        if first is None and restarts:
            first = self._run.journal.went_back(injection.at, injection.before)
        elif first is None and self._run.journal.first_after(injection.at + injection.fault.seconds):
            first = self._run.journal.first_after(injection.at)  # it trained on in its round
        if first is None or (injection.undo_at is not None and not injection.killed_at_end):
            return
        self._pending = None
        self._report(f"    trains again after {max(0.0, first.at - injection.at):.1f} s")
