"""The preemption notice: what a record carries of it, and how the step after which all save is agreed on. Pure.

The process that learns of the end (the supervisor or an agent, by a signal) writes the notice into the log; each member
reports where its workers stand, the coordinator names the step, and members report when all is saved.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.worker_api.heartbeat_record import NO_STEP, STEP_PENDING

MEASURE_SECONDS = 1.0
"""Seconds for which a node measures how fast its workers step before it says where they stand."""
NEWS_SECONDS = 1.0
"""Seconds by which a later notice must leave less time than the one that holds, to be sent on."""


class RunNotice(Struct, frozen=True, array_like=True):
    """Part of every record from when it was given. A later one that leaves less time takes its place."""

    reason: str
    """``SIGUSR2 on n1``."""
    seconds: float
    """Seconds for which a checkpoint is waited for, from when it was given."""
    step: int = STEP_PENDING
    """All workers save after this step; `NO_STEP`: no worker reports steps."""
    left: float | None = None
    """Seconds until the job is ended from outside, from when it was given; None where nobody knows."""

    @property
    def is_agreed(self) -> bool:
        return self.step != STEP_PENDING

    def is_given_as(self, other: RunNotice | None) -> bool:
        return other is not None and replace(self, step=other.step) == other

    def leaves_less_than(self, other: RunNotice, *, since: float) -> bool:
        """Return whether it is news to those who know of another one, given `since` seconds ago."""
        return self.seconds < other.seconds - since - NEWS_SECONDS


class PreemptionStatus(Struct, frozen=True, kw_only=True):
    """One node's workers, when there is a preemption notice."""

    heeds: bool
    """One of them has asked for notices, or is sent a signal."""
    step: int = NO_STEP
    """The furthest step that one of them has reported."""
    rate: float = 0.0
    """Steps per second of the fastest."""


def seconds_to_save(given: float, *, shutdown_timeout: float) -> float:
    """Seconds for which a checkpoint is waited for, of those `given` until the job is ended from outside."""
    return max(1.0, given - min(shutdown_timeout, given / 3) - min(5.0, given / 10))


def agreed_step(statuses: Collection[PreemptionStatus], *, spread: float) -> int:
    """One that no worker has passed by the time that it hears of it, `spread` seconds after the members' `statuses`."""
    known = [status for status in statuses if status.step >= 0]
    if not known:
        return NO_STEP
    furthest = max(status.step for status in known)
    ahead = math.ceil(min(1e9, max(0.0, *(status.rate for status in known))) * spread)
    # One more: a step is reported when it is complete. Ranks that wait for each other are no further apart.
    return min(1 << 62, furthest + ahead + 1)
