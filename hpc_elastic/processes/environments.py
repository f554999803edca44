"""Reading the environments of many processes, none of which can hold the reader up.

To open ``/proc/<pid>/environ`` is to wait for a program that is just being loaded, and one whose inherited file lies on
a mount that hangs is loaded never: the kernel closes the file first (``exec_update_lock``, seen on Linux 6.18). So a
thread reads, and is left behind where it does not come on.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence

PATIENCE_SECONDS = 1.0
"""So long one process is waited for: it takes microseconds."""


def read_all(pids: Sequence[int], read: Callable[[int], bytes | None]) -> dict[int, bytes]:
    """What `read` gives for each of `pids`; those that give nothing, or do not answer, are left out.

    Raises:
        OSError: as `read` does.
    """
    found: dict[int, bytes] = {}
    left = list(pids)
    while left:
        reader = _Reader(left, read)
        reader.run_until_stuck()
        if reader.error is not None:
            raise reader.error
        found.update({pid: raw for pid, raw in reader.seen if raw})
        left = left[len(reader.seen) + 1 :]
    return found


class _Reader:
    def __init__(self, pids: Sequence[int], read: Callable[[int], bytes | None]) -> None:
        self.seen: tuple[tuple[int, bytes | None], ...] = ()
        """In the order of `pids`; what comes after `run_until_stuck` has returned is not in it."""
        self.error: OSError | None = None
        self._pids = pids
        self._read = read
        self._come: list[tuple[int, bytes | None]] = []
        self._done = _thread.allocate_lock()

    def run_until_stuck(self) -> None:
        self._done.acquire()
        try:
            # Not threading's: its `start` waits for the thread, which may never come where memory is short.
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            self._run()
        before = -1
        while not self._done.acquire(timeout=PATIENCE_SECONDS):
            count = len(self._come)
            if count == before:
                break
            before = count
        self.seen = tuple(self._come)

    def _run(self) -> None:
        try:
            for pid in self._pids:
                self._come.append((pid, self._read(pid)))
        except OSError as error:
            self.error = error
        finally:
            self._done.release()
