"""Output of the subcommands: colours, width, notes on stderr, and standard output that can't be written."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from hpc_elastic.output.terminal import one_line

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
_RANK_COLOURS = ("36", "35", "33", "34", "32", "96", "95", "94")


def wants_colour(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Colours on a terminal alone: NO_COLOR forbids them, FORCE_COLOR asks for them anywhere, TERM=dumb has none."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR"):
        return env["FORCE_COLOR"] != "0"
    return env.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False  # it is closed


def width_for(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if is_terminal(stream) else 120


def painted(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


def rank_colour(rank: int) -> str:
    return _RANK_COLOURS[rank % len(_RANK_COLOURS)]


def print_note(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"hpc-elastic: {one_line(text)}\n")
        sys.stderr.flush()


def output_failed(error: OSError) -> bool:
    """Tell a failed write to standard output: the error names no file."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return error.filename is None and (isinstance(error, BrokenPipeError) or is_full)


def leave_output() -> None:
    """Discard what could not be written; else Python would complain once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
