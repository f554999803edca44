"""The place where torch has its ``get_error_handler``."""

from hpc_elastic.failures.error_handler import get_error_handler

__all__ = ["get_error_handler"]
