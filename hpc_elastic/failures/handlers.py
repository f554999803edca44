"""Which handler `record` uses where none is given; where torch has its own ``get_error_handler``."""

from __future__ import annotations

from hpc_elastic.failures.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """A new handler, which writes into ``TORCHELASTIC_ERROR_FILE``."""
    return ErrorHandler()
