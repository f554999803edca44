"""Messages of srun and slurmstepd about running agents, as events with their nodes.

srun's exit code is no verdict, but its messages come early: which task ended how, which node is gone, and which node
made a launch fail. Checked on 20.11, 22.05, 24.11 and 26.05 (which prints slurmstepd's as ``[time] error: …``).
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

from hpc_elastic.slurm.errors import SlurmError, classify
from hpc_elastic.slurm.notation import HostlistError, expand


class SrunEventKind(Enum):
    TASK_EXITED = "task exited"
    TASK_KILLED = "task killed"
    """`detail` is the signal's name as strsignal gives it: ``Killed``, ``Segmentation fault (core dumped)``."""
    NODE_FAILED = "node failed"
    """Slurm gave the node up. The job goes on without it under --no-kill."""
    LAUNCH_FAILED = "launch failed"
    """The step could not be started on `nodes`: launch again without them."""
    STEP_REFUSED = "step refused"
    CANCELLED = "cancelled"


class SrunEvent(Struct, frozen=True, kw_only=True):
    kind: SrunEventKind
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    detail: str = ""


_TASKS = r"srun: error: (?P<nodes>\S+): tasks? [0-9,-]+: "
_STEPD = r"(?:slurmstepd(?:-\S+?)?: (?:error: )?|\[\d{4}-\d\d-\d\dT[0-9:.]+\] (?:\[[^\]]*\] )?(?:error: )?)"
_RULES = tuple(
    (kind, re.compile(pattern + r"\Z"))
    for kind, pattern in (
        (SrunEventKind.TASK_EXITED, _TASKS + r"(?P<detail>Exited with exit code (?P<code>\d+).*)"),
        (SrunEventKind.TASK_KILLED, _TASKS + r"(?P<detail>.*)"),
        (SrunEventKind.NODE_FAILED, r"srun: error: Node failure on (?P<nodes>\S+)"),
        (SrunEventKind.LAUNCH_FAILED, r"srun: error: Task launch for .*?failed on node (?P<nodes>\S+): (?P<detail>.*)"),
        (
            SrunEventKind.STEP_REFUSED,
            r"srun: error: (?:Unable to create (?:job )?step|Unable to confirm allocation |Unable to allocate resources"
            r"|(?:Slurm j|J)ob \d+ .*has expired).*",
        ),
        (SrunEventKind.CANCELLED, _STEPD + r"\*\*\* (?:STEP|JOB) \S+ (?:ON \S+ )?CANCELLED AT .*"),
    )
)
_COMPLAINT = re.compile(
    r"srun: (?:(?:error|fatal): .+|(?:unrecognized|invalid|unknown|ambiguous) option.*|option .*requires.*)\Z"
)
_PASSING = re.compile(
    r"nodes? .*(?:busy|down|drain|available|respond|fail)|time[ds]? ?out|credential|expired|completing|cancel|aborted"
    r"|prolog|terminat|killed|temporarily",
    re.IGNORECASE,
)


def complaint_of(line: str) -> str:
    return text if _COMPLAINT.match(text := line.rstrip("\r\n")) else ""


def is_passing(complaint: str) -> bool:
    return classify(complaint) is not SlurmError or bool(_PASSING.search(complaint))


def parse_srun_line(line: str) -> SrunEvent | None:
    """The event in a line of srun's standard error; None: anything else, such as a worker's own output."""
    text = line.rstrip("\r\n")
    for kind, pattern in _RULES:
        if match := pattern.match(text):
            found = match.groupdict()
            try:
                nodes = expand(found.get("nodes") or "")
            except HostlistError:
                nodes = ()
            code = found.get("code")
            return SrunEvent(
                kind=kind, nodes=nodes, exit_code=int(code) if code else None, detail=found.get("detail") or ""
            )
    return None
