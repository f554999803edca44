"""``--slow-ranks``, and what nodes write into ``slow-ranks/``: when their ranks entered which collectives, and which
ranks are slow."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

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
