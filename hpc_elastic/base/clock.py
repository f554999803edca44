"""The one module that reads the system's clocks. Everything else takes a `Clock`."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, and a wait that can be cut short. Tests pass a fake that jumps."""

    def monotonic(self) -> float:
        """Seconds that never go back, on this host only: for ages, deadlines and leases."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since the epoch by this host's wall clock: for people, never subtracted across hosts."""
        ...

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Wait until `stop` is set or `seconds` have passed. Returns whether `stop` is set."""
        ...


def uptime_ns(clock: Clock) -> int:
    """Nanoseconds that this host has been up: what is compared with another host's (`clock_offset`)."""
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
    """Those of an agent or a supervisor: its wall clock is read once, and carried on by the clock since the boot.

    Who sets a node's clock in mid-run (an NTP step, an administrator, a restored virtual machine) would else tear the
    record of the attempt: rounds that last an hour or end before they began.
    """

    def __init__(self) -> None:
        self._booted_ns = super().time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def time_ns(self) -> int:
        return self._booted_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME)
