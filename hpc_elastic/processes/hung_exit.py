"""Leaving a process of which a thread hangs in the kernel.

A mount that does not answer can hold a thread so that not even the process' own end takes it. The process then stays in
the table until the mount answers, and all its descriptors stay open: whoever waits for the end of file on its output
would wait as long. So the output is let go by hand, and nothing else is waited for or cleaned up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NoReturn


def output_pipes() -> list[int]:
    """Which of stdout and stderr can be closed without asking any filesystem. To be asked early, while all answer."""
    found = []
    for fd in (1, 2):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
            found.append(fd)
    return found


def leave_hung_threads(code: int, pipes: Sequence[int]) -> NoReturn:
    """End at once, whatever the other threads do.

    Args:
        code: The exit code.
        pipes: As `output_pipes` found them.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for fd in pipes:
            os.dup2(null, fd)
    finally:
        os._exit(code)
