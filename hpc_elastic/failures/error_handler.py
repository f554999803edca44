"""torch's `ErrorHandler`, `record`, `ProcessFailure` and `ChildFailedError`, without torch.

The methods are those of ``torch.distributed.elastic.multiprocessing.errors`` (2.4 to 2.13 alike). What differs: a file
is written whole or not at all; a torn or foreign one raises nothing and is passed on as far as it could be saved; the
finer time stamp breaks ties; `host` is where it happened; both errors pickle.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field  # noqa: TID251  (torch's is one; no agent imports this module as it starts)
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hpc_elastic.base.files import write_private
from hpc_elastic.base.text import clean_text, cut_end, cut_middle
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.failures.classify import signal_name
from hpc_elastic.failures.error_file import ErrorFile, error_data, read_error_file
from hpc_elastic.failures.failure_text import MESSAGE_LIMIT, TEXT_LIMIT, fingerprint
from hpc_elastic.failures.traceback_text import find_python_traceback

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure

__all__ = ["ErrorHandler"]

logger = logging.getLogger(__name__)

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


class ErrorHandler:
    """Writes failures down. Subclass it to do more: `record` calls the public methods, and any may be overridden."""

    def initialize(self) -> None:
        """Called before each recorded call. Turns faulthandler on: a fatal signal then leaves its stack on stderr."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # stderr is closed, or is no real file
            logger.warning("no stack will be shown for fatal signals: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Write the exception into the error file; without one, nothing (Python prints the traceback anyway)."""
        path = self._get_error_file_path()
        if not path:
            return
        now = time.time_ns()
        text = _format(e)
        found = find_python_traceback(text)
        name = type(e).__name__
        message = _message_of(e)
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

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the child's exit code into its data, where ``message`` is an object; `dump_error_file` calls it.

        `rootcause_error` is changed in place; `error_code` is negative for a signal, as subprocess has it.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            logger.info("no exit code is added to %s: its message is no object", rootcause_error_file)

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
            self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        path = self._get_error_file_path()
        if not path:
            logger.info("no %s is set: %s is not passed on", ERROR_FILE_VARIABLE, rootcause_error_file)
            return
        if os.path.abspath(path) != os.path.abspath(rootcause_error_file) or error_code:
            self._write(path, data)

    def _get_error_file_path(self) -> str | None:
        """torch's handler has this method too, and people override it. None: the file is written nowhere."""
        return os.environ.get(ERROR_FILE_VARIABLE)

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        """Write JSON text: through a temporary file and ``os.replace``. Torch's handler has this method too."""
        write_private(Path(file_path), error_msg)

    def _write(self, path: str, data: dict[str, Any]) -> None:
        try:
            # ASCII only: a message may hold lone surrogates, which no encoding of the file could store.
            self._write_error_file(path, json.dumps(data, default=str))
        except OSError as error:  # a full disk must not hide the exception that is on its way up
            logger.warning("could not write the error file %s: %s", path, error)


def get_error_handler() -> ErrorHandler:
    """A new handler, which writes into ``TORCHELASTIC_ERROR_FILE``; `record` uses it where none is given."""
    return ErrorHandler()


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
    found: dict[str, int] = {}
    for key, variable in (
        ("global_rank", "RANK"),
        ("local_rank", "LOCAL_RANK"),
        ("round", "TORCHELASTIC_RESTART_COUNT"),
        ("attempt", "HPC_ELASTIC_ATTEMPT"),
    ):
        value = os.environ.get(variable, "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            found[key] = int(value)
    return found


NOT_AVAILABLE = "<N/A>"


@dataclass
class ProcessFailure:
    """One failed process and what its error file says.

    Attributes:
        error_file: The path, or ``<N/A>`` where there is no such file.
        error_file_data: The file's JSON object; ``{"message": "<NONE>"}`` where none could be read.
        message: The file's ``message``, a string or torch's object; else one that names the signal or the exit code.
        timestamp: Whole seconds since the epoch by the worker's clock; now where there is no file.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)
    timestamp_ns: int = field(init=False, compare=False)
    host: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        path = os.fspath(self.error_file) if self.error_file else ""
        content = read_error_file(path) if path and path != NOT_AVAILABLE else ErrorFile()
        self.host = str(content.own.get("host") or "") or socket.gethostname()
        self.timestamp_ns = content.timestamp_ns or 0
        self.error_file_data = content.data or {"message": "<NONE>"}
        if content.problem == "missing":
            self.error_file = NOT_AVAILABLE
            self.timestamp_ns = time.time_ns()
            self.message = self._exit_message()
        elif content.data and not content.problem:
            self.message = content.data["message"] or self._exit_message()
        else:
            if content.timestamp_ns is None:
                try:
                    self.timestamp_ns = os.stat(path).st_mtime_ns
                except OSError:
                    self.timestamp_ns = time.time_ns()
            if content.found:
                self.message = error_data(
                    message=content.message, traceback=content.traceback, timestamp_ns=self.timestamp_ns
                )["message"]
            else:
                self.message = f"{self._exit_message()} (its error file is {content.problem})"
        self.timestamp = self.timestamp_ns // 1_000_000_000

    def _exit_message(self) -> str:
        if self.exitcode < 0:
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        return f"Process failed with exitcode {self.exitcode}"

    def signal_name(self) -> str:
        """``SIGKILL``, or ``<N/A>`` for an unknown signal and for an exit code that is no signal."""
        name = signal_name(-self.exitcode) if self.exitcode < 0 else ""
        return name if name.startswith("SIG") else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Local time, ``YYYY-MM-DD_HH:MM:SS``."""
        try:
            return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")
        except (OverflowError, OSError, ValueError):  # a foreign file's idea of a time
            return NOT_AVAILABLE


class ChildFailedError(HpcElasticError):
    """Some of the processes that this one started have failed.

    Raised from a function that `record` wraps, it passes the first failure's file on.
    """

    def __init__(self, name: str, failures: Mapping[int, ProcessFailure | WorkerFailure]) -> None:
        """`failures`, by global rank, may be those of ``WorkerGroupFailureError.get_worker_exceptions()``, too."""
        if not failures:
            raise AssertionError(f"ChildFailedError({name!r}) needs at least one failure")
        self.name = name
        self.failures = {rank: _as_process_failure(failure) for rank, failure in failures.items()}
        super().__init__(message=self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Global rank and failure with the smallest time; of equal ones the first in the mapping."""
        rank = min(self.failures, key=lambda r: (self.failures[r].timestamp, self.failures[r].timestamp_ns))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The block that torchrun's users know; the first failure stands last."""
        title = f"{self.name} FAILED"
        first, _ = self.get_first_failure()
        blocks = {rank: _block(index, rank, item) for index, (rank, item) in enumerate(self.failures.items())}
        others = [line for rank, lines in blocks.items() if rank != first for line in lines]
        widest = max(len(line) for lines in [[title], *blocks.values()] for line in lines)
        border, section = (delimiter * min(widest, 60) for delimiter in (boarder_delim, section_delim))
        parts = [border, title, section, "Failures:", *(others or ["  <NO_OTHER_FAILURES>"])]
        parts += [section, "Root Cause (first observed failure):", *blocks[first], border]
        return "\n" + "\n".join(parts)


def _as_process_failure(failure: Any) -> ProcessFailure:
    if hasattr(failure, "timestamp_isoformat"):  # ours, torch's, or another with the same methods
        return failure  # type: ignore[no-any-return]
    made = ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, failure.error_file)
    if made.error_file == NOT_AVAILABLE:
        made.message, made.host = failure.message, failure.host
        made.timestamp_ns, made.timestamp = failure.ended_ns, failure.ended_ns // 1_000_000_000
    return made


def _block(index: int, rank: int, failure: ProcessFailure) -> list[str]:
    signal, message = failure.signal_name(), failure.message
    if isinstance(message, Mapping):  # the traceback where there is one
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        message = stack if stack is not None else message.get("message", NOT_AVAILABLE)
    values = (
        ("time", failure.timestamp_isoformat()),
        ("host", failure.host),
        ("rank", f"{rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{failure.exitcode} (pid: {failure.pid})" + ("" if signal == NOT_AVAILABLE else f" ({signal})")),
        ("error_file", failure.error_file),
        ("traceback", str(message).replace("\n", "\n  ")),
    )
    text = "\n".join(f"  {name:<10}: {value}" for name, value in values)
    return [f"[{index}]:", *text.split("\n")]


_P = ParamSpec("_P")
_R = TypeVar("_R")


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Record what `fn` raises. Use it once per process, on the outermost function.

    Everything is raised again, except an exit with 0, for which the call returns None. A
    `ChildFailedError`, torch's or ours, passes the first child's file on. An exit with another code is a failure.
    Without `error_handler`, `get_error_handler` makes one.

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
    if not any(base.__name__ == "ChildFailedError" for base in type(error).__mro__):
        return None
    try:
        return error.get_first_failure()[1]  # type: ignore[attr-defined]
    except Exception:
        return None
