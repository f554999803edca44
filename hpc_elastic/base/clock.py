"""The one module that reads the system's clocks; how long something has looked the same by one's own clock; and how far
apart the clocks of two hosts are.

`Staleness` is the one way in which this package finds that something is gone; no time of another host is read. Time in
which the observer itself was paused (SIGSTOP, a filesystem that hung) does not count: it saw nothing then.

A packet sent at S by one host's clock that came at R by another's: the receiver's clock is ahead by at most R - S.
Packets the other way bound it from below, as in NTP; a bound that is `age` old has grown by `drift_ns(age)`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, Protocol, TypeVar

from msgspec import Struct


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back, on this host only; ages, deadlines and leases use them."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since the epoch by this host's wall clock, for people: never subtracted across hosts."""
        ...

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Wait until `stop` is set or `seconds` have passed. Returns whether `stop` is set."""
        ...


def pause(clock: Clock, seconds: float) -> None:
    clock.wait(threading.Event(), seconds)


def uptime_ns(clock: Clock) -> int:
    """Nanoseconds that this host has been up, which `clock_offset` compares with another host's."""
    return round(clock.monotonic() * 1e9)


class SystemClock:
    """The real clocks. ``CLOCK_BOOTTIME`` counts suspended time too, so a resumed holder sees its lease as old."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def time_ns(self) -> int:
        return time.time_ns()

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        return stop.wait(max(0.0, seconds))


class RunClock(SystemClock):
    """The clocks of an agent or a supervisor: its wall clock is read once, and continued by the clock since the boot.

    A node's clock that is set in mid-run (an NTP step, an administrator, a restored virtual machine) would else tear
    the record of the attempt: rounds that last an hour or end before they began.
    """

    def __init__(self) -> None:
        self._booted_ns = super().time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def time_ns(self) -> int:
        return self._booted_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME)


DRIFT = 1000
"""Two hosts' clocks drift by at most one nanosecond in this many: NTP slews each by up to 500 ppm. (chrony does more
after a start with a wrong clock: measurements contradict each other then, and begin again.)"""
_NEWEST = 30
"""Packets of half a minute: each side sends one a second."""


def drift_ns(age_ns: int) -> int:
    """The most that two clocks can have drifted, `age_ns` before or after they were compared."""
    return -(-abs(age_ns) // DRIFT)


class Offset(Struct, frozen=True, kw_only=True):
    """How far one clock is ahead of another, plus or minus `bound_ns`."""

    offset_ns: int
    bound_ns: int

    def aged(self, age_ns: int) -> Offset:
        return Offset(offset_ns=self.offset_ns, bound_ns=self.bound_ns + drift_ns(age_ns))


class PeerClock:
    """One participant's knowledge of another's clock. Times are nanoseconds by their hosts' clocks since boot.

    One thread feeds it; other threads may ask, and get None while the two bounds are being changed.
    """

    __slots__ = ("_lower", "_newest", "_upper")

    def __init__(self) -> None:
        self._upper: tuple[int, int] | None = None
        """Own clock ahead by at most the first, at the second (own time)."""
        self._lower: tuple[int, int] | None = None
        self._newest: deque[int] = deque(maxlen=_NEWEST)

    def received(self, *, sent_ns: int, received_ns: int, told_ns: int | None) -> None:
        """Record a packet that was sent at `sent_ns` by the other's clock, and came by `received_ns` of the own one.

        `told_ns`: the most that the other knew *its* clock to be ahead; None: unknown.
        """
        highest = received_ns - sent_ns
        self._newest.append(highest)
        if self._upper is None or highest <= _grown(self._upper, received_ns):
            self._upper = (highest, received_ns)
        if told_ns is not None:
            # It was so when the packet left, which is no longer ago than this.
            travelled = max(0, highest + told_ns)
            lowest = -told_ns - drift_ns(travelled)
            if self._lower is None or lowest >= _shrunk(self._lower, received_ns):
                self._lower = (lowest, received_ns)
        if self._lower is not None and _shrunk(self._lower, received_ns) > _grown(self._upper, received_ns):
            # One of the two clocks has jumped (a machine that was paused and moved): only this packet is still true.
            # The other's bound may be from before; it finds out in the same way.
            self._upper, self._lower = (highest, received_ns), None
            self._newest.clear()

    def bound_to_send(self, now_ns: int) -> int | None:
        """The most that the own clock is ahead, for the other to know; None: no packet of it came."""
        upper = self._upper
        return None if upper is None else _grown(upper, now_ns)

    def offset(self, now_ns: int) -> Offset | None:
        """How far the own clock is ahead; None: packets did not pass both ways."""
        upper, lower = self._upper, self._lower
        if upper is None or lower is None:
            return None
        high, low = _grown(upper, now_ns), _shrunk(lower, now_ns)
        if high < low:
            return None
        return Offset(offset_ns=(high + low) // 2, bound_ns=(high - low + 1) // 2)

    def travel(self, now_ns: int) -> tuple[int, int] | None:
        """How long the other's packets take of late: at most so in a fifth of the cases, and in four; None: unknown."""
        offset, newest = self.offset(now_ns), sorted(self._newest)
        if offset is None or not newest:
            return None
        low, high = (max(0, newest[len(newest) * fifths // 5] - offset.offset_ns) for fifths in (1, 4))
        return low, high


def _grown(bound: tuple[int, int], now_ns: int) -> int:
    return bound[0] + drift_ns(now_ns - bound[1])


def _shrunk(bound: tuple[int, int], now_ns: int) -> int:
    return bound[0] - drift_ns(now_ns - bound[1])


K = TypeVar("K", bound=Hashable)


class _Seen(Struct):
    value: object
    since: float
    looked: float


class Staleness(Generic[K]):
    """The age of the last change of each of several observed values. Times are seconds of one monotonic clock."""

    def __init__(self, *, longest_gap: float = float("inf")) -> None:
        """`longest_gap`: a longer time between two observations is a pause of the observer, in which nothing aged."""
        self._longest_gap = longest_gap
        self._seen: dict[K, _Seen] = {}
        self._observed_at: float | None = None

    def observe(self, key: K, value: object, now: float) -> float:
        """Record the value of `key`; `now` was taken before it was read: a slow read does not make it younger.

        Returns its age: seconds for which it has looked the same; 0 at the first observation and after a change.
        """
        self._note_gap(now)
        seen = self._seen.get(key)
        if seen is None or seen.value != value:
            self._seen[key] = _Seen(value, since=now, looked=now)
            return 0.0
        seen.looked = now
        return max(0.0, now - seen.since)

    def observe_all(self, values: Mapping[K, object], now: float) -> dict[K, float]:
        self._note_gap(now)
        for key in self._seen.keys() - values.keys():
            del self._seen[key]
        return {key: self.observe(key, value, now) for key, value in values.items()}

    def age(self, key: K) -> float:
        """Seconds for which `key` had not changed when it was last observed; it does not age unobserved."""
        seen = self._seen.get(key)
        return max(0.0, seen.looked - seen.since) if seen else 0.0

    def unchanged_from(self, key: K, moment: float) -> float:
        """Seconds after `moment` for which it was seen not to change; 0: it changed, or was not observed since."""
        seen = self._seen.get(key)
        return max(0.0, seen.looked - moment) if seen and seen.since <= moment else 0.0

    def changed_since(self, key: K, moment: float) -> bool:
        seen = self._seen.get(key)
        return seen is not None and seen.since > moment

    def paused_for(self, seconds: float, *, now: float) -> None:
        for seen in self._seen.values():
            seen.since = min(now, seen.since + seconds)

    def forget(self, key: K) -> None:
        """Reset its age: it could not be observed, which is no evidence."""
        self._seen.pop(key, None)

    def _note_gap(self, now: float) -> None:
        if self._observed_at is not None and now - self._observed_at > self._longest_gap:
            self.paused_for(now - self._observed_at, now=now)
        self._observed_at = now
