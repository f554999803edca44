"""The GPUs of the agents' step: as many on each node as the job has there."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_elastic.errors import UsageError
from hpc_elastic.slurm.job_environment import JobEnvironment
from hpc_elastic.slurm.resources import gpu_count

_AS_A_WHOLE = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")  # the last one since 24.11


def step_gpu_flags(env: Mapping[str, str]) -> tuple[str, ...]:
    """What srun must be told so that each agent sees all GPUs that the job has on its node.

    Nothing, for ``--gres`` and ``--gpus-per-node``: a step has them by itself. Of a job with ``--gpus`` (a total) or
    ``--gpus-per-task`` a step asks for the same again: 22.05 gave two agents 1 and 2 GPUs of two nodes with 2 each, and
    refused the step that starts a single agent again ("Invalid generic resource (gres) specification").

    Args:
        env: The batch script's.

    Raises:
        UsageError: the total is not the same on each node.
    """
    given = next((name for name in _AS_A_WHOLE if _asks_for_gpus(name, env.get(name, ""))), None)
    if given is None or env.get("SLURM_GPUS_PER_NODE"):
        return ()
    job = JobEnvironment.from_env(env)
    if job.components:
        return ()
    here = job.node.gpus if job.node.name is not None else 0  # salloc's shell is on no node of the job
    if given == "SLURM_GPUS":
        try:
            each, rest = divmod(gpu_count(env[given]), len(job.nodes))
        except ValueError as error:
            raise UsageError(f"{given}={env[given]!r} in the environment {error}") from None
        if rest or here not in (0, each):
            seen = f"{here} of them are on {job.node.name}" if here else f"there are {len(job.nodes)} nodes"
            raise UsageError(
                f"--gpus={env[given]}: {seen}, so they are not the same number on each node; ask with --gpus-per-node"
            )
        return (f"--gpus-per-node={each}",)
    return (f"--gpus-per-node={here}",) if here else ()


def _asks_for_gpus(name: str, value: str) -> bool:
    return "gpu" in value if name == "SLURM_TRES_PER_TASK" else bool(value)
