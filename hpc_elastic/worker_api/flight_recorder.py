"""Makes a worker dump torch's flight recorder when its agent asks for it, and as it dies of an exception.

NCCL's process group does so by itself; gloo's does not.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

VARIABLE = "HPC_ELASTIC_FLIGHT_RECORDER"
"""What the names of this rank's files begin with; unset: there are none."""
ASK, DUMP, PONG = ".ask", ".json", ".alive"
"""``PREFIX.<pid>.ask`` is a pipe: a byte asks for a dump, which comes as ``PREFIX.<pid>.json``."""
PING = b"?"
"""This byte asks for ``PREFIX.<pid>.alive`` alone, an empty file."""
_OLD_NAMES = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
"""Variables that torch before 2.9 read; newer ones warn of them."""


def start() -> None:
    """Wait, in a thread, for the agent to ask for dumps; outside of a run do nothing."""
    prefix = os.environ.get(VARIABLE)
    if not prefix:
        return
    _name_as_before()
    own = f"{prefix}.{os.getpid()}"
    os.mkfifo(own + ASK, 0o600)
    fd = os.open(own + ASK, os.O_RDWR | os.O_CLOEXEC)  # with a writer of its own it never reads an end
    threading.Thread(target=_listen, args=(fd, own), name="hpc-elastic-flight-recorder", daemon=True).start()
    atexit.register(_at_exit, own, os.getpid())


def _name_as_before() -> None:
    major, minor = sys.modules["torch"].__version__.split(".")[:2]
    if (int(major), int(minor)) < (2, 9):
        for old, new in _OLD_NAMES.items():
            if new in os.environ:
                os.environ.setdefault(old, os.environ[new])


def _listen(fd: int, own: str) -> None:
    while asked := os.read(fd, 64):
        try:
            os.close(os.open(own + PONG, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            pass  # its folder is gone
        if asked.strip(PING):
            _dump(own)


def _at_exit(own: str, pid: int) -> None:
    if getattr(sys, "last_value", None) is not None and os.getpid() == pid:
        _dump(own)


def _dump(own: str) -> None:
    """Write what this process has recorded; without a process group that is nothing. Never raises."""
    try:
        c10d: Any = sys.modules["torch"]._C._distributed_c10d
        raw = c10d._dump_fr_trace_json()
        with open(os.open(f"{own}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(raw if isinstance(raw, bytes) else raw.encode())
        os.replace(f"{own}.part", own + DUMP)
    except Exception:
        pass  # no distributed torch, an older one, a full disk: as if there were no recorder
