"""Standard output that can't be written: a full disk, a reader that has gone."""

from __future__ import annotations

import errno
import os
import sys

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def output_failed(error: OSError) -> bool:
    """Whether it came from writing, and names no file: standard output, as a rule."""
    return error.filename is None and (isinstance(error, BrokenPipeError) or error.errno in _FULL)


def leave_output() -> None:
    """Have what could not be written forgotten; else Python would complain once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
