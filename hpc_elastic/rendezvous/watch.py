"""When a participant looks at the files by itself: at the log, and as coordinator at the claims."""

from __future__ import annotations

import random

from hpc_elastic.rendezvous.ending import Ending
from hpc_elastic.rendezvous.poll_intervals import PollIntervals
from hpc_elastic.rendezvous.state import RoundRecord, Status

_FIRST = 0.02
_GROWTH = 2.0
_SPREAD = 0.15
"""Many nodes that looked at the same moment should not do it again."""
EARLY = 0.1
"""What is due within this part of the longest wait is done at once: the coordination thread wakes up with a beat that
comes a little before, and should not have to wake up once more."""
CALM_SECONDS = 2.0
"""At most so rarely a coordinator looks at the files that hears all who take part, and they it: what they claim, they
ring about."""


class Watch:
    """One participant's next looks, on its monotonic clock."""

    def __init__(self, intervals: PollIntervals, rng: random.Random, now: float, *, observes: bool) -> None:
        self._intervals = intervals
        self._early = EARLY * intervals.stride
        self._idle_stride = max(intervals.stride, min(2 * intervals.stride, CALM_SECONDS))
        self._is_idle = False
        """Whether the next looks are due so late because all was idle."""
        self._rng = rng
        self._observes = observes
        self._looked_at = now
        self.look_due = now
        """When the log is to be looked at without a ring."""
        self._interval = _FIRST
        self._connected = False
        self._touched_at = float("-inf")
        self._surveyed_at = float("-inf")
        self._survey_due = now

    @property
    def may_rest(self) -> bool:
        """Whether a coordinator would look more rarely while all is idle than else."""
        return self._idle_stride > self._intervals.stride

    def update(self, *, idle: bool) -> None:
        """Where it is idle no more (a node falls silent, say) a coordinator looks as often as ever."""
        if self._is_idle and not idle:
            self._is_idle = False
            self.look_due = min(self.look_due, self._looked_at + self._intervals.stride)
            self._survey_due = min(self._survey_due, self._surveyed_at + self._intervals.stride)

    def look_now(self, now: float, *, rung: bool, connected: bool) -> bool:
        """Whether to look at the log, for which the next time is set then."""
        if connected:
            self._touched_at = now
        elif self._connected:  # lost: the answer to a question may be due
            self.look_due = min(self.look_due, now + self._spread(self._intervals.poll_anxious))
        self._connected = connected
        if not rung and now < self.look_due - self._early:
            return False
        self._looked_at = now
        self._interval = min(self._interval * _GROWTH, self._intervals.poll)
        self.look_due = float("inf")  # until `wait` has seen what came of it
        return True

    def survey_now(self, now: float, *, rung: bool) -> bool:
        """Whether to look at the claims, as coordinator."""
        if now < self._surveyed_at + self._intervals.coordinator:
            if rung:
                self._survey_due = min(self._survey_due, self._surveyed_at + self._intervals.coordinator)
            return False
        if not rung and now < self._survey_due - self._early:
            return False
        self._surveyed_at = now
        self._survey_due = float("inf")
        return True

    def look_later(self, now: float) -> None:
        """Not before a ring should have come."""
        self.look_due = now + self._rng.uniform(0.5, 1.0) * self._intervals.first_look

    def new_record(self, now: float) -> None:
        """Things are moving."""
        self._interval = self._intervals.poll_in_round

    def hurry(self, now: float) -> None:
        """Something was committed, or lost to another: more may be to be done at once."""
        self._survey_due = now
        if self.look_due == float("inf"):
            self.look_due = now

    def wait(
        self,
        now: float,
        record: RoundRecord | None,
        *,
        leads: bool,
        connected: bool,
        ending: Ending | None,
        idle: bool = False,
    ) -> float:
        """Seconds until the next step.

        Args:
            now: Seconds.
            record: The newest.
            leads: Whether this node coordinates.
            connected: Whether it and the coordinator hear each other.
            ending: Where the run is closed: what there is to be waited for.
            idle: Whether it coordinates a round that runs, and hears all who take part, and they it.
        """
        self._is_idle = idle
        if self.look_due == float("inf"):
            self.look_due = self._looked_at + self._spread(self._until_look(now, record, leads, connected, ending))
        due = self.look_due
        if leads and ending is None:
            if self._survey_due == float("inf"):
                assert record is not None
                gathers = record.status in (Status.JOINABLE, Status.FROZEN)
                self._survey_due = self._surveyed_at + (self._intervals.gathering if gathers else self._stride)
            due = min(due, max(self._survey_due, self._surveyed_at + self._intervals.coordinator))
        return min(self._intervals.stride, max(0.0, due - now))

    def _until_look(
        self, now: float, record: RoundRecord | None, leads: bool, connected: bool, ending: Ending | None
    ) -> float:
        if ending is not None and self._observes:
            return self._intervals.stride if ending.all_departed else 0.1 * self._intervals.ending
        if ending is not None and ending.awaits:
            return 0.05 * self._intervals.ending
        if leads:
            return self._stride
        if connected:
            return self._intervals.poll_connected
        if now - self._touched_at < self._intervals.anxious:
            return self._intervals.poll_anxious
        return self._interval

    @property
    def _stride(self) -> float:
        return self._idle_stride if self._is_idle else self._intervals.stride

    def _spread(self, seconds: float) -> float:
        if self._intervals.ending <= 1.0:
            return seconds
        return seconds * self._rng.uniform(1.0 - _SPREAD, 1.0 + _SPREAD)
