"""One worker's failure: evidence, class, fingerprint; and torch's own names for it, without torch.

A program that imports from ``torch.distributed.elastic.multiprocessing.errors`` finds the same names here, and its
modules ``error_handler`` and ``handlers``. They are imported when they are first asked for: an agent needs none of
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.failures.error_handler import (
        ChildFailedError,
        ErrorHandler,
        ProcessFailure,
        get_error_handler,
        record,
    )

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.error_handler"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
