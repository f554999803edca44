"""`record`: write what a function raised into ``TORCHELASTIC_ERROR_FILE``. A drop-in for torch's, without torch.

Not needed for a traceback in the report, since the agent finds it in stderr.log; a recorded one is exact, carries the
time at which it was raised, and reaches outer schedulers.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hpc_elastic.failures.error_file import (
    error_code_set,
    error_data,
    read_error_file,
    write_error_data,
)
from hpc_elastic.failures.fingerprint import fingerprint
from hpc_elastic.failures.process_failure import NOT_AVAILABLE
from hpc_elastic.failures.traceback_text import (
    MESSAGE_LIMIT,
    TEXT_LIMIT,
    clean_text,
    cut_end,
    cut_middle,
    find_python_traceback,
)

logger = logging.getLogger(__name__)

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_P = ParamSpec("_P")
_R = TypeVar("_R")


class ErrorHandler:
    """Writes failures down. Subclass it to do more; `record` calls the three public methods."""

    def initialize(self) -> None:
        """Called before each recorded call. Turns faulthandler on: a fatal signal then leaves its stack on stderr."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # stderr is closed, or is no real file
            logger.warning("no stack will be shown for fatal signals: %s", error)

    def record_exception(self, exc: BaseException) -> None:
        """Write the exception into the error file; without one, nothing (Python prints the traceback anyway)."""
        path = self._get_error_file_path()
        if not path:
            return
        now = time.time_ns()
        text = _format(exc)
        found = find_python_traceback(text)
        name = type(exc).__name__
        message = _message_of(exc)
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **_ranks(),
            "exception_type": name,
            "fingerprint": fingerprint(
                exception_type=name, message=message, frames=found.frames if found else (), exitcode=1
            ),
            "frames": [[f.file, f.line, f.function] for f in found.frames[-50:]] if found else [],
            "recorded_by": "hpc_elastic",
        }
        self._write(
            path,
            error_data(message=cut_end(f"{name}: {message}", MESSAGE_LIMIT), traceback=text, timestamp_ns=now, own=own),
        )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Pass a child's error file on as this process's own, with the child's exit code where one is given.

        A file that can't be read as JSON is passed on as far as it could be saved.
        """
        content = read_error_file(rootcause_error_file)
        data = content.data
        if not data and content.found:
            data = error_data(
                message=content.message,
                traceback=content.traceback,
                timestamp_ns=content.timestamp_ns or time.time_ns(),
                own={"problem": content.problem},
            )
        if not data:
            logger.warning("the error file %s of the first failed process is %s", rootcause_error_file, content.problem)
            return
        if error_code:
            data = error_code_set(data, error_code)
        path = self._get_error_file_path()
        if not path:
            logger.info("no %s is set: %s is not passed on", ERROR_FILE_VARIABLE, rootcause_error_file)
            return
        if os.path.abspath(path) != os.path.abspath(rootcause_error_file) or error_code:
            self._write(path, data)

    def _get_error_file_path(self) -> str | None:
        """Where to write; None: nowhere. Torch's handler has this method too, and people override it."""
        return os.environ.get(ERROR_FILE_VARIABLE)

    def _write(self, path: str, data: dict[str, Any]) -> None:
        try:
            write_error_data(Path(path), data)
        except OSError as error:  # a full disk must not hide the exception that is on its way up
            logger.warning("could not write the error file %s: %s", path, error)


def get_error_handler() -> ErrorHandler:
    """The handler that `record` uses where none is given."""
    return ErrorHandler()


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Record what `fn` raises. Use it once per process, on the outermost function.

    Everything is raised again, except an exit with 0, for which the call returns None. A
    `ChildFailedError`, torch's or ours, passes the first child's file on. An exit with another code is a failure.

    Example::

        @record
        def main(): ...
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as exit_request:
            if exit_request.code == 0:
                return None
            if exit_request.code is not None:
                _guarded(handler.record_exception, exit_request)
            raise
        except Exception as error:
            first = _first_of_children(error)
            if first is None:
                _guarded(handler.record_exception, error)
            elif first.error_file != NOT_AVAILABLE:
                _guarded(handler.dump_error_file, first.error_file, first.exitcode)
            else:
                logger.info("local_rank %s failed and left no error file; its own log says more", first.local_rank)
            raise

    return wrapper


def _guarded(action: Callable[..., None], *args: Any) -> None:
    """A failure while reporting a failure never hides the failure."""
    try:
        action(*args)
    except Exception:
        logger.warning("the failure could not be recorded", exc_info=True)


def _first_of_children(error: BaseException) -> Any:
    """The first failure of a ChildFailedError, torch's included, which is not imported for this; else None."""
    if not any(base.__name__ == "ChildFailedError" for base in type(error).__mro__):
        return None
    try:
        return error.get_first_failure()[1]  # type: ignore[attr-defined]
    except Exception:
        return None


def _message_of(exc: BaseException) -> str:
    try:
        text = str(exc)
    except Exception as error:
        text = f"<its text could not be made: {type(error).__name__}>"
    if isinstance(exc, SystemExit) and isinstance(exc.code, int):
        text = f"exit code {exc.code}"
    return cut_end(clean_text(text[: 2 * MESSAGE_LIMIT]), MESSAGE_LIMIT)


def _format(exc: BaseException) -> str:
    import traceback

    try:
        text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    except Exception:  # MemoryError, a __str__ or __cause__ that misbehaves
        text = f"{type(exc).__name__}: {_message_of(exc)}\n"
    if len(text) > 4 * TEXT_LIMIT:  # cut before it is cleaned: it may be megabytes
        text = text[:TEXT_LIMIT] + f"\n... {len(text) - 2 * TEXT_LIMIT} characters cut ...\n" + text[-TEXT_LIMIT:]
    return cut_middle(clean_text(text), TEXT_LIMIT)


def _ranks() -> dict[str, int]:
    """This worker's place, as its agent put it into the environment."""
    found: dict[str, int] = {}
    for key, variable in (
        ("global_rank", "RANK"),
        ("local_rank", "LOCAL_RANK"),
        ("round", "TORCHELASTIC_RESTART_COUNT"),
    ):
        value = os.environ.get(variable, "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            found[key] = int(value)
    return found
