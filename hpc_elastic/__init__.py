"""Fault-tolerant, elastic PyTorch training on Slurm.

For a training script: `heartbeat`, `section`, `checkpoint_done`, `commit`, `should_checkpoint`, `preemption_notice` and
`on_preemption`; `checkpoint_dir` and `latest_checkpoint`. They need no torch, and cost nothing until they are used.

For programs that submit, and for a notebook: `hpc_elastic.submission.ElasticExecutor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.checkpoints.folders import checkpoint_dir as checkpoint_dir
    from hpc_elastic.checkpoints.folders import latest_checkpoint as latest_checkpoint
    from hpc_elastic.worker_api.heartbeat import checkpoint_done as checkpoint_done
    from hpc_elastic.worker_api.heartbeat import heartbeat as heartbeat
    from hpc_elastic.worker_api.heartbeat import section as section
    from hpc_elastic.worker_api.lease import RoundOverError as RoundOverError
    from hpc_elastic.worker_api.lease import commit as commit
    from hpc_elastic.worker_api.preemption import PreemptionNotice as PreemptionNotice
    from hpc_elastic.worker_api.preemption import on_preemption as on_preemption
    from hpc_elastic.worker_api.preemption import preemption_notice as preemption_notice
    from hpc_elastic.worker_api.preemption import should_checkpoint as should_checkpoint

__version__ = "0.1.0"

_FROM = {
    name: f"hpc_elastic.{module}"
    for module, names in {
        "checkpoints.folders": ("checkpoint_dir", "latest_checkpoint"),
        "worker_api.heartbeat": ("checkpoint_done", "heartbeat", "section"),
        "worker_api.lease": ("RoundOverError", "commit"),
        "worker_api.preemption": ("PreemptionNotice", "on_preemption", "preemption_notice", "should_checkpoint"),
    }.items()
    for name in names
}
"""What is imported when it is first used, and from where."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "launch":
        return import_module("hpc_elastic.launch")  # which says what to use where it is called
    if name == "LaunchConfig":
        raise ImportError("hpc_elastic.LaunchConfig was removed; see ElasticExecutor of hpc_elastic.submission")
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_FROM[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})
