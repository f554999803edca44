"""Lets other hosts read the job log while the job runs.

The batch script, srun and all that they start hold it open for the whole job. What is written to an open file an NFS
client keeps until it is half a minute old. Before Linux's client answers a stat, it writes the file out (nfs_getattr,
read in 6.x); where nothing is kept back, as on Lustre or a local disk, a stat costs next to nothing, unlike an fsync.
"""

from __future__ import annotations

import os
import stat
import threading

from hpc_elastic.clock import Clock

INTERVAL = 1.0
"""Seconds. A server notices one WRITE a second of each job that prints."""


class WriteBack:
    """A daemon thread that asks for an open file's times, again and again. It alone waits where the mount hangs."""

    def __init__(self, fd: int, clock: Clock, *, interval: float = INTERVAL) -> None:
        self._fd = fd
        self._clock = clock
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)

    def start(self) -> bool:
        """Returns whether there is a need: a pipe or a terminal has none."""
        try:
            is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
        except OSError:
            return False
        if is_file:
            self._thread.start()
        return is_file

    def stop(self) -> None:
        """Does not wait. Whoever closes the file writes it out."""
        self._stop.set()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._interval):
            try:
                os.fstat(self._fd)
            except OSError:
                pass  # who writes to it hears of it
