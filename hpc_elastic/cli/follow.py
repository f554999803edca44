"""Following a run to its end, whose exit code is then the command's.

`logs` and `report` show what is new, by the run's files and, where these are silent, by Slurm; `submit --follow` and
``--wait``, which have a job and perhaps no files yet, go by what Slurm says of it.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from msgspec import Struct

from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.cli import run_job
from hpc_elastic.cli.main import is_terminal, print_note
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.launch.run_status import FORGOTTEN_SECONDS, RunState, ends_by_slurm, read_status
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.output.terminal import harmless
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.paths import AttemptPaths, ExitCode, RunPaths, load_newest_result, load_result
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId, SlurmError, scancel
from hpc_elastic.slurm.job_environment import names_text
from hpc_elastic.slurm.job_state import JobPhase, JobState

SILENT_SECONDS = 300.0
"""A run whose files do not change for so long has ended without a result: agents write every half minute at least."""
_LOOK_SECONDS = 1.0
_SIGNS_SECONDS = 20.0
_ASK_SECONDS = 30.0
_LAST_WAIT_S = 0.5


class RunEnd(Struct, frozen=True, kw_only=True):
    code: int
    why: str
    has_ended: bool = True
    """False: its job stays in the queue, and never starts."""


class RunWatch:
    """Looks for a run's end by its files and, where these show nothing new, by Slurm; seldom enough to cost nothing."""

    def __init__(self, paths: RunPaths, *, attempt: int | None, clock: Clock, client: SlurmClient | None) -> None:
        """None: the run's end, through its requeues. `client` knows of a job that was cancelled in the queue."""
        self._client = client
        self._ask_at = clock.monotonic()
        self._paths = paths
        self._attempt = attempt
        self._clock = clock
        self._look_at = clock.monotonic()
        self._signs_at = clock.monotonic()
        self._signs: object = None
        self._changed_at = clock.monotonic()
        self._is_requeued = False

    def end(self) -> RunEnd | None:
        now = self._clock.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_SECONDS
        if self._attempt is not None:
            attempt = self._paths.attempt(self._attempt)
        elif begun := self._paths.begun_attempts():
            attempt = begun[-1]
        else:
            return self._by_slurm(now)
        result = load_result(attempt.result_json)
        was_requeued = self._is_requeued
        self._is_requeued = result is not None and result.exit_code == ExitCode.REQUEUED and self._attempt is None
        if self._is_requeued and not was_requeued:
            print_note("requeued: waiting for the next attempt")
        if result is not None and not self._is_requeued:
            reason = f": {result.reason}" if result.reason else ""
            outcome = result.outcome.replace("_", " ")
            return RunEnd(code=result.exit_code, why=f"{outcome}{reason} (exit code {result.exit_code})")
        if result is not None:
            self._changed_at = now
            return self._by_slurm(now)
        return self._silence(attempt, now)

    def _silence(self, attempt: AttemptPaths, now: float) -> RunEnd | None:
        if now < self._signs_at:
            return None
        self._signs_at = now + _SIGNS_SECONDS
        signs = (attempt.number, *map(_signs_in, (str(attempt.events), str(attempt.store / "node"))))
        if signs != self._signs:
            self._signs, self._changed_at = signs, now
        if now - self._changed_at >= _SIGNS_SECONDS and (end := self._by_slurm(now)) is not None:
            return end
        if now - self._changed_at < SILENT_SECONDS:
            return None
        minutes = SILENT_SECONDS / 60
        return RunEnd(code=1, why=f"none of its files has changed for {minutes:.0f} minutes, and no end was recorded")

    def _by_slurm(self, now: float) -> RunEnd | None:
        """The end of a run whose files will never hold one; seldom looked for: it costs the controller a call."""
        if self._client is None or now < self._ask_at:
            return None
        self._ask_at = now + _ASK_SECONDS
        before = read_status(self._paths, clock=self._clock)
        ((status, _),) = ends_by_slurm(self._client, [before], clock=self._clock, warn=lambda sentence: None)
        if status.state is not RunState.ENDED or self._attempt not in (None, status.attempt):
            return None
        return RunEnd(code=status.exit_code or 0, why=f"{status.reason} (exit code {status.exit_code})")


def _signs_in(folder: str) -> tuple[tuple[str, int, int], ...]:
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            found.append((entry.name, info.st_size, info.st_mtime_ns))
    return tuple(sorted(found))


