"""In-process restart: a fault on any rank starts a function again on all healthy ranks, in the same processes.

The names are those of NVIDIA's resiliency extension 0.2 (``nvidia_resiliency_ext.inprocess``)::

    import hpc_elastic.inprocess as inprocess

    @inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=3))
    def train(call: inprocess.CallWrapper) -> None:
        torch.distributed.init_process_group("gloo")
        ...

See ``docs/how-to/restart-in-process.md``.
"""

from __future__ import annotations

from hpc_elastic.inprocess import (
    abort,
    attribution,
    exception,
    finalize,
    health_check,
    initialize,
    monitor_process,
    monitor_thread,
    progress_watchdog,
    rank_assignment,
    rank_filter,
    state,
    store,
)
from hpc_elastic.inprocess.compose import Compose
from hpc_elastic.inprocess.wrap import CallWrapper, Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "Wrapper",
    "abort",
    "attribution",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_process",
    "monitor_thread",
    "progress_watchdog",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
]
