"""Slurm's commands: their argument lists, their environments, and their failures. Nothing is run here.

Nothing goes through a shell. Failures are distinguished by the text that a command prints (exit codes are mostly 1), as
checked on the messages of 20.11, 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hpc_elastic.errors import HpcElasticError, UsageError
from hpc_elastic.slurm.job_environment import JobEnvironment, compress, gpu_count, in_job, without_run_variables

if TYPE_CHECKING:
    from hpc_elastic.slurm.job_state import JobState


SQUEUE_FORMAT = "%i|%T|%r|%M|%l|%D|%N|%R|%S|%e|%Q|%V"
SINFO_FORMAT = "%N|%P|%T|%t|%E"
# Not "now": slurmd refuses a batch launch whose credential is not younger, in whole seconds, than the job's last kill
# ("Job credential revoked"), and slurmctld then fails the job for good. Seen on 22.05 with a requeue and
# StartTime=now in the same second. The two seconds also cover a second's difference between two hosts' clocks.
SOON_SECONDS = 2

# What srun takes from a batch script's environment and what would overrule, void or bind its own flags. An agent gets
# all of its node, whatever shape the job was given (slurm 23.11 and later honour SLURM_CPUS_PER_TASK, 24.11 gives each
# task of SLURM_TRES_PER_TASK=gres/gpu=1 one GPU and binds it). Memory and GPUs per node are the job's by default, and
# what the environment asks for may be an outer job's (srun then: "mutually exclusive"), as may be what tells of a step.
SHAPE_VARIABLES = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_TRES", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK"),
    *("SLURM_CPUS_PER_GPU", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_CPU_BIND"),
    *("SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_MEM_BIND"),
    *("SLURM_MEM_BIND_LIST", "SLURM_MEM_BIND_TYPE", "SLURM_DISTRIBUTION", "SLURM_HINT", "SLURM_HOSTFILE"),
    *("SLURM_THREADS_PER_CORE", "SLURM_CORE_SPEC", "SLURM_EXCLUSIVE", "SLURM_EXACT", "SLURM_OVERCOMMIT"),
    *("SLURM_EXPORT_ENV", "SLURM_KILL_BAD_EXIT", "SLURM_NO_KILL", "SLURM_WAIT", "SLURM_LABELIO"),
    *("SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_UNBUFFEREDIO", "SLURM_MULTI_PROG"),
    *("SLURM_TIMELIMIT", "SLURM_SPREAD_JOB", "SLURM_EXIT_IMMEDIATE", "SLURM_EXIT_ERROR", "SLURM_WHOLE"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_LAUNCH_NODE_IPADDR"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT"),
    *("SRUN_CPUS_PER_TASK", "SRUN_DEBUG", "SRUN_ERROR", "SRUN_EXPORT_ENV", "SRUN_INPUT", "SRUN_OUTPUT"),
)
# What the supervisor reads (`step_gpus`), and srun must not: a step would ask for SLURM_GPUS, a total, again, of one
# node too; SLURM_JOB_GPUS and SLURM_GPUS_ON_NODE are the batch host's.
_GPU_VARIABLES = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")
_SRUN_FLAGS = ("--overlap", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
# A submission from inside a job must not carry that job's facts into the new one.
_KEPT_ON_SUBMIT = frozenset(
    ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_UMASK", "SLURM_EXIT_ERROR")
)
_SET_BY_GRES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
# Filters and formats that a user set for their own eyes (SCANCEL_INTERACTIVE would even ask a question).
_PERSONAL_PREFIXES = ("SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_", "SACCT_")


class JobId(Struct, frozen=True):
    """A job as Slurm's commands want it: ``12``, ``12_3``, ``12+1``, and its cluster; None: this host's.

    Raises UsageError, the last check: nothing becomes an argument that a command could take for an option or for
    several jobs.
    """

    number: str
    cluster: str | None = None

    def __post_init__(self) -> None:
        if not (self.number.isascii() and self.number.replace("_", "").replace("+", "").isalnum()):
            raise UsageError(f"{self.number!r} is not the id of a Slurm job; give one like 70, 70_3 or 70+1")

    def __str__(self) -> str:
        return self.number


def srun_agents(
    nodes: int,
    command: Sequence[str],
    *,
    where: Sequence[str] = (),
    exclude: Iterable[str] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    """One task on each of `nodes` nodes of the allocation, with all of the job's CPUs there.

    Run it with `scrubbed_environment`. srun's end and exit code are no verdict: it may never return.

    Args:
        where: The nodes' names; empty: any of the allocation but those in `exclude`, as dead ones would abort it all.
        extra: The user's ``--srun-arg``s, after ours, so that they win.
    """
    place = ["-w", compress(where)] if where else []
    left_out = [f"--exclude={names}"] if (names := compress(exclude)) else []
    return [
        "srun",
        f"-N{nodes}",
        f"-n{nodes}",
        *place,
        "--ntasks-per-node=1",
        *_SRUN_FLAGS,
        *left_out,
        *extra,
        *command,
    ]


def scrubbed_environment(env: Mapping[str, str]) -> dict[str, str]:
    dropped = {*SHAPE_VARIABLES, *_GPU_VARIABLES}
    return {key: value for key, value in env.items() if key not in dropped and not key.startswith("SLURM_STEP")}


def command_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of commands whose output is parsed: no personal filters or formats, times in the standard form.

    SLURM_CLUSTERS is dropped: a job says itself where it is.
    """
    kept = {
        key: value
        for key, value in env.items()
        if not key.startswith(_PERSONAL_PREFIXES) and key not in ("SLURM_CLUSTERS", "SLURM_WORKING_CLUSTER")
    }
    kept["SLURM_TIME_FORMAT"] = "standard"
    kept["SLURM_BITSTR_LEN"] = "0"  # an array's tasks that wait: all of them, not the first 64 characters
    return kept


