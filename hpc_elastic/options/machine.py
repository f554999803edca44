"""``--nproc-per-node auto``, ``gpu`` and ``cpu`` on this machine, without Slurm: torchrun's meanings.

torchrun counts the accelerators that torch can use, else the CPUs. Here NVML is asked, in a process of its own: torch
is not imported, and a driver in trouble may hold the process that asks it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_elastic.base.self_command import module_command
from hpc_elastic.errors import UsageError

_NVML_SECONDS = 20.0


def workers_here(
    asked: str,
    env: Mapping[str, str],
    *,
    count_gpus: Callable[[Mapping[str, str]], int | None] | None = None,
    devices: Path = Path("/dev"),
) -> int:
    """`count_gpus` returns None where the driver does not answer: its files in `devices` are counted then."""
    cpus = len(os.sched_getaffinity(0))
    if asked == "cpu":
        return cpus
    visible = env.get("CUDA_VISIBLE_DEVICES")
    there = (count_gpus or _ask_nvml)(env)
    if there is None:
        there = len(list(devices.glob("nvidia[0-9]*")))
    gpus = there if visible is None else _visible_of(visible, there)
    if asked == "gpu" and gpus == 0:
        seen = f"CUDA_VISIBLE_DEVICES={visible!r} leaves none of its {there}" if there else "NVML finds none"
        raise UsageError(
            f"--nproc-per-node gpu: this machine has no NVIDIA GPU for the workers ({seen}); "
            "give the number of workers, or auto for one for each CPU"
        )
    return gpus or cpus


def _visible_of(visible: str, there: int) -> int:
    """CUDA stops at the first entry that it can't use."""
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if (name.isdigit() and int(name[:9]) < there) or name.startswith(("GPU-", "MIG-")):
            count += 1
        else:
            break
    return min(count, there) if "MIG-" not in visible else count


def _ask_nvml(env: Mapping[str, str]) -> int | None:
    try:
        ended = subprocess.run(
            module_command("hpc_elastic.agent.health_gpu", "main"),
            env=dict(env), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=_NVML_SECONDS, check=True,
        )  # fmt: skip
        facts = json.loads(ended.stdout)
        return len(facts["devices"]) if facts["is_there"] and not facts["error"] else None
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return None
