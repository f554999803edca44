"""What an agent logs of its host's clock: how far it is ahead of the coordinators', each with a bound.

Every node compares its clock with the coordinator's alone, by the packets that pass between the two anyway: so the
report can order what happened on different nodes, over a chain of them where the coordinator changed. Little is logged,
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
"""Of so many coordinators, the latest ones, an offset is logged."""
_READS = 5
STEP_NS = 1_000_000
"""By so much the wall clock has to be set for another line."""


class Ruler(Protocol):
    """What is needed of `store.doorbell.Doorbell`."""

    def offset_to(self, uid: str) -> Offset | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """What is known at one moment."""

    offset: Offset
    uptime_ns: int
    """By this host's clock since its boot."""
    wall_ns: int


def is_news(sample: ClockSample, logged: ClockSample | None) -> bool:
    """Whether `sample` says more than `logged`, the last one of its kind: that one grows old."""
    if logged is None:
        return True
    age = sample.uptime_ns - logged.uptime_ns
    if abs(sample.wall_ns - logged.wall_ns - age) > STEP_NS:
        return True
    if (
        abs(sample.offset.offset_ns - logged.offset.offset_ns)
        > sample.offset.bound_ns + logged.offset.aged(age).bound_ns
    ):
        return True
    # A clock is never off from itself.
    return 0 < 2 * sample.offset.bound_ns < logged.offset.aged(age).bound_ns


class ClockOffsetLog:
    """One agent's."""

    def __init__(self, events: EventLog, ruler: Ruler | None, *, uid: str, clock: Clock) -> None:
        """Args:
        events: Where offsets are logged.
        ruler: Measures; None: nothing is ever logged.
        uid: This agent's own.
        clock: The one that `ruler` reads, too.
        """
        self._events = events
        self._ruler = ruler
        self._uid = uid
        self._clock = clock
        self._logged: dict[str, ClockSample | None] = {}
        """By coordinator, the latest last."""

    def on_leader(self, leader: str) -> None:
        """The coordinator is the agent `leader` from now on."""
        self._logged[leader] = self._logged.pop(leader, None)
        if len(self._logged) > MOST_REFERENCES:
            del self._logged[next(iter(self._logged))]

    def log_first(self) -> None:
        """Log the offset to each coordinator for which nothing was logged so far."""
        self._log([reference for reference, logged in self._logged.items() if logged is None])

    def log_changes(self) -> None:
        """Log the offsets that have changed: something has happened here whose time counts."""
        self._log(list(self._logged))

    def _log(self, references: list[str]) -> None:
        if self._ruler is None:
            return
        for reference in references:
            own = reference == self._uid
            offset = Offset(offset_ns=0, bound_ns=0) if own else self._ruler.offset_to(reference)
            if offset is None:
                continue
            uptime, wall = self._both_clocks()
            sample = ClockSample(offset=offset, uptime_ns=uptime, wall_ns=wall)
            if is_news(sample, self._logged[reference]):
                self._logged[reference] = sample
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
