"""Whether a run that somebody follows has ended: by its files, and where these say nothing new, by Slurm.

``--wait`` and ``--follow``: watch a job through its requeues to the run's end, and take over its exit code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import open_own
from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.cli import run_job
from hpc_elastic.cli.screen import is_terminal, print_note
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.launch.attempts import job_now
from hpc_elastic.launch.requeue import back_off
from hpc_elastic.launch.run_status import RunState
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.output.terminal import harmless
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from hpc_elastic.run.result import load_newest_result, load_result
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.slurm.notation import HostlistError, compress

SILENT_SECONDS = 300.0
"""A run of which no file has changed for so long has ended without a word: agents write signs of life every half minute
at most, however many they are."""
_LOOK_SECONDS = 1.0
_SIGNS_SECONDS = 20.0
_ASK_SECONDS = 30.0


class RunEnd(Struct, frozen=True, kw_only=True):
    """How it ended."""

    code: int
    why: str


class RunWatch:
    """Looks for a run's end, seldom enough to cost nothing."""

    def __init__(
        self, paths: RunPaths, *, attempt: int | None, clock: Clock, client: SlurmClient | None = None
    ) -> None:
        """Args:
        paths: The run.
        attempt: Only this one's end is awaited; None: the run's, through its requeues.
        clock: For how often.
        client: Knows of a job that was cancelled in the queue, or whose supervisor was killed. None: not asked.
        """
        self._client = client
        self._ask_at = clock.monotonic()
        self._paths = paths
        self._attempt = attempt
        self._clock = clock
        self._look_at = clock.monotonic()
        self._signs_at = clock.monotonic()
        self._signs: object = None
        self._changed_at = clock.monotonic()
        self.is_requeued = False
        """The last attempt ended with a requeue, and the next one has not begun."""

    def end(self) -> RunEnd | None:
        """How it ended; None: it has not, as far as can be seen. To be asked as often as one likes."""
        now = self._clock.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_SECONDS
        number = self._attempt if self._attempt is not None else self._newest()
        if number is None:
            return self._by_slurm(now)
        attempt = self._paths.attempt(number)
        result = load_result(attempt.result_json)
        self.is_requeued = result is not None and result.exit_code == ExitCode.REQUEUED and self._attempt is None
        if result is not None and not self.is_requeued:
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
        return RunEnd(code=1, why=f"none of its files has changed for {minutes:.0f} minutes, and it told no end")

    def _by_slurm(self, now: float) -> RunEnd | None:
        """The end of a run whose files will never hold one; rarely looked for, since it costs the controller a call."""
        if self._client is None or now < self._ask_at:
            return None
        self._ask_at = now + _ASK_SECONDS
        status = run_job.status_now(self._paths, self._client, clock=self._clock, is_quiet=True)
        if status.state is not RunState.ENDED or self._attempt not in (None, status.attempt):
            return None
        return RunEnd(code=status.exit_code or 0, why=f"{status.reason} (exit code {status.exit_code})")

    def _newest(self) -> int | None:
        begun = self._paths.begun_attempts()
        return begun[-1].number if begun else None


def _signs_in(folder: str) -> tuple[tuple[str, int, int], ...]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                found.append((entry.name, info.st_size, info.st_mtime_ns))
    except OSError:
        pass
    return tuple(sorted(found))


_ASK_SLURM_EVERY = 2.0
_LOOK_AT_LOG_EVERY = 0.5
_SETTLE = 10.0
"""An ended job whose last attempt said "requeued", or nothing yet, may be on its way back into the queue, and a shared
filesystem may show its result late: so long it is watched on. (Not a cancelled one: that is final.)"""
_CHUNK = 1 << 16
_MOST_REPORTS = 3


class End(Struct, frozen=True, kw_only=True):
    """How a run ended."""

    code: int
    why: str
    has_ended: bool = True
    """False: its job stays in the queue, and never starts."""


def how_it_ended(states: tuple[JobState, ...], result: int | None) -> End:
    """The run's exit code.

    Args:
        states: What Slurm last said of the job; empty where it has forgotten it.
        result: The exit code that the newest attempt stored; None where it stored none.
    """
    if result is not None and result != ExitCode.REQUEUED:
        return End(code=result, why=f"exit code {result}")
    if not states:
        return End(code=1, why="Slurm has forgotten the job, and its last attempt left no result")
    codes = [state.code for state in states]
    worst = max(range(len(states)), key=lambda index: codes[index])
    state = states[worst]
    reason = f" ({state.reason})" if state.reason else ""
    return End(code=codes[worst], why=f"{state.state.lower()}{reason} by Slurm, exit code {codes[worst]}")


def newest_result(paths: RunPaths) -> int | None:
    """The exit code that the newest attempt stored; None where it stored none (yet). Of an array the worst one, once
    all have ended."""
    tasks = array_tasks(paths)
    if tasks:
        codes = [newest_result(paths.task(task)) for task in tasks]
        known = [code for code in codes if code is not None and code != ExitCode.REQUEUED]
        return max(known) if len(known) == len(codes) else None
    stored = load_newest_result(paths)
    return None if stored is None else stored.exit_code


