"""The progress of ranks: how far and how fast they are, and the activity of those that make none; and ``--hangs``.

A node's file in ``heartbeats/`` has the last heartbeats of its workers, and is rewritten regularly; they are part of
some events. Those in ``slow-ranks/`` (``--slow-ranks``) have when its ranks entered which collectives, and which ranks
are slow. A rank's activity, with its last collectives, is part of the event ``ranks_observed``; the files in
``suspicions/`` are there while workers make no progress.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from hpc_elastic.errors import UsageError
from hpc_elastic.run.option_values import number_of


class ProgressSource(str, Enum):
    """How a worker's progress is measured."""

    HEARTBEAT = "heartbeat"
    """The script reports its steps."""
    OPTIMIZER = "optimizer"
    """The steps of its optimizer are counted, from 1 in each round."""
    COLLECTIVES = "collectives"
    """The collectives that torch's flight recorder shows as complete are counted, from 1 in each round."""
    KERNEL = "kernel"
    """The kernel's counts show whether its processes work or are idle, and no steps."""
    UNKNOWN = "unknown"

    @property
    def unit(self) -> str:
        return "collective" if self is ProgressSource.COLLECTIVES else "step"


STEPS = (ProgressSource.OPTIMIZER, ProgressSource.HEARTBEAT)
COUNTED = (ProgressSource.OPTIMIZER, ProgressSource.COLLECTIVES)
"""Sources that count from 1 in each round."""


class RankHeartbeat(Struct, frozen=True, kw_only=True):
    rank: int
    local_rank: int = -1
    step: int | None = None
    counted_steps: int | None = None
    """Steps of its optimizer, or its collectives, where the script reports none: from 1 in each round."""
    source: ProgressSource = ProgressSource.UNKNOWN
    """Unknown: there are no steps, or an older agent wrote this."""
    section: str = ""
    age: float = 0.0
    """Seconds since the heartbeat, when this was written."""
    count: int = 0
    saved_step: int | None = None
    saved_age: float | None = None
    """Seconds since its last checkpoint of this round was complete, when this was written."""


class Progress(Struct, frozen=True, kw_only=True):
    """The progress of a node's workers in a round, by the one that got furthest: for the goodput.

    The two times are those of `first_step` and `step` by the node's wall clock; where no step was reported, those of
    the first and last of `counted_steps`, which counts the kind in `counts`.
    """

    sections: tuple[str, ...] | None = None
    """All that any worker here has been in; null: unknown."""
    first_step: int | None = None
    first_ns: int = 0
    step: int = -1
    step_ns: int = 0
    counted_steps: int = 0
    counts: ProgressSource = ProgressSource.OPTIMIZER
    checkpoint_seconds: float = 0.0
    checkpoints: int = 0
    """Complete ones of the worker that has most."""
    longest_step: float = 0.0
    """Seconds: the longest time between two heartbeats in section ``step``, or in the sections that it judges alike."""
    redone_seconds: float = 0.0
    """Time at steps that had been reported before, as after an in-process restart."""
    resting: float | None = None
    """Seconds in which no worker did anything, by the kernel's counts; null: unknown."""

    @property
    def source(self) -> ProgressSource:
        if self.first_step is not None:
            return ProgressSource.HEARTBEAT
        if self.counted_steps:
            return self.counts
        return ProgressSource.UNKNOWN if self.resting is None else ProgressSource.KERNEL


class NodeHeartbeats(Struct, frozen=True, kw_only=True):
    """``heartbeats/node-<index>.json``: about the last round that the node took part in."""

    node: int
    host: str = ""
    round: int
    written_ns: int
    steps_per_second: float | None = None
    """Rate over the last minute of the round."""
    total: int | None = None
    loss: float | None = None
    """The last one of the first of its ranks that reports one; null also where that is no finite number."""
    progress: Progress | None = None
    ranks: tuple[RankHeartbeat, ...] = ()


def describe_begun_again(first: int, before: int) -> str:
    """The problem of a round that begins at step `first` after an earlier one came to `before`; empty: no problem.

    A script whose rounds each look for checkpoints in another folder trains the first steps again and again.
    """
    if first > 1 or before - first < 2:
        return ""
    return (
        f"training began at step {first} again, after step {before} of an earlier round: no checkpoint was loaded. "
        "Does each start have a folder of its own, as by hydra's job.chdir or a time in the path?"
    )


NOW = "now.json"
SLOW_RANK = "slow rank"
"""The reason of a node that leaves begins with this."""


class OnSlowRank(str, Enum):
    OBSERVE = "observe"
    """It is reported: in the job log, by `status` and in the report."""
    EXCLUDE = "exclude"
    """And its node is in no round after the next restart, and in no attempt after the next requeue."""
    OFF = "off"