class Follower(Protocol):
    def look(self, *, everything: bool = False) -> float:
        """`everything`: also what is not due yet. Returns the seconds until the next look."""

    def finish(self) -> None: ...


def show_to_end(show: Callable[[], float], end: Callable[[], RunEnd | None], *, clock: Clock) -> RunEnd:
    """Call `show`, which returns the seconds until the next time, until `end` returns how the run ended."""
    stop = threading.Event()  # never set: Ctrl-C ends it
    while True:
        seconds = show()
        if (found := end()) is not None:
            return found
        clock.wait(stop, seconds)


def follow_to_end(asked: AskedRun, follower: Follower, *, clock: Clock) -> int:
    client = run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
    watch = RunWatch(asked.paths, attempt=asked.attempt, clock=clock, client=client)
    end = show_to_end(follower.look, watch.end, clock=clock)
    # What other nodes wrote last may be seen late on a shared filesystem.
    follower.look(everything=True)
    pause(clock, _LAST_WAIT_S)
    follower.look(everything=True)
    follower.finish()
    print_note(f"run {asked.paths.run_id} ended: {end.why}")
    return end.code


ASK_SLURM_EVERY = 2.0
_LOOK_AT_LOG_EVERY = 0.5
_SETTLE = 10.0
"""A requeued job may be on its way back into the queue, and a shared filesystem may show its result late."""
_MOST_REPORTS = 3


def how_it_ended(states: tuple[JobState, ...], result: int | None) -> RunEnd:
    """The run's exit code, by the `newest_result` and by what Slurm last said of the job (nothing: it forgot it)."""
    if result is not None and result != ExitCode.REQUEUED:
        return RunEnd(code=result, why=f"exit code {result}")
    if not states:
        return RunEnd(code=1, why="Slurm no longer knows the job, and its last attempt wrote no result")
    worst = max(states, key=lambda state: state.code)
    reason = f" ({worst.reason})" if worst.reason else ""
    return RunEnd(code=worst.code, why=f"{worst.state.lower()}{reason} by Slurm, exit code {worst.code}")


def newest_result(paths: RunPaths) -> int | None:
    """The exit code that the newest attempt stored, of an array the worst once all have ended; None: there is none."""
    if tasks := array_tasks(paths):
        codes = [newest_result(paths.task(task)) for task in tasks]
        known = [code for code in codes if code is not None and code != ExitCode.REQUEUED]
        return max(known) if len(known) == len(codes) else None
    stored = load_newest_result(paths)
    return None if stored is None else stored.exit_code


def follow(client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, show_log: bool) -> int:
    """Wait for the run's end. Returns its exit code; 1: the job never starts; 130: Ctrl-C ended the waiting alone."""
    watch = SlurmWatch(client, job, paths, clock=clock)
    log = OutputReader(paths.job_log) if show_log else None
    on_terminal = is_terminal(sys.stdout)

    def show(*, is_over: bool = False) -> float:
        if log is None:
            return ASK_SLURM_EVERY
        while (lines := log.read() or (log.rest() if is_over else None)) is not None:
            sys.stdout.buffer.write(harmless(lines.data) if on_terminal else lines.data)
        sys.stdout.buffer.flush()
        return _LOOK_AT_LOG_EVERY

    try:
        end = show_to_end(show, watch.end, clock=clock)
        show(is_over=True)
    except KeyboardInterrupt:
        return leave(watch.job, paths)
    if end.has_ended:
        print_note(f"run {paths.run_id} ended: {end.why}; {where_to_look(job, paths)}")
    else:
        print_note(f"run {paths.run_id} is no longer waited for: {end.why}")
    return end.code


def leave(job: JobId, paths: RunPaths) -> int:
    again = f"hpc-elastic logs {job} --follow (or, for its exit code, hpc-elastic report {job} --follow)"
    if array_tasks(paths):
        again = f"hpc-elastic status {job} --watch"
    print_note(f"job {job} continues; to end it: {shlex.join(scancel(job))}; to follow it again: {again}")
    return int(ExitCode.INTERRUPTED)


def where_to_look(job: JobId, paths: RunPaths) -> str:
    """The commands that say more about a run that has ended; of an array about its tasks that began, and failed."""
    tasks = array_tasks(paths)
    if not tasks:
        return f"report: hpc-elastic report {job}"
    failed = [task for task in tasks if paths.task(task).begun_attempts() and newest_result(paths.task(task)) != 0]
    base = job.number.partition("_")[0]
    reports = [f"hpc-elastic report {base}_{task}" for task in failed[:_MOST_REPORTS]]
    if len(failed) > _MOST_REPORTS:
        reports.append(f"{len(failed) - _MOST_REPORTS} more failed")
    first = f"reports: {'; '.join(reports)}; " if reports else ""
    return f"{first}all its runs: hpc-elastic status {base}"


