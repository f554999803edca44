"""A failure of this package itself as an error file: for whoever looks into it, and for an outer scheduler."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from hpc_elastic.errors import describe_error
from hpc_elastic.failures.error_file import error_data, write_error_data
from hpc_elastic.failures.kinds import Category
from hpc_elastic.failures.traceback_text import MESSAGE_LIMIT, TEXT_LIMIT, clean_text, cut_end, cut_middle


def write_own_failure(path: Path | str, error: BaseException, *, role: str, host: str, now_ns: int) -> None:
    """Write what ended an agent or a supervisor.

    Args:
        path: Where; what is there is replaced.
        error: What it raised.
        role: ``agent`` or ``supervisor``.
        host: Where it ran.
        now_ns: Its wall clock.

    Raises:
        OSError: the disk is full, the folder is gone …
    """
    text = clean_text("".join(traceback.format_exception(error)))
    own = {"host": host, "role": role, "pid": os.getpid(), "category": Category.PLATFORM.value}
    write_summary(path, describe_error(error), traceback_text=cut_middle(text, TEXT_LIMIT), now_ns=now_ns, own=own)


def write_summary(
    path: Path | str,
    message: str,
    *,
    now_ns: int,
    traceback_text: str = "",
    error_code: int | None = None,
    own: dict[str, object] | None = None,
) -> None:
    """Write an error file about what no worker left one of: a lost node, too few nodes, a failure of our own.

    Args:
        path: Where; what is there is replaced.
        message: One line, or more.
        now_ns: The wall clock.
        traceback_text: Where there is one.
        error_code: The exit code that goes with it.
        own: What goes under ``hpc_elastic``.

    Raises:
        OSError: the disk is full, the folder is gone …
    """
    text = cut_end(clean_text(message), MESSAGE_LIMIT)
    data = error_data(message=text, traceback=traceback_text, timestamp_ns=now_ns, error_code=error_code, own=own)
    write_error_data(path, data)
