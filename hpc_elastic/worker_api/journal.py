"""The journal of a rehearsed run: the steps, losses and checkpoints that a worker reports, each as a line of a file.

``hpc-elastic rehearse`` asks for it by a variable; without that a heartbeat writes no file. A line is one object:
``t`` (this host's wall clock, seconds), ``attempt``, ``round``, ``rank``, ``world``, and ``step`` (with ``loss``) or
``saved`` (the step that a checkpoint holds, or null).
"""

from __future__ import annotations

import json
import os
import sys
import time

VARIABLE = "HPC_ELASTIC_JOURNAL"
_MOST_BYTES = 1 << 20
_PLACE = {
    "attempt": "HPC_ELASTIC_ATTEMPT",
    "round": "TORCHELASTIC_RESTART_COUNT",
    "rank": "RANK",
    "world": "WORLD_SIZE",
}


class Journal:
    def __init__(self) -> None:
        self._fd: int | None = None
        self._place: dict[str, int] = {}
        self._unwritten = b""
        """Is written with the next line: a full disk is one of the faults, and no step is to be missing by it."""
        self._has_warned = False

    def note(self, **facts: object) -> None:
        now, folder = time.time(), os.environ.get(VARIABLE)
        if not folder:
            return
        try:
            if not self._place:
                self._place = {key: int(os.environ[name]) for key, name in _PLACE.items() if name in os.environ}
            self._unwritten += json.dumps({"t": now, **self._place, **facts}).encode() + b"\n"
            if self._fd is None:
                place = "-".join(f"{value:05d}" for value in self._place.values())
                path = os.path.join(folder, f"{place}-{os.uname().nodename}-{os.getpid()}.jsonl")
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
        except (OSError, ValueError) as error:
            if not self._has_warned:
                sys.stderr.write(f"hpc_elastic: the rehearsal's journal can't be written now: {error}\n")
            self._has_warned = True
            if len(self._unwritten) > _MOST_BYTES:
                self._unwritten = b""
