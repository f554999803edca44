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

import sys

from hpc_elastic.inprocess import (
    abort,
    hooks,
    monitor_process,
    monitor_thread,
    progress_watchdog,
    rank_assignment,
    state,
    store,
)
from hpc_elastic.inprocess.hooks import Compose
from hpc_elastic.inprocess.wrap import CallWrapper, Wrapper

attribution = exception = state
finalize = health_check = initialize = rank_filter = hooks

# The extension has a module for each of these: a script that imports from one of them need not be changed either.
sys.modules |= {f"{__name__}.{name}": state for name in ("attribution", "exception")}
sys.modules |= {f"{__name__}.{name}": hooks for name in ("finalize", "health_check", "initialize", "rank_filter")}

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
