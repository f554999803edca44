"""``--wait`` and ``--follow``: watch a job through its requeues to the run's end, and take over its exit code."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.cli.command_line import say
from hpc_elastic.cli.screen import is_terminal
from hpc_elastic.clock import Clock
from hpc_elastic.launch.attempts import newest_stored
from hpc_elastic.launch.job_now import job_now
from hpc_elastic.outcome import ExitCode
from hpc_elastic.reading.output_reader import OutputReader
from hpc_elastic.reading.screen_text import harmless
from hpc_elastic.requeue import back_off
from hpc_elastic.run_index import array_tasks
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.hostlist import HostlistError, compress
from hpc_elastic.slurm.job_state import JobPhase, JobState

_ASK_SLURM_EVERY = 2.0
_LOOK_AT_LOG_EVERY = 0.5
_SETTLE = 10.0
"""An ended job whose last attempt said "requeued", or nothing yet, may be on its way back into the queue, and a shared
filesystem may show its result late: so long it is watched on. (Not a cancelled one: that is final.)"""
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended."""

    code: int
    why: str


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
    stored = newest_stored(paths)
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
    state, stored = states[0], newest_stored(paths)
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
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    self._offset += len(chunk)
                    sys.stdout.buffer.write(chunk)
        except FileNotFoundError:
            return
        sys.stdout.buffer.flush()


def follow(client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, show_log: bool) -> int:
    """Wait for the run's end; Ctrl-C ends the waiting alone.

    Returns:
        The run's exit code; 130 after Ctrl-C.
    """
    try:
        end = _wait(client, job, paths, clock=clock, tail=LogTail(str(paths.job_log)) if show_log else None)
    except KeyboardInterrupt:
        say(f"job {job} goes on without being watched; to end it: scancel {job}")
        return int(ExitCode.INTERRUPTED)
    say(f"run {paths.run_id} ended: {end.why}; report: hpc-elastic report {job}")
    return end.code


def _wait(client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, tail: LogTail | None) -> End:
    stop = threading.Event()  # never set: waiting ends by the job's end or by Ctrl-C
    said = ""
    waived: set[int] = set()
    ended_since: float | None = None
    next_question = clock.monotonic()
    while True:
        if tail is not None:
            tail.show()
        if clock.monotonic() >= next_question:
            try:
                states = client.job_states(job)
                line = _describe(states)
            except SlurmError as error:
                states, line = None, f"can't be asked about: {error.why}; trying on"
            if line != said:
                say(f"job {job} {line}")
                said = line
            now = clock.monotonic()
            if states is not None:
                waive_delay(client, job, states, paths, waived)
            if states is not None and all(state.phase is JobPhase.FINISHED for state in states):
                following = job_now(paths)
                if following is not None and following != job.number:
                    say(f"job {following} goes on with the run")
                    job, said, ended_since = JobId(following, job.cluster), "", None
                    continue
                result = newest_result(paths)
                ended_since = now if ended_since is None else ended_since
                told = result is not None and result != ExitCode.REQUEUED
                cancelled = all(state.state == "CANCELLED" for state in states) and bool(states)
                if told or cancelled or now - ended_since >= _SETTLE:
                    if tail is not None:
                        tail.show()
                    return how_it_ended(states, result)
            elif states is not None:
                ended_since = None
            next_question = now + _ASK_SLURM_EVERY
        clock.wait(stop, _ASK_SLURM_EVERY if tail is None else _LOOK_AT_LOG_EVERY)


def _describe(states: tuple[JobState, ...]) -> str:
    if not states:
        return "is no longer known to Slurm"
    if len(states) > 1:
        counts: dict[str, int] = {}
        for state in states:
            counts[state.state.lower()] = counts.get(state.state.lower(), 0) + 1
        return "has " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    state = states[0]
    if state.phase is JobPhase.PENDING:
        again = f" again (restart {state.restarts})" if state.restarts else ""
        begin = f", not before {state.start_time}" if state.reason == "BeginTime" and state.start_time else ""
        held = f"; {state.way_out}" if state.held else ""
        return f"is pending{again}: {state.reason or 'not looked at yet'}{begin}{held}"
    if state.phase is JobPhase.RUNNING:
        try:
            return f"is {state.state.lower()} on {compress(state.nodes)}"
        except HostlistError:
            return f"is {state.state.lower()}"
    return f"is {state.state.lower()}{f' ({state.reason})' if state.reason else ''}"
