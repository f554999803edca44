"""One worker's failure: evidence, class, fingerprint; and torch's own names for it, without torch.

Whoever imports from ``torch.distributed.elastic.multiprocessing.errors`` finds the same names here.
"""

from hpc_elastic.failures.process_failure import ChildFailedError, ProcessFailure
from hpc_elastic.failures.record import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