class GroupArrivals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's last collectives in one process group."""

    rank: int
    group: str
    members: str = ""
    """Ranks of the group, as ``0-3,8``; empty: not known."""
    links: tuple[int, ...] = ()
    """The ranks that it sends to or receives from: other stages of its pipeline."""
    has_transfers: bool = False
    """It sends or receives, and to whom is not known: all ranks of the group may be stages of one pipeline."""
    first: int = 0
    """The number of the first collective in its group; the others follow without a gap."""
    calls: tuple[int, ...] = ()
    """The kind of each call, a place in `NodeArrivals.kinds`."""
    entered_us: tuple[int, ...] = ()
    """Microseconds from the one before at which each was entered; the first: from `NodeArrivals.since_ns`."""
    took_us: tuple[int, ...] = ()
    """How long each ran on the GPU, which includes the wait for the last rank; empty: not measured."""


class RankSections(Struct, frozen=True, kw_only=True):
    """Times of the script's sections in one rank since the look before."""

    rank: int
    seconds: float
    spent: dict[str, float] = {}


class NodeArrivals(Struct, frozen=True, kw_only=True):
    """``slow-ranks/node-<index>.json``: what the ranks of a node entered last, for the node that compares all."""

    round: int
    reference: str = ""
    """The node whose clock since its boot is `since_ns`' clock, by its uid; empty: this node's own."""
    since_ns: int
    bound_ns: int = 0
    kinds: tuple[str, ...] = ()
    """Name and size of each kind of call."""
    groups: tuple[GroupArrivals, ...] = ()
    sections: tuple[RankSections, ...] = ()
    travel_us: dict[int, tuple[int, int]] = {}
    """Node → microseconds that packets from there take, a fifth and four fifths of them: those of the coordinator, and
    to it those of all."""


class SlowRank(Struct, frozen=True, kw_only=True):
    """A rank that the others wait for in their collectives."""

    rank: int
    node: int
    host: str
    seconds: float
    """Median delay with which it enters `call`; or how much longer it is in that section, a minute."""
    call: str
    calls: int
    """How many collectives that is the median of; 0: `call` is a section of the script, or ``packets``."""
    share: float
    """The share of the run's time that is lost to the slow ranks of its group, 0 to 1."""
    step: float = 0.0
    """Seconds between two collectives of the same place in the step; 0: not known."""
    on_gpu: bool = False
    """Its GPU is late; its process launches in time."""
    by_network: bool = False
    """Its node's packets are late, by `seconds`; all its ranks enter in time, and the collectives take longer."""
    since_ns: int = 0
    """Wall clock of the node that compared, when it was first seen."""

    def __str__(self) -> str:
        late, costs = f"{self.seconds * 1e3:.0f} ms after the others", f": that costs {self.share:.0%} of the time"
        if self.step:
            costs = f": a step takes {self.step:.3f} s instead of {self.step * (1 - self.share):.3f} s"
        if self.by_network:
            return f"rank {self.rank} on {self.host} gets packets {late} (its node's network is slow){costs}"
        if not self.calls:
            longer = f"{self.seconds:.1f} s a minute longer in section {self.call} than the others"
            return f"rank {self.rank} on {self.host} is {longer}{costs}"
        place = f"{self.host}, by its GPU," if self.on_gpu else self.host
        call = self.call.partition(" ")[0].rpartition(":")[2]
        return f"rank {self.rank} on {place} enters each {call} {late} (median of {self.calls}){costs}"


class RunPace(Struct, frozen=True, kw_only=True):
    """A run that is slower as a whole than it was."""

    step: float
    best: float
    """Seconds a step in the run's best hour, with as many ranks."""
    since_ns: int = 0
    """Wall clock of the node of group rank 0."""

    @property
    def share(self) -> float:
        return 1 - self.best / self.step

    def __str__(self) -> str:
        took = f"a step takes {self.step:.3g} s and took {self.best:.3g} s in the run's best hour"
        return f"{took}: {self.share:.0%} of the time is lost"


class SlowRanks(Struct, frozen=True, kw_only=True):
    """``slow-ranks/now.json``: the ranks that are slow now, and the run where it is. There is no such file where none
    is. ``left-<index>.json``: those of a node that left the run because of them."""

    round: int
    written_ns: int
    ranks: tuple[SlowRank, ...] = ()
    pace: RunPace | None = None


class BestPace(Struct, frozen=True, kw_only=True):
    """``pace.json`` of the run: its best hour so far."""

    world_size: int
    step: float
    spread: float = 0.0
    """Median deviation from that of single minutes."""


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
