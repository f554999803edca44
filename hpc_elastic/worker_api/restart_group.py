"""What the in-process ring on a rank says to its node's agent, and what the agent says to it: names and lines. Pure.

A line of JSON in a named pipe: short enough to be written whole, whoever else writes. The ring imports torch, the agent
must not: so both read this module.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from msgspec import Struct, to_builtins

REPORTS = "HPC_ELASTIC_RING_REPORTS"
"""Where the ring writes: the path of the agent's named pipe. Unset: nobody reads."""
WAIT = "HPC_ELASTIC_RING_WAIT"
"""Seconds for which the ranks that are left wait for a fresh process in a dead one's place. Unset: none will come."""
REPLACES = "HPC_ELASTIC_RING_REPLACES"
"""1 for the first process that is started in a dead one's place, and so on. Unset: it is no such process."""
LINE_LIMIT = 4000
"""Bytes; a pipe takes 4096 (PIPE_BUF) at once or not at all."""
_LONGEST_TEXT = 1000


class RestartWith(str, Enum):
    """What `--restart-policy` says about a worker that ends badly."""

    PROCESSES = "processes"
    """All workers of the run start again."""
    IN_PROCESS = "in-process"
    """It alone is replaced, if it was in the in-process ring; the others keep their processes."""


class RingEvent(str, Enum):
    """What happened to a process of the in-process ring: the kind of a line."""

    BEGUN = "begun"
    """The process is in a wrapped call: its death is the ring's affair."""
    ENDED = "ended"
    """It is out of it, as all others."""
    LEFT = "left"
    """It ends alone; the others go on without it."""
    GAVE_UP = "gave_up"
    """The ring can't go on: no process is to be put in this one's place."""
    RESTARTED = "restarted"
    """The function starts again; the new rank 0 says so."""


class RingLine(Struct, frozen=True, kw_only=True):
    """One line. Ranks are those that the process was started with, unless it says otherwise."""

    word: RingEvent
    pid: int
    rank: int
    reason: str = ""
    iteration: int = 0
    seconds: float = 0.0
    """From the fault being seen to the function's start, on the rank that says so."""
    world_size: int = 0
    active_world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration that was interrupted, and the name of its `Interruption`."""
    joined: tuple[int, ...] = ()
    """Ranks in that iteration whose places fresh processes took."""

    def encode(self) -> bytes:
        value = to_builtins(self)
        value["word"] = self.word.value
        value["reason"] = self.reason[:_LONGEST_TEXT]
        for short in (64, 8, 0):
            line = json.dumps(value).encode() + b"\n"
            if len(line) <= LINE_LIMIT:
                return line
            value["interruptions"], value["joined"] = value["interruptions"][:short], value["joined"][:short]
            value["reason"] = value["reason"][:short]
        return line


def decode(line: bytes) -> RingLine | None:
    """One line; None where it is none, or of another version."""
    try:
        value: dict[str, Any] = json.loads(line)
        known = set(RingLine.__struct_fields__)
        chosen = {name: item for name, item in value.items() if name in known}
        chosen["word"] = RingEvent(chosen["word"])
        chosen["interruptions"] = tuple((int(rank), str(name)) for rank, name in chosen.get("interruptions", ()))
        chosen["joined"] = tuple(int(rank) for rank in chosen.get("joined", ()))
        for name in ("pid", "rank", "iteration", "world_size", "active_world_size"):
            chosen[name] = int(chosen.get(name, 0))
        chosen["seconds"] = float(chosen.get("seconds", 0.0))
        chosen["reason"] = str(chosen.get("reason", ""))
        return RingLine(**chosen)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
