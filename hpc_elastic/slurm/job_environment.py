"""Slurm's environment variables about this job and this process: pure, from a mapping.

Checked on the environments of Slurm 20.11, 22.05, 24.11 and 26.05. The traps that they hold:

- 26.05 sets SLURM_STEP_ID=-5 in the batch script, which is in no step.
- sbatch hands on its caller's variables: where a job is submitted from a step, its batch script has that step's.
- 20.11 has no SLURM_GPUS_ON_NODE; 20.11 and 22.05 have no SLURM_JOB_START_TIME.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct

from hpc_elastic.errors import HpcElasticError, UsageError
from hpc_elastic.slurm.notation import HostlistError, device_count, expand, expand_counts, gpu_count

_MAX_NUMBER = 1 << 62
T = TypeVar("T")


class JobEnvironmentError(UsageError):
    template = "{variable}={value!r} in the environment {why}"

    def __init__(self, variable: str, value: str, why: str) -> None:
        HpcElasticError.__init__(self, variable=variable, value=value, why=why)


class TaskFacts(Struct, frozen=True, kw_only=True):
    step_id: int
    step_nodes: tuple[str, ...]
    """The order of SLURM_STEP_NODELIST."""
    procid: int
    num_tasks: int
    tasks_per_node: tuple[int, ...]
    """One number per node of the step; empty: Slurm said nothing."""


class JobEnvironment(Struct, frozen=True, kw_only=True):
    job_id: str
    array_job_id: str | None
    array_task_id: str | None
    restart_count: int
    """Number of requeues; Slurm leaves it unset at first."""
    cluster: str | None
    nodes: tuple[str, ...]
    """All nodes of the job as it started, in Slurm's order: this is the order of ranks."""
    node: str | None
    """Slurm's name of this one; None in salloc's shell on a login node."""
    gpus: int
    """GPUs that processes here can use; 0: Slurm gave none."""
    task: TaskFacts | None
    """None: a batch script, or a shell in an allocation: a process of the job that is in no step."""

    @property
    def requeue_id(self) -> str:
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.job_id

    @staticmethod
    def from_env(env: Mapping[str, str]) -> JobEnvironment:
        """Raises JobEnvironmentError: no Slurm job, or a variable holds nonsense; it names variable and value."""
        reader = _Reader(env)
        in_task = _in_task(reader)
        return JobEnvironment(
            job_id=reader.job_id("SLURM_JOB_ID", "SLURM_JOBID"),
            array_job_id=reader.optional_id("SLURM_ARRAY_JOB_ID"),
            array_task_id=reader.optional_id("SLURM_ARRAY_TASK_ID"),
            restart_count=reader.number("SLURM_RESTART_COUNT") or 0,
            cluster=reader.text("SLURM_CLUSTER_NAME"),
            nodes=_job_nodes(reader),
            node=reader.text("SLURMD_NODENAME"),
            gpus=_gpus(reader, "SLURM_STEP_GPUS" if in_task else "SLURM_JOB_GPUS"),
            task=TaskFacts(
                step_id=reader.need_number("SLURM_STEP_ID", "SLURM_STEPID"),
                step_nodes=reader.parsed(expand, "SLURM_STEP_NODELIST") or (),
                procid=reader.need_number("SLURM_PROCID"),
                num_tasks=reader.need_number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
                tasks_per_node=reader.parsed(expand_counts, "SLURM_STEP_TASKS_PER_NODE") or (),
            )
            if in_task
            else None,
        )


def in_job(env: Mapping[str, str]) -> bool:
    return bool(env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID"))


_MARKS = ("HPC_ELASTIC_TAG", "HPC_ELASTIC_NODE_TAG")
RUN_VARIABLES = (
    *_MARKS,
    *(f"HPC_ELASTIC_{name}" for name in ("RUN_DIR", "ATTEMPT", "JOB_ID", "HEARTBEAT", "NODE", "HOST", "LAST_ROUND")),
    *(f"HPC_ELASTIC_{name}" for name in ("OUTCOME", "EXIT_CODE", "REASON", "ROOT_CAUSE", "REPORT", "NOTIFY_URL")),
    *("HPC_ELASTIC_COMMAND_TOKEN", "HPC_ELASTIC_RING_REPORTS", "HPC_ELASTIC_RING_REPLACES", "HPC_ELASTIC_AGENT_STORE"),
    "HPC_ELASTIC_CHECKPOINTS",
)
WORKER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "HPC_ELASTIC_RING_WAIT"),
    *("SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER"),
)
"""Further variables of a worker, which a user may set, too."""