def waive_delay(
    client: SlurmClient, job: JobId, states: tuple[JobState, ...], paths: RunPaths, waived: set[int]
) -> None:
    """Let a requeued job begin that waits for nothing but Slurm's own delay.

    The attempt that had it requeued did so as well, but Slurm begins the delay anew where that attempt's nodes took
    long to be done with it (one of them was lost, say).

    Args:
        client: This cluster's.
        job: The job.
        states: What Slurm has just said of it.
        paths: The run: an attempt may have asked for a delay of its own.
        waived: Restarts of the job for which it was tried; one try each.
    """
    if len(states) != 1 or states[0].phase is not JobPhase.PENDING or states[0].reason != "BeginTime":
        return
    state, stored = states[0], load_newest_result(paths)
    if stored is None or stored.exit_code != ExitCode.REQUEUED or back_off(stored.idle):
        return
    if not state.restarts or state.restarts in waived:
        return
    waived.add(state.restarts)
    try:
        client.start_now(job)
    except SlurmError:
        pass  # then it begins after the delay


class LogTail:
    """What a growing file has that was not shown yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._lines = OutputReader(Path(path)) if is_terminal(sys.stdout) else None

    def show(self) -> None:
        """Write the news to stdout: as bytes, or on a terminal in lines that can't harm it. A file that is not there
        (yet) has none."""
        if self._lines is not None:
            while (lines := self._lines.read()) is not None:
                sys.stdout.buffer.write(harmless(lines.data))
            sys.stdout.buffer.flush()
            return
        try:
            with open(self._path, "rb", opener=open_own) as file:
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    sys.stdout.buffer.write(chunk)
        except (FileNotFoundError, UnsafePathError):
            return
        sys.stdout.buffer.flush()


def follow(client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, show_log: bool) -> int:
    """Wait for the run's end; Ctrl-C ends the waiting alone.

    Returns:
        The run's exit code; 1 for a job that never starts; 130 after Ctrl-C.
    """
    waiting = _Waiting(client, job, paths, clock=clock, tail=LogTail(str(paths.job_log)) if show_log else None)
    try:
        end = waiting.run()
    except KeyboardInterrupt:
        return leave(waiting.job, paths)
    if end.has_ended:
        print_note(f"run {paths.run_id} ended: {end.why}; {where_to_look(job, paths)}")
    else:
        print_note(f"run {paths.run_id} is not waited for any more: {end.why}")
    return end.code


def leave(job: JobId, paths: RunPaths) -> int:
    """Say what becomes of a job whose follower got Ctrl-C. Returns the exit code."""
    again = (
        f"hpc-elastic status {job} --watch"
        if array_tasks(paths)
        else f"hpc-elastic logs {job} --follow (or, for its exit code, hpc-elastic report {job} --follow)"
    )
    print_note(f"job {job} goes on without being watched; to end it: scancel {job}; to follow it again: {again}")
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


class _Waiting:
    """One wait for a run's end."""

    def __init__(self, client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, tail: LogTail | None) -> None:
        self.job = job
        """The run's job now: a run may go on in a follow-on job."""
        self._client = client
        self._paths = paths
        self._clock = clock
        self._tail = tail
        self._said = ""
        self._waived: set[int] = set()
        self._ended_since: float | None = None

    def run(self) -> End:
        stop = threading.Event()  # never set: waiting ends by the job's end or by Ctrl-C
        tail, next_question = self._tail, self._clock.monotonic()
        while True:
            if tail is not None:
                tail.show()
            if self._clock.monotonic() >= next_question:
                end = self._look()
                if end is not None:
                    if tail is not None:
                        tail.show()
                    return end
                next_question = self._clock.monotonic() + _ASK_SLURM_EVERY
            self._clock.wait(stop, _ASK_SLURM_EVERY if tail is None else _LOOK_AT_LOG_EVERY)

    def _look(self) -> End | None:
        """Ask Slurm once. Returns how the run ended; None: it goes on, or nobody knows."""
        try:
            states = self._client.job_states(self.job)
        except SlurmError as error:
            self._print(f"can't be asked about: {error.why}; trying on")
            return None
        self._print(_describe(states))
        waive_delay(self._client, self.job, states, self._paths, self._waived)
        left = [state for state in states if state.phase is not JobPhase.FINISHED]
        if not left:
            return self._when_finished(states)
        self._ended_since = None
        if all(state.never_starts for state in left):
            return End(code=1, why=f"{left[0].reason}: {left[0].way_out}", has_ended=False)
        return None

    def _when_finished(self, states: tuple[JobState, ...]) -> End | None:
        following = job_now(self._paths)
        if following is not None and following != self.job.number:
            print_note(f"job {following} goes on with the run")
            self.job, self._said, self._ended_since = JobId(following, self.job.cluster), "", None
            return self._look()
        now, result = self._clock.monotonic(), newest_result(self._paths)
        self._ended_since = now if self._ended_since is None else self._ended_since
        is_final = result is not None and result != ExitCode.REQUEUED
        cancelled = all(state.state == "CANCELLED" for state in states) and bool(states)
        if is_final or cancelled or now - self._ended_since >= _SETTLE:
            return how_it_ended(states or self._accounted(), result)
        return None

    def _accounted(self) -> tuple[JobState, ...]:
        try:
            return self._client.accounted([self.job])
        except SlurmError:
            return ()

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
        try:
            return f"is {state.state.lower()} on {compress(state.nodes)}"
        except HostlistError:
            return f"is {state.state.lower()}"
    return f"is {state.state.lower()}{f' ({state.reason})' if state.reason else ''}"
