"""The activity of a rank when its round broke, with its last collectives: part of the event ``ranks_observed``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

MOST_NAMED = 64
"""Limit of the ranks that are kept of those that a message names."""
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class AwaitedCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A collective, a send or a receive, as the ranks that belong together in it must have called it."""

    name: str
    """``all_reduce``; ``send`` or ``recv``."""
    group: str
    """The process group's name in torch, the same on all its ranks."""
    description: str = ""
    """The name that the script or the framework gave the group."""
    backend: str = ""
    """``nccl`` or ``gloo``; empty: unknown."""
    inputs: tuple[tuple[Size, ...], ...] = ()
    outputs: tuple[tuple[Size, ...], ...] = ()
    types: tuple[str, ...] = ()
    peers: tuple[int, int] | None = None
    """The sending and the receiving rank of a send or a receive, in the group's numbers."""


class TailTrack(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last calls of one rank in one process group, oldest first."""

    group: str
    backend: str = ""
    is_transfer: bool = False
    """Sends and receives; else collectives."""
    sequences: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    """Indices into `FlightTail.calls`."""
    done: tuple[int, ...] = ()
    started: int = -1
    """The last sequence number that its device has begun and not completed; -1: unknown, or there is no such call."""


class FlightTail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one rank's dump of torch's flight recorder, or NCCL's watchdog's messages in place of one."""

    calls: tuple[AwaitedCall, ...] = ()
    tracks: tuple[TailTrack, ...] = ()
    members: tuple[tuple[str, str], ...] = ()
    """A group and its ranks (``0-3,8``), for each where the dump has them."""
    is_of_words: bool = False
    """It comes from the watchdog's messages: a call without a name is unknown, and there are no types."""


class Doing(str, Enum):
    COLLECTIVE = "collective"
    """It waited for other ranks: in a collective, in a send or receive, or while a process group was made."""
    STORE = "store"
    BACKWARD = "backward"
    """A backward pass, which may wait for a collective and may compute."""
    LOADER = "loader"
    CHILD = "child"
    SLEEP = "sleep"
    LOCK = "lock"
    """It waited for a lock, a queue or a thread; work.wait() of the script looks the same."""
    IO = "io"
    STOPPED = "stopped"
    """SIGSTOP or a debugger stopped it, not its agent."""
    LEAVING = "leaving"
    CODE = "code"
    UNKNOWN = "unknown"


class Activity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    rank: int
    doing: Doing = Doing.UNKNOWN
    call: str = ""
    """``all_reduce``, ``DataLoader``, ``time.sleep``; empty: unknown, or the user's own code."""
    at: str = ""
    """The innermost frame of the user's code: ``train.py:44 step``."""
    line: str = ""
    """The line of the source, where it was readable and no collective's name says more."""
    children: tuple[str, ...] = ()
    """At most three of the children that it waits for: ``its child process 4711: S (sleeping) in pipe_read``."""
    failed: bool = False
    """It had failed by itself; else it was silent."""
    sequence: int | None = None
    """The last collective that it had enqueued, as NCCL's watchdog counts them."""
    operation: str = ""
    peer_operation: tuple[int, str] | None = None
    """Another rank, and its collective, as its message has them."""
    names: tuple[int, ...] = ()
    """Ranks that its message names as missing or failed."""
    reports: str = ""
    """Their exception in its message: ``OSError: [Errno 122] Disk quota exceeded``."""
    key: str = ""
    clients: tuple[int, int] | None = None
    """How many ranks had come to the store, of how many."""
    sizes: tuple[int, int] | None = None
    """Bytes that came from a peer, and the most that its own collective expected."""
    awaits: int | None = None
    peer: str = ""
    """The peer whose connection broke, as its message has it: ``[10.0.0.7]:41234``, ``n1<41234>``."""

    flight: FlightTail | None = None

    @property
    def where(self) -> str:
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
    rank: int
    ends: tuple[tuple[str, str], ...] = ()
    """The addresses of its TCP sockets, each with the ports there: ``("10.0.0.7", "33421,36000-36007")``."""
