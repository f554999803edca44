"""`record`: write what a function raised into ``TORCHELASTIC_ERROR_FILE``. A drop-in for torch's, without torch.

Not needed for a traceback in the report, since the agent finds it in stderr.log; a recorded one is exact, carries the
time at which it was raised, and reaches outer schedulers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hpc_elastic.failures.error_handler import ErrorHandler
from hpc_elastic.failures.handlers import get_error_handler
from hpc_elastic.failures.process_failure import NOT_AVAILABLE

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Record what `fn` raises. Use it once per process, on the outermost function.

    Everything is raised again, except an exit with 0, for which the call returns None. A
    `ChildFailedError`, torch's or ours, passes the first child's file on. An exit with another code is a failure.

    Args:
        fn: The function.
        error_handler: None: what `get_error_handler` gives.

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
