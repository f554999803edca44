"""A job as ``scontrol show job`` and ``squeue`` show it: pure parsers of their output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from hpc_elastic.options.sbatch import parse_time_limit
from hpc_elastic.run.paths import ExitCode, is_job_id
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.job_environment import HostlistError, expand, local_time


class JobPhase(Enum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    FINISHED = "finished"
    UNKNOWN = "unknown"
    """A state of a newer Slurm. Not known to be finished: wait on."""


_PHASES: Mapping[str, JobPhase] = {
    **dict.fromkeys(
        ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"),
        JobPhase.PENDING,
    ),
    **dict.fromkeys(
        ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "CONFIGURING", "STAGE_OUT"), JobPhase.RUNNING
    ),
    "COMPLETING": JobPhase.COMPLETING,
    **dict.fromkeys(
        (
            *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
            *("REVOKED", "TIMEOUT"),
        ),
        JobPhase.FINISHED,
    ),
}
# Reasons of a pending job (https://slurm.schedmd.com/job_reason_codes.html). BadConstraints and ReservationDeleted come
# with a hold. Limits of users and groups, of partitions that are down, and the like are taken away by time.
_NEVER: Mapping[str, str] = {
    "DependencyNeverSatisfied": "the job that it depends on ended otherwise than it asks for",
    "BadConstraints": "no node of the cluster fits what it asks for",
    "ReservationDeleted": "its reservation is gone",
}
_LIMITS = frozenset(
    (
        *("PartitionTimeLimit", "PartitionNodeLimit", "AccountNotAllowed", "QOSNotAllowed", "InvalidAccount"),
        *("InvalidQOS", "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit"),
    )
)
_ENDS: Mapping[str, str] = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "cancelled",
    "COMPLETED": "its batch script has ended",
    "DEADLINE": "ended at its deadline",
    "FAILED": "its batch script failed",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "its time limit was over",
}
_CODES: Mapping[str, ExitCode] = {
    "COMPLETED": ExitCode.OK,
    **dict.fromkeys(("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED"), ExitCode.TERMINATED),
}
# `scontrol show job` begins a line with each of these and lets its text, which is the user's, run to the line's end.
_FREE_TEXT = "JobName|Comment|AdminComment|SystemComment|Command|SubmitLine|WorkDir|Extra|StdErr|StdIn|StdOut"
_TASKS_THAT_WAIT = re.compile(r"[1-9][0-9]{0,9}_\[[0-9,.%:-]*\]\Z")
"""``70_[3-5,7%2]``; a long list is cut: ``70_[0-7,...]``."""
_FREE_FIELD = re.compile(rf"(?:\A|(?<= ))({_FREE_TEXT})=(.*)\Z", re.DOTALL)
_FIELD = re.compile(r"(?:\A|(?<= ))([A-Za-z][A-Za-z0-9/:_]*)=(\S*)")


class JobState(Struct, frozen=True, kw_only=True):
    job_id: str
    state: str
    """Slurm's word, ``RUNNING``."""
    reason: str
    """Why it pends or ended, with spaces; empty: Slurm has none."""
    name: str = ""
    array_job_id: str | None = None
    array_task_id: str | None = None
    restarts: int = 0
    requeue: bool = False
    """``scontrol requeue`` would be allowed: for a batch job."""
    is_batch: bool = True
    """False for salloc's: Slurm requeues batch jobs only."""
    user: str | None = None
    """The owner's name, or number where the controller knows no name."""
    excluded: tuple[str, ...] = ()
    """ExcNodeList: the user's, or a later one."""
    required: tuple[str, ...] = ()
    """ReqNodeList: nodes that it asks for by name."""
    nodes: tuple[str, ...] = ()
    """Its present nodes; after a loss the rest. Empty while it pends."""
    min_nodes: int = 0
    exit_code: int = 0
    exit_signal: int = 0
    time_limit: int | None = None
    """Seconds; None: unlimited."""
    start_time: str | None = None
    """The controller's time zone, as ``2026-11-21T02:16:42``; None: unknown."""
    end_time: str | None = None
    """A running job's end: by its limit, or the end of its grace time."""
    preempt_time: str | None = None
    """The time of its preemption: while it still runs, the grace time has begun then."""
    tres_asked: tuple[str, ...] = ()
    """The fields by which it asks for GPUs and the like: ``TresPerNode``."""
    command: str = ""
    stdout: str | None = None
    comment: str = ""
    partition: str | None = None
    cluster: str | None = None
    """The cluster that commands about it have to name: it is not this host's."""

    @property
    def phase(self) -> JobPhase:
        return _PHASES.get(self.state, JobPhase.UNKNOWN)

    @property
    def held(self) -> bool:
        return self.phase is JobPhase.PENDING and is_hold(self.reason)

    @property
    def never_starts(self) -> bool:
        return self.phase is JobPhase.PENDING and self.reason in _NEVER

    @property
    def way_out(self) -> str:
        """Help, in words, for a pending job that does not start by itself, or only where a limit is changed."""
        if self.held:
            if self.reason == "JobHeldAdmin":
                return "held: only the site's support lets it go on"
            return f"held: scontrol{self._where} release {self.job_id} lets it go on"
        if self.phase is not JobPhase.PENDING:
            return ""
        if self.never_starts:
            return f"{_NEVER[self.reason]}; scancel{self._where} {self.job_id} takes it out of the queue"
        if self.reason in _LIMITS or self.reason.endswith("PerJobLimit"):
            return (
                "it asks for more than a limit of the site allows, and waits until the limit or the job is changed: "
                f"scontrol{self._where} update JobId={self.job_id} …, or scancel{self._where} {self.job_id}"
            )
        return ""

    @property
    def _where(self) -> str:
        return f" -M {self.cluster}" if self.cluster else ""

    @property
    def said(self) -> str:
        """State and reason as Slurm gives them; not COMPLETING, behind which another state is still hidden."""
        state = "" if self.state == "COMPLETING" and self.reason else self.state
        return f"Slurm: {', '.join(filter(None, (state, self.reason)))}"

    @property
    def how_it_ended(self) -> str:
        """The end of a job whose script had begun, in words, with Slurm's own in brackets."""
        if self.reason.startswith("JobLaunchFailure"):
            what = "batch script killed"
        elif self.exit_signal or self.reason.startswith("RaisedSignal"):
            what = f"batch script ended by signal {self.exit_signal}" if self.exit_signal else "batch script killed"
        else:
            what = _ENDS.get(self.state, "")
        return f"{what} ({self.said})" if what else self.said

    @property
    def code(self) -> int:
        if self.state in _CODES:
            return int(_CODES[self.state])
        return 128 + self.exit_signal if self.exit_signal else self.exit_code or int(ExitCode.WORKERS_FAILED)


