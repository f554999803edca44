"""``hpc-elastic report --follow``: the report again each time that the run's story has grown, to its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from hpc_elastic.cli import run_job
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.cli.run_end import RunEnd, RunWatch
from hpc_elastic.clock import Clock

_SHORTEST_S = 1.0
_FILES_PER_SECOND = 200
_SHARE = 10
"""Making a report takes at most a tenth of the time."""


class ReportFollower:
    """Looks whether there is anything new, and only then reads the run."""

    def __init__(self, asked: AskedRun, show: Callable[[], None], *, clock: Clock) -> None:
        """Args:
        asked: The run.
        show: Reads the run, and prints its report where it differs from the last one.
        clock: For the pace.
        """
        self._asked = asked
        self._show = show
        self._clock = clock

    def run(self) -> RunEnd:
        """Show it now, whenever it changes, and at the end."""
        stop = threading.Event()  # never set: Ctrl-C ends it
        client = run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
        watch = RunWatch(self._asked.paths, attempt=self._asked.attempt, clock=self._clock, client=client)
        seen: object = None
        while True:
            end = watch.end()
            state, files = self._state()
            began = self._clock.monotonic()
            if state != seen or end is not None:
                seen = state
                self._show()
            if end is not None:
                return end
            cost = self._clock.monotonic() - began
            self._clock.wait(stop, max(_SHORTEST_S, files / _FILES_PER_SECOND, cost * _SHARE))

    def _state(self) -> tuple[object, int]:
        """What changes when there is news: the sizes of the newest attempt's event logs, and its end."""
        attempt = self._asked.shown_attempt()
        if attempt is None:
            return None, 0
        found: list[tuple[str, int]] = []
        try:
            with os.scandir(attempt.events) as entries:
                found = sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries)
        except OSError:
            pass
        return (attempt.number, tuple(found), attempt.result_json.exists()), len(found)
