"""One worker's failure: evidence, class, fingerprint; and torch's own names for it, without torch.

A program that imports from ``torch.distributed.elastic.multiprocessing.errors`` finds the same names here, and its
modules ``error_handler`` and ``handlers``. They are imported when they are first asked for: an agent needs none of
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.failures.error_handler import ErrorHandler
    from hpc_elastic.failures.handlers import get_error_handler
    from hpc_elastic.failures.recording import ChildFailedError, ProcessFailure, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

_HOMES = {
    "ChildFailedError": "recording",
    "ErrorHandler": "error_handler",
    "ProcessFailure": "recording",
    "get_error_handler": "handlers",
    "record": "recording",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
