"""What a rank was doing when its round broke: part of the event ``ranks_observed``."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from hpc_elastic.run.flight_tail import FlightTail

MOST_NAMED = 64
"""Ranks that a message names, of which so many are kept."""


class Doing(str, Enum):
    """What kind of call a rank was in."""

    COLLECTIVE = "collective"
    """It waited for other ranks: in a collective, in a send or receive, or while a process group was made."""
    STORE = "store"
    """It waited for a key of the process group's store."""
    BACKWARD = "backward"
    """In a backward pass, which may wait for a collective and may compute."""
    LOADER = "loader"
    """It waited for a DataLoader's worker."""
    CHILD = "child"
    """It waited for a process that it had started."""
    SLEEP = "sleep"
    LOCK = "lock"
    """It waited for a lock, a queue or a thread; work.wait() of the script looks the same."""
    IO = "io"
    """In a read, a write or a wait for a descriptor."""
    STOPPED = "stopped"
    """By SIGSTOP or a debugger, not by its agent."""
    LEAVING = "leaving"
    """It had left the process group, or was about to end."""
    CODE = "code"
    """In other code."""
    UNKNOWN = "unknown"
    """No stack of it could be had."""


class Activity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank was doing, for an event."""

    rank: int
    doing: Doing = Doing.UNKNOWN
    call: str = ""
    """``all_reduce``, ``DataLoader``, ``time.sleep``; empty: not known, or the user's own code."""
    at: str = ""
    """The innermost frame of the user's code: ``train.py:44 step``."""
    line: str = ""
    """That line of the source, where it could be read and no collective's name says more."""
    children: tuple[str, ...] = ()
    """Of a rank that waits for its children, at most three: ``its child process 4711: S (sleeping) in pipe_read``."""
    failed: bool = False
    """It had failed by itself; else it was silent."""
    sequence: int | None = None
    """The last collective that it had enqueued, as NCCL's watchdog counts them."""
    operation: str = ""
    """That collective's type and size, as its messages have them."""
    peer_operation: tuple[int, str] | None = None
    """Another rank, and its collective, as its message has them."""
    names: tuple[int, ...] = ()
    """Ranks that its message says did not come, or failed."""
    reports: str = ""
    """What its message says that they raised: ``OSError: [Errno 122] Disk quota exceeded``."""
    key: str = ""
    """Of the store: the key that it waited for."""
    clients: tuple[int, int] | None = None
    """Of the store: how many ranks had come, of how many."""
    sizes: tuple[int, int] | None = None
    """Bytes that came from a peer, and that its own collective expected at most."""
    awaits: int | None = None
    """The rank that its send or receive is with."""
    peer: str = ""
    """The peer whose connection broke, as its message has it: ``[10.0.0.7]:41234``, ``n1<41234>``."""

    flight: FlightTail | None = None
    """Its last collectives, where it left a dump of torch's flight recorder."""

    @property
    def where(self) -> str:
        """One clause: what it was doing, and at which place of the user's code."""
        place = f" ({self.at})" if self.at else ""
        if self.doing in (Doing.COLLECTIVE, Doing.BACKWARD):
            return f"in {self.call or _WORDS[self.doing]}{place}"
        if self.doing is Doing.STORE:
            key = f" {self.key!r}" if self.key else ""
            return f"waiting for the key{key} of {_WORDS[self.doing]}{place}"
        what = _WORDS[self.doing]
        if self.doing is Doing.UNKNOWN:
            return what
        source = f": `{self.line}`" if self.line else ""
        return "; ".join((f"{what}{place}{source}", *self.children))


_WORDS = {
    Doing.COLLECTIVE: "a collective",
    Doing.BACKWARD: "a backward pass",
    Doing.STORE: "the store",
    Doing.UNKNOWN: "silent",
    Doing.LOADER: "waiting for a worker of its DataLoader",
    Doing.CHILD: "waiting for a process that it had started",
    Doing.SLEEP: "asleep",
    Doing.LOCK: "waiting for a lock, a queue or a thread",
    Doing.IO: "waiting in a read, a write or a poll",
    Doing.STOPPED: "stopped by a signal (SIGSTOP, a debugger)",
    Doing.LEAVING: "leaving its process group or about to end",
    Doing.CODE: "in code outside of any collective",
}


class RankSockets(Struct, frozen=True, kw_only=True):
    """The TCP sockets of one rank, for an event."""

    rank: int
    ends: tuple[tuple[str, str], ...] = ()
    """Each address of its own ends with the ports there: ``("10.0.0.7", "33421,36000-36007")``."""