def is_hold(reason: str) -> bool:
    # JobHeldUser, JobHeldAdmin; JobHoldMaxRequeue: it could not be launched MaxBatchRequeue times.
    return reason.startswith(("JobHeld", "JobHold")) or reason.endswith((" held", "held state"))


def seconds_until_end(job: JobState | None, *, now_ns: int) -> float | None:
    """Seconds to the job's time limit, negative after it; None: unlimited, or unknown."""
    end = local_time(job.end_time if job else None)
    return None if end is None else end - now_ns / 1e9


def parse_show_job(text: str) -> tuple[JobState, ...]:
    return tuple(_job_state(fields) for fields in parse_records(text) if is_job_id(fields["JobId"]))


def parse_records(text: str) -> list[dict[str, str]]:
    """The fields of each record of ``scontrol show job``. ``(null)``, ``N/A`` and the like are kept."""
    records: list[dict[str, str]] = []
    lines = text.splitlines()
    for raw, following in zip(lines, [*lines, ""][1:], strict=True):
        if raw.startswith("JobId="):
            records.append({})
        if not records:
            continue
        line = raw.strip()
        fields = records[-1]
        one_line_form = raw.startswith("JobId=") and not following.startswith(" ")  # -o
        free = None if one_line_form else _FREE_FIELD.search(line)
        if free:
            fields.setdefault(free.group(1), free.group(2))
            line = line[: free.start()]
        for key, value in _FIELD.findall(line):
            fields.setdefault(key, value)
    return records


def parse_squeue(text: str) -> tuple[JobState, ...]:
    jobs = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 12:
            continue  # "CLUSTER: name", before the jobs of a cluster that was asked for
        job_id, state, reason, nodes = cells[0], cells[1], cells[2], cells[6]
        if not (is_job_id(job_id) or _TASKS_THAT_WAIT.match(job_id)):
            continue
        jobs.append(
            JobState(
                job_id=job_id,
                state=state,
                reason=_reason(reason),
                **_parts_of_id(job_id),
                nodes=_nodes(nodes),
                time_limit=_time_limit(cells[4]),
                start_time=_time(cells[8]),
                end_time=_time(cells[9]),
            )
        )
    return tuple(jobs)


