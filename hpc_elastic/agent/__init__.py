"""One node's part in a run: joins rounds, starts and watches workers, ends them, and reports what failed.

For Python users, with torch's names: `WorkerSpec`, `LocalElasticAgent`, and `SimpleElasticAgent` for other ways of
starting workers. They are imported when they are first used: ``hpc-elastic agent`` needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.agent.elastic_agent import ElasticAgent as ElasticAgent
    from hpc_elastic.agent.elastic_agent import SimpleElasticAgent as SimpleElasticAgent
    from hpc_elastic.agent.local_agent import LocalElasticAgent as LocalElasticAgent
    from hpc_elastic.agent.supervision import DEFAULT_ROLE as DEFAULT_ROLE
    from hpc_elastic.agent.supervision import MonitorResult as MonitorResult
    from hpc_elastic.agent.supervision import RunResult as RunResult
    from hpc_elastic.agent.supervision import Worker as Worker
    from hpc_elastic.agent.supervision import WorkerGroup as WorkerGroup
    from hpc_elastic.agent.supervision import WorkerGroupFailureError as WorkerGroupFailureError
    from hpc_elastic.agent.supervision import WorkerGroupFailureException as WorkerGroupFailureException
    from hpc_elastic.agent.supervision import WorkerSpec as WorkerSpec
    from hpc_elastic.agent.supervision import WorkerState as WorkerState

_FROM = {
    "elastic_agent": ("ElasticAgent", "SimpleElasticAgent"),
    "local_agent": ("LocalElasticAgent",),
    "supervision": (
        "DEFAULT_ROLE",
        "MonitorResult",
        "RunResult",
        "Worker",
        "WorkerGroup",
        "WorkerGroupFailureError",
        "WorkerGroupFailureException",
        "WorkerSpec",
        "WorkerState",
    ),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
