"""What srun and slurmstepd print while agents run, as events with node and task.

srun's exit code is no verdict, but its messages come early: which task ended how, which node is gone, and which node
made a launch fail. Checked on 20.11, 22.05, 24.11 and 26.05 (which prints slurmstepd's as ``[time] error: …``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from msgspec import Struct

from hpc_elastic.slurm.notation import HostlistError, expand


class SrunEventKind(Enum):
    TASK_EXITED = "task exited"
    TASK_KILLED = "task killed"
    """By a signal; `detail` is its name as strsignal gives it: ``Killed``, ``Segmentation fault (core dumped)``."""
    NODE_FAILED = "node failed"
    """Slurm gave the node up. The job goes on without it under --no-kill."""
    LAUNCH_FAILED = "launch failed"
    """The step could not be started on `nodes`: launch again without them."""
    STEP_REFUSED = "step refused"
    """srun could not even make the step, or reach the controller."""
    STEP_ABORTED = "step aborted"
    """All tasks are being killed."""
    CANCELLED = "cancelled"
    """By slurmstepd; `detail` says ``STEP`` or ``JOB`` and why, where it is said."""
    OUT_OF_MEMORY = "out of memory"
    """The kernel killed something in the step's cgroup. Printed at the step's end only."""
    EXEC_FAILED = "exec failed"


class SrunEvent(Struct, frozen=True, kw_only=True):
    """One message."""

    kind: SrunEventKind
    line: str
    nodes: tuple[str, ...] = ()
    tasks: tuple[int, ...] = ()
    exit_code: int | None = None
    detail: str = ""


_TASKS = re.compile(r"srun: error: (\S+): tasks? ([0-9,-]+): (.*)\Z")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (\S+)\Z")
_LAUNCH_FAILED = re.compile(r"srun: error: Task launch for .*?failed on node (\S+): (.*)\Z")
_REFUSED = re.compile(
    r"srun: error: (Unable to create step for job .*|Unable to confirm allocation .*|Unable to allocate resources.*"
    r"|Slurm job \d+ has expired.*|Unable to create job step.*|Job \d+ .* has expired.*)\Z"
)
_ABORTED = re.compile(r"srun: (?:error: )?(Job step aborted.*|Force Terminated .*|forcing job termination)\Z")
_STEPD = r"(?:slurmstepd(?:-(\S+?))?: (?:error: )?|\[\d{4}-\d\d-\d\dT[0-9:.]+\] (?:\[[^\]]*\] )?(?:error: )?)"
_CANCELLED = re.compile(_STEPD + r"\*\*\* (STEP|JOB) (\S+) (?:ON (\S+) )?CANCELLED AT \S+(?: DUE TO (.*?))? \*\*\*")
_OOM = re.compile(_STEPD + r"Detected (\d+) oom[-_]kill event")
_EXEC = re.compile(_STEPD + r"(execve\(\): .*|.*[Ee]xec(?:ve)? failed.*|couldn't chdir.*)\Z")


def parse_srun_line(line: str) -> SrunEvent | None:
    """The event that a line of srun's standard error means; None for anything else, such as a worker's own output."""
    text = line.rstrip("\r\n")
    if not text.startswith(("srun: ", "slurmstepd", "[")):
        return None
    for pattern, build in _RULES:
        match = pattern.match(text)
        if match:
            return build(match, text)
    return None


def _tasks(match: re.Match[str], line: str) -> SrunEvent:
    how = match.group(3)
    exited = _EXITED.match(how)
    return SrunEvent(
        kind=SrunEventKind.TASK_EXITED if exited else SrunEventKind.TASK_KILLED,
        line=line,
        nodes=_hosts(match.group(1)),
        tasks=_numbers(match.group(2)),
        exit_code=int(exited.group(1)) if exited else None,
        detail=how,
    )


def _cancelled(match: re.Match[str], line: str) -> SrunEvent:
    host, what, _, on, why = match.groups()
    detail = f"{what} {why}" if why else what
    return SrunEvent(kind=SrunEventKind.CANCELLED, line=line, nodes=_hosts(on or host or ""), detail=detail)


def _with_detail(
    kind: SrunEventKind, *, host: int | None, detail: int | None
) -> Callable[[re.Match[str], str], SrunEvent]:
    def build(match: re.Match[str], line: str) -> SrunEvent:
        return SrunEvent(
            kind=kind,
            line=line,
            nodes=_hosts(match.group(host) or "") if host else (),
            detail=match.group(detail) if detail else "",
        )

    return build


_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], SrunEvent]], ...] = (
    (_TASKS, _tasks),
    (_NODE_FAILED, _with_detail(SrunEventKind.NODE_FAILED, host=1, detail=None)),
    (_LAUNCH_FAILED, _with_detail(SrunEventKind.LAUNCH_FAILED, host=1, detail=2)),
    (_REFUSED, _with_detail(SrunEventKind.STEP_REFUSED, host=None, detail=1)),
    (_ABORTED, _with_detail(SrunEventKind.STEP_ABORTED, host=None, detail=1)),
    (_CANCELLED, _cancelled),
    (_OOM, _with_detail(SrunEventKind.OUT_OF_MEMORY, host=1, detail=2)),
    (_EXEC, _with_detail(SrunEventKind.EXEC_FAILED, host=1, detail=2)),
)


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except HostlistError:
        return ()


def _numbers(text: str) -> tuple[int, ...]:
    """``0,2-4`` → ``(0, 2, 3, 4)``."""
    try:
        return tuple(int(number) for number in expand(f"[{text}]"))
    except HostlistError:
        return ()