def submission_environment(env: Mapping[str, str], *, overruled: Iterable[str] = ()) -> dict[str, str]:
    """sbatch's environment, which it hands on to the job; `env` may be a worker's, of whose run the job gets nothing.

    `overruled` SBATCH_* variables are dropped: sbatch lets them win over ``#SBATCH`` lines, so each would silently
    replace an option that was given to us.
    """
    dropped = {*overruled, "SBATCH_WAIT", *(_SET_BY_GRES if in_job(env) else ())}
    return {
        key: value
        for key, value in without_run_variables(env).items()
        if key not in dropped
        and (key in _KEPT_ON_SUBMIT or not key.startswith(("SLURM_", "SLURMD_", "SRUN_", "SQUEUE_", "SINFO_")))
    }


def sbatch(script: str, *, extra: Sequence[str] = ()) -> list[str]:
    return ["sbatch", "--parsable", *extra, script]


def squeue(jobs: Iterable[JobId]) -> list[str]:
    """States of jobs of one cluster, ended ones too.

    For one unknown id alone squeue exits 1 ("Invalid job id specified"), for several it leaves the unknown ones out.
    """
    wanted = list(jobs)
    return ["squeue", *_cluster(wanted[0]), "-h", "-t", "all", "-o", SQUEUE_FORMAT, "-j", ",".join(map(str, wanted))]


def sacct(jobs: Iterable[JobId]) -> list[str]:
    """Ends of one cluster's jobs that the controller has forgotten: each job's last execution, without its steps."""
    wanted = list(jobs)
    ids = ",".join(map(str, wanted))
    return ["sacct", *_cluster(wanted[0]), "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", ids]


def soon(delay: float = 0.0, *, now: float | None = None) -> str:
    """`now` is the controller's time, since the epoch, if known: scontrol counts from its own host's clock."""
    seconds = SOON_SECONDS + math.ceil(delay)
    return f"now+{seconds}" if now is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + seconds))


def scontrol(job: JobId, *words: str) -> list[str]:
    return ["scontrol", *_cluster(job), *words]


def update(job: JobId, **fields: str) -> list[str]:
    return scontrol(job, "update", f"JobId={job}", *(f"{key}={value}" for key, value in fields.items()))


def scancel(job: JobId, *, signal: str | None = None, batch: bool = False) -> list[str]:
    """Cancel, or send `signal` to the tasks, with `batch` to the script alone. Silent for an unknown job."""
    flags = [*([f"--signal={signal}"] if signal else []), *(["--batch"] if batch else [])]
    return ["scancel", *_cluster(job), *flags, str(job)]


def _cluster(job: JobId) -> list[str]:
    return ["-M", job.cluster] if job.cluster else []


_FIELDS = {
    "SLURM_GPUS": "TresPerJob",
    "SLURM_GPUS_PER_NODE": "TresPerNode",
    "SLURM_GPUS_PER_TASK": "TresPerTask",
    "SLURM_TRES_PER_TASK": "TresPerTask",
}


