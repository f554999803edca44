"""The activity of ranks while a run stands still, and when its round broke; and the option ``--hangs``.

The activity of a rank, with its last collectives, is part of the event ``ranks_observed``; the files in ``suspicions/``
are there while workers make no progress.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import number_of

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


class OnHang(str, Enum):
    OBSERVE = "observe"
    """It is reported: in the job log, by `status` and in the report."""
    ACT = "act"
    """The workers leave their stacks, and are started again."""


class HangSettings(Struct, frozen=True, kw_only=True):
    action: OnHang = OnHang.OBSERVE
    least: float = 300.0
    """Seconds without progress that are never a hang."""


def parse_hangs(text: str, option: str = "--hangs") -> HangSettings:
    name, colon, value = text.strip().partition(":")
    try:
        action = OnHang(name)
    except ValueError:
        raise UsageError(
            f"{option} {text}: give observe or act, or with seconds without progress, as in act:600"
        ) from None
    if not colon:
        return HangSettings(action=action)
    seconds = number_of(value)
    if not 1 <= seconds <= 1e8:
        raise UsageError(f"{option} {text}: {value!r} is not a number of seconds from 1 on")
    return HangSettings(action=action, least=seconds)


class Source(str, Enum):
    HEARTBEAT = "heartbeat"
    """A worker sent no heartbeat, and its optimizer did no step, for its section's timeout."""
    KERNEL = "kernel"
    """No worker of any node makes progress: each rests by the kernel's counts, or does not answer."""
    NCCL = "nccl"
    """NCCL's RAS shows ranks that don't answer, or counts of collectives that differ or stand still on all."""


class StalledRank(Struct, frozen=True, kw_only=True, omit_defaults=True):
    rank: int
    at: str = ""
    """The kernel's state of its main process."""
    waits: bool = False
    """Its main thread is in a system call in which a process waits for another one."""
    is_stuck: bool = False
    """It is stopped, or sits in the kernel."""
    flight: FlightTail | None = None


class NodeStall(Struct, frozen=True, kw_only=True):
    """``suspicions/node-<index>.json``: no worker of the node has made progress for as long as ``--hangs`` allows."""

    round: int
    seconds: float
    longest: float = 0.0
    """The node's longest such time in this attempt that ended by itself, seconds."""
    ranks: tuple[StalledRank, ...] = ()
    """Empty: all workers here have ended with 0."""
    gpus: tuple[int, ...] = ()
    """Percent of the time in which a kernel ran on each of its GPUs, by NVML; empty: unknown."""


class Suspicion(Struct, frozen=True, kw_only=True):
    """``suspicions/now.json``: the run hangs, or seems to. Removed when its workers continue."""

    round: int
    source: Source
    reason: str
    """One line, with the culprit where one is known."""
    ranks: tuple[int, ...] = ()
    written_ns: int = 0
    """Wall clock of the node of group rank 0."""
    seconds: float = 0.0
    """Length of the time without progress then."""
    may_be_rest: bool = False
    """All ranks have launched the same, and nothing shows that they wait for each other: never acted on."""
