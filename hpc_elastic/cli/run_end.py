"""Whether a run that somebody follows has ended: by its files, and where these say nothing new, by Slurm."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpc_elastic.cli import run_job
from hpc_elastic.clock import Clock
from hpc_elastic.launch.attempts import begun_attempts
from hpc_elastic.launch.result import load_result
from hpc_elastic.outcome import ExitCode
from hpc_elastic.reading.run_status import RunState
from hpc_elastic.run_paths import AttemptPaths, RunPaths
from hpc_elastic.slurm.client import SlurmClient

SILENT_SECONDS = 300.0
"""A run of which no file has changed for so long has ended without a word: agents write signs of life every half minute
at most, however many they are."""
_LOOK_SECONDS = 1.0
_SIGNS_SECONDS = 20.0
_ASK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
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
        begun = begun_attempts(self._paths)
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
