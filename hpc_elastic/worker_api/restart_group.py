"""The reports of a rank of the in-process restart group to its node's agent, and what the agent gives it. Pure.

A report is a line of JSON in a named pipe, short enough to be written whole beside those of other ranks. The restart
group imports torch, the agent must not: so both import this module.
"""

from __future__ import annotations

import json
from enum import Enum

from msgspec import Struct

from hpc_elastic.base.codec import UnreadableRecordError, loads, to_json

REPORTS = "HPC_ELASTIC_RING_REPORTS"
"""The path of the agent's named pipe, for reports. Unset: no agent reads."""
WAIT = "HPC_ELASTIC_RING_WAIT"
"""Seconds for which the ranks that are left wait for a fresh process in a dead one's place. Unset: none will come."""
REPLACES = "HPC_ELASTIC_RING_REPLACES"
"""1 for the first process that is started in a dead one's place, and so on. Unset: it is no such process."""
LINE_LIMIT = 4000
"""Bytes; a pipe takes 4096 (PIPE_BUF) at once or not at all."""
_LONGEST_TEXT = 1000


class RestartWith(str, Enum):
    PROCESSES = "processes"
    """All workers of the run start again."""
    IN_PROCESS = "in-process"
    """The worker alone is replaced, if it was in the in-process restart group; the others keep their processes."""


class RestartGroupEvent(str, Enum):
    BEGUN = "begun"
    """The process is in a wrapped call: the restart group can replace it."""
    ENDED = "ended"
    LEFT = "left"
    """It ends alone; the others go on without it."""
    GAVE_UP = "gave_up"
    """The restart group can't go on: no process is to be put in this one's place."""
    RESTARTED = "restarted"
    """The function starts again; one rank reports it for all."""


class RestartGroupReport(Struct, frozen=True, kw_only=True):
    """One line. Ranks are those that the process was started with, where nothing else is said."""

    event: RestartGroupEvent
    pid: int
    rank: int
    reason: str = ""
    iteration: int = 0
    seconds: float = 0.0
    world_size: int = 0
    active_world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration that was interrupted, and the name of its `Interruption`."""
    joined: tuple[int, ...] = ()
    """Ranks in that iteration whose places fresh processes took."""

    def encode(self) -> bytes:
        value = to_json(self)
        value["reason"] = self.reason[:_LONGEST_TEXT]
        for short in (64, 8, 0):
            line = json.dumps(value).encode() + b"\n"
            if len(line) <= LINE_LIMIT:
                return line
            value["interruptions"], value["joined"] = value["interruptions"][:short], value["joined"][:short]
            value["reason"] = value["reason"][:short]
        return line


def decode(line: bytes) -> RestartGroupReport | None:
    try:
        return loads(RestartGroupReport, line)
    except UnreadableRecordError:
        return None
