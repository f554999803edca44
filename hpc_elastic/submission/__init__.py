"""Python functions as runs, in submitit's way: `ElasticExecutor` and its jobs.

Everything is imported when it is first used: a worker that runs a function needs little of it, and not submitit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.submission.call import Command as Command
    from hpc_elastic.submission.call import Module as Module
    from hpc_elastic.submission.call import Script as Script
    from hpc_elastic.submission.environment import ElasticJobFailedError as ElasticJobFailedError
    from hpc_elastic.submission.environment import ElasticJobUncompletedError as ElasticJobUncompletedError
    from hpc_elastic.submission.executor import ElasticExecutor as ElasticExecutor
    from hpc_elastic.submission.job import ElasticJob as ElasticJob

_FROM = {
    "ElasticExecutor": "executor",
    "ElasticJob": "job",
    "ElasticJobFailedError": "environment",
    "ElasticJobUncompletedError": "environment",
    "Command": "call",
    "Module": "call",
    "Script": "call",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})