class SlurmWatch:
    def __init__(self, client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock) -> None:
        self.job = job
        """The run's job now: a run may go on in a follow-on job."""
        self._client = client
        self._paths = paths
        self._clock = clock
        self._ask_at = clock.monotonic()
        self._said = ""
        self._waived: set[int] = set()
        """Restarts of the job for which it was tried that they need not wait; one try each."""
        self._ended_since: float | None = None

    def end(self) -> RunEnd | None:
        if self._clock.monotonic() < self._ask_at:
            return None
        self._ask_at = self._clock.monotonic() + ASK_SLURM_EVERY
        return self._look()

    def _look(self) -> RunEnd | None:
        try:
            states = self._client.job_states(self.job)
        except SlurmError as error:
            self._print(f"has no known state, since Slurm does not answer: {error.why}; trying again")
            return None
        self._print(_describe(states))
        self._waive_delay(states)
        left = [state for state in states if state.phase is not JobPhase.FINISHED]
        if not left:
            return self._when_finished(states)
        self._ended_since = None
        if all(state.never_starts for state in left):
            return RunEnd(code=1, why=f"{left[0].reason}: {left[0].way_out}", has_ended=False)
        return None

    def _waive_delay(self, states: tuple[JobState, ...]) -> None:
        """Slurm begins the delay anew where the earlier attempt's nodes took long to be done with it."""
        from hpc_elastic.launch.requeue import back_off  # it brings the agent's decisions with it

        if len(states) != 1 or states[0].phase is not JobPhase.PENDING or states[0].reason != "BeginTime":
            return
        restarts, stored = states[0].restarts, load_newest_result(self._paths)
        if stored is None or stored.exit_code != ExitCode.REQUEUED or back_off(stored.idle):
            return  # the attempt has asked for a delay of its own
        if not restarts or restarts in self._waived:
            return
        self._waived.add(restarts)
        with suppress(SlurmError):  # then it begins after the delay
            self._client.start_now(self.job)

    def _when_finished(self, states: tuple[JobState, ...]) -> RunEnd | None:
        following = job_now(self._paths)
        if following is not None and following.number != self.job.number:
            print_note(f"the run continues in job {following}")
            self.job, self._said, self._ended_since = following, "", None
            return self._look()
        now, result = self._clock.monotonic(), newest_result(self._paths)
        self._ended_since = now if self._ended_since is None else self._ended_since
        is_final = result is not None and result != ExitCode.REQUEUED
        cancelled = all(state.state == "CANCELLED" for state in states) and bool(states)
        if is_final or cancelled or now - self._ended_since >= _SETTLE:
            with suppress(SlurmError):
                states = states or self._client.accounted([self.job])
            if states or is_final or now - self._ended_since >= FORGOTTEN_SECONDS:
                return how_it_ended(states, result)
        return None

    def _print(self, line: str) -> None:
        if line != self._said:
            print_note(f"job {self.job} {line}")
            self._said = line


def _describe(states: tuple[JobState, ...]) -> str:
    if not states:
        return "is no longer known to Slurm"
    if len(states) > 1:
        counts = Counter(state.state.lower() for state in states)
        text = "has " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        waiting = [state for state in states if state.phase is JobPhase.PENDING and state.reason]
        reasons = ", ".join(dict.fromkeys(state.reason for state in waiting))
        stuck = next((f"; {state.way_out}" for state in waiting if state.way_out), "")
        return f"{text}{f' ({reasons})' if reasons else ''}{stuck}"
    state = states[0]
    if state.phase is JobPhase.PENDING:
        again = f" again (restart {state.restarts})" if state.restarts else ""
        begin = f", not before {state.start_time}" if state.reason == "BeginTime" and state.start_time else ""
        stuck = f"; {state.way_out}" if state.way_out else ""
        return f"is pending{again}: {state.reason or 'not looked at yet'}{begin}{stuck}"
    if state.phase is JobPhase.RUNNING:
        return f"is {state.state.lower()}" + (f" on {names_text(state.nodes)}" if state.nodes else "")
    return f"is {state.state.lower()}{f' ({state.reason})' if state.reason else ''}"