def without_run_variables(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without an agent's variables for its worker: for a job that this worker submits.

    With them, the new job's processes would carry the tags of another run, and take that run's rank, address and
    heartbeat file for their own.
    """
    in_run = any(name in env for name in _MARKS)
    dropped = {*RUN_VARIABLES, *(WORKER_VARIABLES if in_run else ())}
    return {key: value for key, value in env.items() if key not in dropped and not key.startswith("TORCHELASTIC_")}


class _Reader:
    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def find(self, *names: str) -> tuple[str, str] | None:
        for name in names:
            value = self._env.get(name)
            if value:
                return name, value
        return None

    def text(self, *names: str) -> str | None:
        found = self.find(*names)
        return None if found is None or found[1] == "(null)" else found[1]

    def number(self, *names: str) -> int | None:
        return self.parsed(_whole, *names)

    def need_number(self, *names: str) -> int:
        value = self.number(*names)
        if value is None:
            raise JobEnvironmentError(names[0], "", "is missing, though this is a task of a Slurm step")
        return value

    def optional_id(self, *names: str) -> str | None:
        value = self.number(*names)
        return None if value is None else str(value)

    def job_id(self, *names: str) -> str:
        value = self.number(*names)
        if value is None:
            raise JobEnvironmentError(
                names[0], "", "is missing: this process is not in a Slurm job; try --cluster local"
            )
        if value == 0:
            raise JobEnvironmentError(names[0], "0", "is not a job's id")
        return str(value)

    def parsed(self, parse: Callable[[str], T], *names: str) -> T | None:
        found = self.find(*names)
        if found is None:
            return None
        try:
            return parse(found[1])
        except HostlistError as error:
            raise JobEnvironmentError(*found, f"is not a list of hosts: {error.why}") from None
        except ValueError as error:
            raise JobEnvironmentError(*found, str(error)) from None

    def devices(self, *names: str) -> int | None:
        for name in names:
            if name in self._env:  # set but empty means: none
                return device_count(self._env[name])
        return None


def _whole(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) < _MAX_NUMBER):
        raise ValueError("is not a number")
    return int(value)


def _in_task(reader: _Reader) -> bool:
    """Special steps have ids from -6 to -1 (batch: -5), or these as unsigned numbers.

    The variables of a step that the job was submitted from don't fit the job's own: slurmstepd sets SLURMD_NODENAME,
    and in a task SLURM_NNODES and SLURM_TASKS_PER_NODE of the step, in a batch script those of the job (all versions).
    """
    found = reader.find("SLURM_STEP_ID", "SLURM_STEPID")
    if found is None or reader.find("SLURM_PROCID") is None:
        return False
    name, value = found
    try:
        step = int(value)
    except ValueError:
        raise JobEnvironmentError(name, value, "is not a number") from None
    if not 0 <= step < 0xFFFFFFF0:
        return False
    nodes = reader.parsed(expand, "SLURM_STEP_NODELIST") or ()
    return (
        reader.text("SLURMD_NODENAME") in nodes
        and set(nodes) <= set(_job_nodes(reader))
        and all(
            reader.text(own) in (None, reader.text(name))
            for name, own in (
                ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
                ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            )
        )
    )


def _job_nodes(reader: _Reader) -> tuple[str, ...]:
    listed = reader.parsed(expand, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not listed:
        raise JobEnvironmentError(
            "SLURM_JOB_NODELIST",
            "",
            "is missing, though SLURM_JOB_ID is there; outside of a job, unset SLURM_JOB_ID; in a job, restore it",
        )
    count = reader.number("SLURM_JOB_NUM_NODES")
    if count is not None and count != len(listed):
        raise JobEnvironmentError(
            "SLURM_JOB_NUM_NODES", str(count), f"but SLURM_JOB_NODELIST names {len(listed)} nodes"
        )
    return listed


def _gpus(reader: _Reader, variable: str) -> int:
    """Slurm's GPUs of this node, but never more than this process can see (``--gpus-per-task=1`` shows one of 4)."""
    given = reader.parsed(gpu_count, "SLURM_GPUS_ON_NODE")
    if given is None:
        given = reader.devices(variable, "SLURM_JOB_GPUS")
    if given is None:
        given = reader.parsed(gpu_count, "SLURM_GPUS_PER_NODE")
    visible = reader.devices("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    if given is None:
        return visible or 0
    return given if visible is None else min(given, visible)
