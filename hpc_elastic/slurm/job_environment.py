"""Slurm's environment variables about this job and this process, and Slurm's packed strings: pure, from a mapping.

Hostlists ``rack[1-2]n[01-10],login1`` are expanded here, since a container has no scontrol. The order is Slurm's
(topology), and duplicates stay, as in ``scontrol show hostnames``. Suffixes (``n[1-2].cluster.local``) are read as
Slurm 24.11 reads them; 20.11 and 22.05 call them invalid, with rc 0.

The variables were checked on the environments of Slurm 20.11, 22.05, 24.11 and 26.05. The traps that they hold:

- 26.05 sets SLURM_STEP_ID=-5 in the batch script, which is in no step.
- sbatch hands on its caller's variables: where a job is submitted from a step, its batch script has that step's.
- 20.11 has no SLURM_GPUS_ON_NODE; 20.11 and 22.05 have no SLURM_JOB_START_TIME.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from msgspec import Struct

from hpc_elastic.errors import HpcElasticError, UsageError

MAX_HOSTS = 1 << 17
_MAX_NAME = 255
_MAX_DIGITS = 18
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*\Z")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*")
_LITERAL = re.compile(r"[A-Za-z0-9_.-]*\Z")
_TRAILING_NUMBER = re.compile(rf"(.*?)([0-9]{{1,{_MAX_DIGITS}}})\Z", re.DOTALL)


class HostlistError(UsageError):
    template = "invalid hostlist {text!r}: {why}"

    def __init__(self, **facts: str) -> None:
        HpcElasticError.__init__(self, **facts)


def expand(text: str) -> tuple[str, ...]:
    """Raises HostlistError, also for ``(null)`` and ``None assigned``, and for more than `MAX_HOSTS` hosts."""
    if text and not _LIST.fullmatch(text):
        raise HostlistError(
            text=_shown(text), why="brackets don't match or are not closed, or a host name is missing at a comma"
        )
    hosts: list[str] = []
    try:
        for item in _ITEM.findall(text):
            hosts += _hosts(item, most=MAX_HOSTS - len(hosts))
    except ValueError as error:
        raise HostlistError(text=_shown(text), why=str(error)) from None
    return tuple(hosts)


def _hosts(item: str, *, most: int) -> list[str]:
    """``r[1-2]n`` → ``["r1n", "r2n"]``. Raises ValueError."""
    names = [""]
    for index, part in enumerate(re.split(r"[\[\]]", item)):
        if index % 2 == 0 and not _LITERAL.match(part):
            raise ValueError(f"{_shown(part)!r} can't be part of a host name")
        choices = _numbers(part, most=most) if index % 2 else [part]
        if len(names) * len(choices) > most:
            raise ValueError(f"names more than {MAX_HOSTS} hosts")
        names = [name + choice for name in names for choice in choices]
    for name in names:
        if not _NAME.match(name) or len(name) > _MAX_NAME:
            raise ValueError(f"{_shown(name)!r} can't be a host name")
    return names


def _numbers(ranges: str, *, most: int) -> list[str]:
    """``01-03,7`` → ``["01", "02", "03", "7"]``. Raises ValueError."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise ValueError(f"{_shown(part)!r} is not a number or a range of numbers")
        low, high = int(first), int(last)
        if high < low:
            raise ValueError(f"the range {part} goes down")
        if len(numbers) + high - low + 1 > most:
            raise ValueError(f"names more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return numbers


def compress(hosts: Iterable[str]) -> str:
    """The shortest hostlist that Slurm itself would print: neighbours with the same prefix share brackets.

    The order of `hosts` is kept, so ``expand(compress(hosts)) == tuple(hosts)``.

    Raises:
        HostlistError: a name that can't be a host's: it must never reach a command line as part of ``--exclude``.
    """
    groups: list[tuple[str, list[list[str]]]] = []  # prefix, ranges of [first digits, last digits]; [] for no number
    for host in hosts:
        if not _NAME.match(host) or len(host) > _MAX_NAME:
            raise HostlistError(text=_shown(host), why="not a host name")
        match = _TRAILING_NUMBER.match(host)
        if match is None:
            groups.append((host, []))
            continue
        prefix, digits = match.groups()
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, [[digits, digits]]))
            continue
        ranges = groups[-1][1]
        first, last = ranges[-1]
        if int(digits) == int(last) + 1 and digits == str(int(digits)).zfill(len(first)):
            ranges[-1][1] = digits
        else:
            ranges.append([digits, digits])
    texts = []
    for prefix, ranges in groups:
        numbers = ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)
        texts.append(prefix + (numbers if numbers.isdigit() or not numbers else f"[{numbers}]"))
    return ",".join(texts)


def names_text(hosts: Iterable[str]) -> str:
    """Hosts for people: as `compress`, or with commas where a name can't be a host's."""
    names = tuple(hosts)
    try:
        return compress(names)
    except HostlistError:
        return ", ".join(names)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def local_time(text: str | None) -> float | None:
    """``2026-11-21T02:15:51`` in this host's time zone → seconds since the epoch; None: Slurm names no time."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _shown(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


_COUNTED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\Z")
_PARENTHESES = re.compile(r"\([^()]*\)")


def expand_counts(text: str) -> tuple[int, ...]:
    """``4(x2),1`` → ``(4, 4, 1)``: one number per node, in node order. Raises ValueError, without the text."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNTED.match(part)
        if match is None:
            raise ValueError("is not of the form 4(x2),1")
        repeat = int(match.group(2) or 1)
        if repeat < 1 or len(counts) + repeat > MAX_HOSTS:
            raise ValueError(f"counts no node, or more than {MAX_HOSTS}")
        counts += [int(match.group(1))] * repeat
    return tuple(counts)


def gpu_count(text: str) -> int:
    """Names are GPU types; but where an entry is named ``gpu``, others (``nic:1``) don't count. Raises ValueError."""
    entries: list[tuple[list[str], int]] = []
    for raw in _PARENTHESES.sub("", text).split(","):
        entry = raw.strip()
        for prefix in ("gres/", "gres:"):
            entry = entry.removeprefix(prefix)
        if not entry:
            raise ValueError("has an empty entry")
        names = re.split(r"[:=]", entry)
        count = 1
        if names[-1].isascii() and names[-1].isdigit():
            count = int(names.pop()[:9])
        if not all(re.match(r"[A-Za-z0-9_.-]+\Z", name) for name in names):
            raise ValueError("is not a count or a GRES string such as gpu:a100:4")
        entries.append((names, count))
    gpus = [count for names, count in entries if names and names[0].lower() == "gpu"]
    return sum(gpus) if gpus else sum(count for _, count in entries)


def device_count(text: str) -> int:
    """CUDA stops at the first entry that it can't use, such as ``-1``; ``NoDevFiles`` was Slurm's name for none."""
    count = 0
    for part in text.split(","):
        entry = part.strip()
        if not entry or entry == "NoDevFiles" or entry.startswith("-"):
            break
        first, dash, last = entry.partition("-")
        if dash and first.isdigit() and last.isdigit():  # SLURM_JOB_GPUS=0-3 in some versions
            count += max(0, int(last[:9]) - int(first[:9]) + 1)
        else:
            count += 1
    return count


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
