"""``--follow`` of `logs` and `report`: show what is new until the run has ended, and take over its exit code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from msgspec import Struct

from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.cli import run_job
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.cli.screen import print_note
from hpc_elastic.launch.run_status import RunState, ends_by_slurm, read_status
from hpc_elastic.run.paths import AttemptPaths, ExitCode, RunPaths, load_result
from hpc_elastic.slurm.client import SlurmClient

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
