"""`ErrorHandler`: writes what was raised into ``TORCHELASTIC_ERROR_FILE``, and passes a child's file on.

The methods, their parameters and their meaning are those of torch's
``torch.distributed.elastic.multiprocessing.errors.error_handler`` (2.4 to 2.13 alike), without torch. What differs: a
file is written whole or not at all, a file that can't be read is passed on as far as it could be saved, and nothing
that fails here hides the failure that is on its way up.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from hpc_elastic.base.files import write_private
from hpc_elastic.base.text import clean_text, cut_end, cut_middle
from hpc_elastic.failures.error_file import error_data, read_error_file
from hpc_elastic.failures.failure_text import MESSAGE_LIMIT, TEXT_LIMIT
from hpc_elastic.failures.fingerprint import fingerprint
from hpc_elastic.failures.traceback_text import find_python_traceback

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

        Args:
            rootcause_error_file: Where the data came from.
            rootcause_error: Changed in place.
            error_code: As subprocess gives it: negative for a signal, which the child could not write down itself.
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
        """Where to write; None: nowhere. Torch's handler has this method too, and people override it."""
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
        ("attempt", "HPC_ELASTIC_ATTEMPT"),
    ):
        value = os.environ.get(variable, "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            found[key] = int(value)
    return found
