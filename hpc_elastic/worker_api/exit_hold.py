"""Functions' workers of one node end together: one that has returned waits for the node's others.

Where a peer's connection closes while a process ends whose process group was not destroyed, gloo's threads abort it
(SIGABRT at exit, after the result was written: seen with torch 2.13 on busy CPUs). No agent takes part: the workers
share one file with a byte for each, which its process locks while it lives.
"""

from __future__ import annotations

import fcntl
import os
import time

from hpc_elastic.worker_api.heartbeat import heartbeat

SECTION = "returned"
"""The section of a worker that is held: no timeout is meant for it."""
_STARTED, _RETURNED = b"s", b"r"
_LOOK_SECONDS = 0.02
_BEAT_SECONDS = 1.0


class ExitHold:
    def __init__(self, path: str, *, local_rank: int, local_world_size: int) -> None:
        """`path`: on the node itself, another in each round. Where it can't be written, no worker is held."""
        self._others = [rank for rank in range(local_world_size) if rank != local_rank]
        self._rank = local_rank
        self._fd = -1
        if not self._others:
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, local_rank)
            os.pwrite(self._fd, _STARTED, local_rank)
        except OSError:
            self._fd = -1

    def wait(self) -> None:
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, _RETURNED, self._rank)
            next_beat = 0.0
            while not all(map(self._is_over, self._others)):
                if time.monotonic() >= next_beat:
                    heartbeat(section=SECTION)
                    next_beat = time.monotonic() + _BEAT_SECONDS
                time.sleep(_LOOK_SECONDS)
        except OSError:
            return

    def _is_over(self, rank: int) -> bool:
        state = os.pread(self._fd, 1, rank)
        if state != _STARTED:
            return state == _RETURNED
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except (BlockingIOError, PermissionError):
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)  # a process that takes its place may lock it
        return True
