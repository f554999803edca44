"""How far and how fast ranks are: what nodes write into ``heartbeats/`` and, by ``--slow-ranks``, ``slow-ranks/``.

A node's file has the last heartbeats of its workers, and is rewritten regularly; they are part of some events. Those in
``slow-ranks/`` have when its ranks entered which collectives, and which ranks are slow.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


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
