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

from hpc_elastic.inprocess import abort as abort
from hpc_elastic.inprocess import hooks, iterations, state
from hpc_elastic.inprocess import monitor_process as monitor_process
from hpc_elastic.inprocess import progress_watchdog as progress_watchdog
from hpc_elastic.inprocess import store as store
from hpc_elastic.inprocess import tools as tools
from hpc_elastic.inprocess.hooks import Compose as Compose
from hpc_elastic.inprocess.wrap import CallWrapper as CallWrapper
from hpc_elastic.inprocess.wrap import Wrapper as Wrapper

attribution = exception = state
compose = finalize = health_check = initialize = rank_assignment = rank_filter = hooks
monitor_thread = iterations

# The extension has a module for each of these: a script that imports from one of them need not be changed either.
sys.modules |= {f"{__name__}.{name}": state for name in ("attribution", "exception")}
sys.modules |= {
    f"{__name__}.{name}": hooks
    for name in ("compose", "finalize", "health_check", "initialize", "rank_assignment", "rank_filter")
}
sys.modules[f"{__name__}.monitor_thread"] = monitor_thread