def _parts_of_id(job_id: str) -> dict[str, Any]:
    array, _, task = job_id.partition("_")
    return {"array_job_id": array if task else None, "array_task_id": task or None}


def parse_sacct(text: str) -> tuple[JobState, ...]:
    jobs = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 3 or "." in cells[0] or not cells[0][:1].isdigit():
            continue  # a step
        code, _, signal = cells[2].partition(":")
        jobs.append(
            JobState(
                job_id=cells[0],
                state=cells[1].partition(" ")[0],  # "CANCELLED by 1001"
                reason="",
                **_parts_of_id(cells[0]),
                exit_code=_number(code),
                exit_signal=_number(signal),
            )
        )
    return tuple(jobs)


_SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d+)(?:(?: on cluster |;)([\w.-]+))?", re.ASCII)


def parse_submitted(text: str) -> JobId | None:
    """The job in sbatch's answer, with or without ``--parsable``: the last such line, as plugins may print others."""
    found = [match for line in text.splitlines() if (match := _SUBMITTED.fullmatch(line.strip()))]
    return JobId(found[-1][1], found[-1][2]) if found else None


def parse_own_jobs(text: str, run_dir: str) -> JobId | None:
    cluster = None
    for line in text.splitlines():
        number, bar, rest = line.partition("|")
        if line.startswith("CLUSTER: "):
            cluster = line.removeprefix("CLUSTER: ").strip()
        elif bar and is_job_id(number) and re.search(rf"{re.escape(run_dir)}(?:[/|\s\"]|$)", rest):
            return JobId(number, cluster)
    return None


def parse_dependents(text: str, number: str) -> tuple[str, ...]:
    """An array task's dependency is written with its own id or, in the older releases, with ``_*``."""
    wanted = re.compile(rf"(?:\A|[,?])afterany:(?:[\d_*:]*:)?{re.escape(number)}(?:_\*)?(?![\d_])")
    found = []
    for line in text.splitlines():
        job_id, bar, dependency = line.partition("|")
        if bar and wanted.search(dependency):
            waiting = job_id.strip().partition("_[")[0]  # 5_[1]: a task of an array that waits
            if is_job_id(waiting):
                found.append(waiting)
    return tuple(found)


def _job_state(fields: Mapping[str, str]) -> JobState:
    code, _, signal = fields.get("ExitCode", "").partition(":")
    user, _, uid = fields.get("UserId", "").rstrip(")").rpartition("(")
    return JobState(
        job_id=fields["JobId"],
        state=fields.get("JobState", ""),
        reason=_reason(fields.get("Reason", "")),
        name=fields.get("JobName", ""),
        array_job_id=_text(fields.get("ArrayJobId")),
        array_task_id=_text(fields.get("ArrayTaskId")),
        restarts=_number(fields.get("Restarts", "")),
        requeue=fields.get("Requeue") == "1",
        is_batch=fields.get("BatchFlag") != "0",
        user=(uid if user in ("", "nobody") else user) or None,
        excluded=_nodes(fields.get("ExcNodeList", "")),
        required=_nodes(fields.get("ReqNodeList", "")),
        nodes=_nodes(fields.get("NodeList", "")),
        min_nodes=_number(fields.get("NumNodes", "").partition("-")[0]),
        exit_code=_number(code),
        exit_signal=_number(signal),
        time_limit=_time_limit(fields.get("TimeLimit", "")),
        start_time=_time(fields.get("StartTime", "")),
        end_time=_time(fields.get("EndTime", "")),
        preempt_time=_time(fields.get("PreemptTime", "")),
        tres_asked=tuple(key for key in fields if key.startswith("TresPer") and _text(fields[key])),
        command=_text(fields.get("Command")) or "",
        stdout=_text(fields.get("StdOut")),
        comment=_text(fields.get("Comment")) or "",
        partition=_text(fields.get("Partition")),
    )


def _text(value: str | None) -> str | None:
    return value if value and value not in ("(null)", "N/A", "None") else None


def _reason(value: str) -> str:
    return (_text(value) or "").replace("_", " ")


def _number(value: str) -> int:
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else 0


def _nodes(value: str) -> tuple[str, ...]:
    try:
        return expand(_text(value) or "")
    except HostlistError:
        return ()  # "None assigned" and what a newer version may say: no known node


def _time(value: str) -> str | None:
    return value if value[:4].isdigit() else None


def _time_limit(value: str) -> int | None:
    try:
        return parse_time_limit(value)
    except ValueError:
        return None
