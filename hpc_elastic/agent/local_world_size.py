"""``--nproc-per-node``: how many workers this node runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import JobEnvironment, in_job
from hpc_elastic.slurm.resources import device_count


def local_world_size(asked: str, env: Mapping[str, str]) -> int:
    """Resolve a number, ``auto``, ``gpu`` or ``cpu`` on this node.

    Args:
        asked: What the user gave. ``auto``: the GPUs that Slurm gave (or CUDA_VISIBLE_DEVICES names), else 1.
        env: The agent's environment.

    Raises:
        UsageError: no such word, a number below 1, or ``gpu`` on a node without.
    """
    if asked.isdecimal():
        if int(asked) < 1:
            raise UsageError(f"--nproc-per-node {asked}: give at least 1")
        return int(asked)
    if asked == "cpu":
        return len(os.sched_getaffinity(0))
    if asked not in ("auto", "gpu"):
        raise UsageError(f"--nproc-per-node {asked}: give a number, auto, gpu or cpu")
    if in_job(env):
        gpus = JobEnvironment.from_env(env).node.gpus
    else:
        gpus = device_count(env.get("CUDA_VISIBLE_DEVICES", ""))
    if asked == "gpu" and gpus == 0:
        raise UsageError("--nproc-per-node gpu: this node has no GPU of the job's; ask for some with --gpus-per-node")
    return max(1, gpus)
