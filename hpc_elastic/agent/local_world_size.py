"""``--nproc-per-node``: how many workers this node runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import JobEnvironment, in_job
from hpc_elastic.slurm.resources import device_count


def local_world_size(asked: str, env: Mapping[str, str], *, devices: Path = Path("/dev")) -> int:
    """Resolve a number, ``auto``, ``gpu`` or ``cpu`` on this node.

    Args:
        asked: What the user gave. ``auto``: the GPUs that Slurm gave (or CUDA_VISIBLE_DEVICES names), else 1. ``gpu``:
            the same, and where neither Slurm nor CUDA_VISIBLE_DEVICES limits them, all that this machine has.
        env: The agent's environment.
        devices: Where NVIDIA's driver puts its devices.

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
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if in_job(env):
        gpus = JobEnvironment.from_env(env).node.gpus
        lacking = "this node has no GPU of the job's; ask for some with --gpus-per-node"
    elif visible is None and asked == "gpu":
        gpus = len(list(devices.glob("nvidia[0-9]*")))
        lacking = f"no NVIDIA GPU was found ({devices}/nvidia*); give the number of workers"
    else:
        gpus = device_count(visible or "")
        lacking = f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU; unset it, or give the number of workers"
    if asked == "gpu" and gpus == 0:
        raise UsageError(f"--nproc-per-node gpu: {lacking}")
    return max(1, gpus)
