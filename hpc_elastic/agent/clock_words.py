"""What an agent tells its event log of its host's clock: how far it is ahead of the coordinators', each with a bound.

Every node compares its clock with the coordinator's alone, by the packets that pass between the two anyway: so the
report can order what happened on different nodes, over a chain of them where the coordinator changed. Little is told,
and only where another line is written too: once of each coordinator, when workers start, and anew when a worker fails.
"""

from __future__ import annotations

from typing import Protocol

from hpc_elastic.clock import Clock, uptime_ns
from hpc_elastic.clock_offset import Offset
from hpc_elastic.events import EventLog
from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.rendezvous.uid import node_of

MOST_REFERENCES = 4
"""Of so many coordinators, the latest ones, something is told."""
_READS = 5
STEP_NS = 1_000_000
"""By so much the wall clock has to be set to be told of."""


class Ruler(Protocol):
    """What is needed of `store.doorbell.Doorbell`."""

    def offset_to(self, uid: str) -> Offset | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockWord:
    """What is known at one moment."""

    offset: Offset
    uptime_ns: int
    """By this host's clock since its boot."""
    wall_ns: int


def is_news(word: ClockWord, told: ClockWord | None) -> bool:
    """Whether `word` says more than `told`, the last one of its kind: that one grows old."""
    if told is None:
        return True
    age = word.uptime_ns - told.uptime_ns
    if abs(word.wall_ns - told.wall_ns - age) > STEP_NS:
        return True
    if abs(word.offset.offset_ns - told.offset.offset_ns) > word.offset.bound_ns + told.offset.aged(age).bound_ns:
        return True
    # A clock is never off from itself.
    return 0 < 2 * word.offset.bound_ns < told.offset.aged(age).bound_ns


class ClockWords:
    """One agent's."""

    def __init__(self, events: EventLog, ruler: Ruler | None, *, uid: str, clock: Clock) -> None:
        """Args:
        events: Where it is told.
        ruler: Measures; None: nothing is ever told.
        uid: This agent's own.
        clock: The one that `ruler` reads, too.
        """
        self._events = events
        self._ruler = ruler
        self._uid = uid
        self._clock = clock
        self._told: dict[str, ClockWord | None] = {}
        """By coordinator, the latest last."""

    def on_leader(self, leader: str) -> None:
        """The coordinator is the agent `leader` from now on."""
        self._told[leader] = self._told.pop(leader, None)
        if len(self._told) > MOST_REFERENCES:
            del self._told[next(iter(self._told))]

    def log_first(self) -> None:
        """Tell of the coordinators of which nothing was told so far."""
        self._log([reference for reference, told in self._told.items() if told is None])

    def log_changes(self) -> None:
        """Tell what is news: something has happened here whose time counts."""
        self._log(list(self._told))

    def _log(self, references: list[str]) -> None:
        if self._ruler is None:
            return
        for reference in references:
            own = reference == self._uid
            offset = Offset(offset_ns=0, bound_ns=0) if own else self._ruler.offset_to(reference)
            if offset is None:
                continue
            uptime, wall = self._both_clocks()
            word = ClockWord(offset=offset, uptime_ns=uptime, wall_ns=wall)
            if is_news(word, self._told[reference]):
                self._told[reference] = word
                self._events.write(
                    "clock_offset",
                    reference=node_of(reference),
                    offset_ns=offset.offset_ns,
                    bound_ns=offset.bound_ns,
                    uptime_ns=uptime,
                    wall_ns=wall,
                )

    def _both_clocks(self) -> tuple[int, int]:
        """The time since the boot and the wall clock's, at one moment: who is put to sleep in between reads again."""
        reads = [(uptime_ns(self._clock), self._clock.time_ns(), uptime_ns(self._clock)) for _ in range(_READS)]
        before, wall, after = min(reads, key=lambda read: read[2] - read[0])
        return (before + after) // 2, wall