def step_gpu_flags(env: Mapping[str, str], job: JobState | None = None) -> tuple[str, ...]:
    """srun's flags so that each agent sees all GPUs that the job has on its node.

    Nothing, for ``--gres`` and ``--gpus-per-node``: a step has them by itself. Of a job with ``--gpus`` (a total) or
    ``--gpus-per-task`` a step asks for the same again: 22.05 gave two agents 1 and 2 GPUs of two nodes with 2 each, and
    refused the step that starts a single agent again ("Invalid generic resource (gres) specification").

    Args:
        env: The batch script's.
        job: What Slurm says of the job: what it was not asked for is in `env` from another. None: not known.

    Raises:
        UsageError: the total is not the same on each node.
    """

    def is_own(name: str) -> bool:
        value = env.get(name, "")
        asks_for_gpus = "gpu" in value if name == "SLURM_TRES_PER_TASK" else bool(value)
        return asks_for_gpus and (job is None or _FIELDS[name] in job.tres_asked)

    # The last one since 24.11.
    given = next(filter(is_own, ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")), None)
    if given is None or is_own("SLURM_GPUS_PER_NODE"):
        return ()
    facts = JobEnvironment.from_env(env)
    here = facts.gpus if facts.node is not None else 0  # salloc's shell is on no node of the job
    if given == "SLURM_GPUS":
        try:
            each, rest = divmod(gpu_count(env[given]), len(facts.nodes))
        except ValueError as error:
            raise UsageError(f"{given}={env[given]!r} in the environment {error}") from None
        if rest or here not in (0, each):
            seen = f"{here} of them are on {facts.node}" if here else f"there are {len(facts.nodes)} nodes"
            raise UsageError(
                f"--gpus={env[given]}: {seen}, so they are not the same number on each node; ask with --gpus-per-node"
            )
        return (f"--gpus-per-node={each}",)
    return (f"--gpus-per-node={here}",) if here else ()


class SlurmError(HpcElasticError):
    """There is no `rc` where the command never ended or never began."""

    template = "{what}: {why}"

    def __init__(self, **facts: Any) -> None:
        super().__init__(**{"argv": (), "rc": None, "stdout": "", "stderr": "", **facts})


class SlurmMissingError(SlurmError):
    """The command is not installed, or not on PATH (a container without Slurm)."""


class SlurmUnavailableError(SlurmError):
    """The controller could not be reached, or did not answer in time: nothing is known; try again."""


class UnknownJobError(SlurmError):
    """Slurm does not know the job (any more)."""


class SlurmPermissionError(SlurmError):
    """The job is another user's, or only an operator may do this."""


class RequeueDisabledError(SlurmError):
    """The job was submitted with --no-requeue, or the site turned requeueing off. Its owner may set Requeue=1."""


class JobNotPendingError(SlurmError):
    """This can only be changed while the job is pending."""


class SubmissionRefusedError(SlurmError):
    """sbatch did not take the job."""


class MaybeSubmittedError(SlurmError):
    """sbatch failed, and Slurm does not show whether it took the job: it may yet."""


# In this order: a message may hold more than one. "Unexpected message received" is what `scontrol requeue` says
# without a controller (all versions tried).
_PATTERNS: tuple[tuple[type[SlurmError], re.Pattern[str]], ...] = tuple(
    (error, re.compile(pattern, re.IGNORECASE))
    for error, pattern in (
        (
            SlurmUnavailableError,
            r"unable to contact slurm controller|unexpected message received|could not establish a configuration source"
            r"|socket timed out|zero bytes were transmitted|connection refused|connection timed out|no route to host"
            r"|protocol authentication error|munge encode failed|standby mode|resource temporarily unavailable"
            r"|communication connection failure"
            # Another cluster: its controller or the accounting that knows its address does not answer.
            r"|can'?t? be reached now|problem talking to (?:the )?database|unable to connect to database"
            r"|no cluster '.*' known by database",
        ),
        (RequeueDisabledError, r"requested operation is presently disabled"),
        (JobNotPendingError, r"job is no longer pending execution"),
        (UnknownJobError, r"invalid job id"),
        (SlurmPermissionError, r"access/permission denied|invalid user id"),
    )
)
_PREFIX = re.compile(
    r"\A(?:s(?:batch|run|queue|control|cancel|info|alloc)|slurm_\w+)?(?:: | )?(?:error|fatal): ?|\As\w+: "
)


def classify(text: str) -> type[SlurmError]:
    return next((error for error, pattern in _PATTERNS if pattern.search(text)), SlurmError)


def one_line(text: str) -> str:
    """A command's messages on one line, without ``sbatch: error:`` before each, at most 500 characters."""
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines()]
    joined = "; ".join(line.rstrip(".") for line in lines if line and not line.startswith('Try "'))
    return joined if len(joined) <= 500 else joined[:497] + "..."
