"""Times at which a participant looks at the files and beats.

A metadata server takes some 10,000 operations a second, and a job should leave nearly all of them to others: the
intervals grow with the number of nodes, so that all together stay below `budget`. Where packets get through, each beat
carries the number of the newest record, and a silent coordinator is noticed within seconds.
"""

from __future__ import annotations

import random

from msgspec import Struct

from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.state import RoundRecord, Status

OPERATIONS_PER_PERIOD = 12.5
"""One look at the log and one heartbeat: asking for the attributes of six folders and a file, and a write; and a little
for the coordinator."""
WITHOUT_PACKETS = 1.3
"""Factor for that where the coordinator has to read the heartbeats too."""
BEATS_PER_SECOND = 2048.0
"""Datagrams that one coordinator takes in."""
FEW_NODES = 16
"""Up to so many, heartbeats are read at once; of more nodes, a claim is sign of life enough for a while."""
LOOK_AT_ONCE = 64
"""Up to so many nodes look for the first record at once; more of them wait for the notification."""


class PollIntervals(Struct, frozen=True, kw_only=True):
    """Seconds between two looks, heartbeats and answers."""

    poll: float
    """Looks at the log, where no packets come."""
    poll_connected: float
    poll_in_round: float
    """The first interval after a new record, where no packets come; it grows to `poll`."""
    poll_anxious: float
    """Looks while this node has just lost touch: it may be asked whether it lives."""
    anxious: float
    """Duration of that."""
    first_look: float
    """Time after its first claim in which a node waits for the notification before it looks."""
    coordinator: float
    """The least time between two looks of the coordinator at the claims."""
    gathering: float
    """The coordinator's looks while nodes gather or confirm."""
    ending: float
    """A factor: how many times as rarely as in a small run these nodes look for the process that finishes the run."""
    heartbeat: float
    heartbeat_connected: float
    early: float
    """Part of its interval in which a due heartbeat is written with a look: the folders above are asked for only once
    then."""
    first_reading: float
    """Time from the first claim of a node that is not heard until its heartbeat is read; then …"""
    reading: float
    """… the time between two readings."""
    lease: float
    """Time without a sign of life after which a member counts as lost."""
    beat: float
    """Datagrams that say "alive"."""
    silence: float
    """Time without one after which a node that was heard before is asked through the files."""
    answer: float
    """Time for the answer of a node that was in touch …"""
    answer_unheard: float
    """… and that of a node that was not, and looks as rarely as ever."""
    stride: float
    """The longest time between two steps, of which most do nothing."""


def poll_intervals(settings: RendezvousSettings) -> PollIntervals:
    """The intervals for a run of `settings.expected_nodes` nodes. None is shorter than the settings say."""
    nodes = max(1, settings.expected_nodes)
    period = OPERATIONS_PER_PERIOD * nodes / budget(nodes, settings.operations_per_second)
    hop = nodes / BEATS_PER_SECOND
    beat = max(settings.beat_interval, hop)
    silence = max(settings.beat_silence, 3 * beat)
    poll = max(settings.poll_interval, WITHOUT_PACKETS * period)
    poll_connected = max(2 * settings.poll_interval, period)
    anxious = max(settings.poll_interval, hop)
    stride = max(settings.poll_interval, hop)
    # Who is in touch hears within a beat that it is not heard any more, notices that within a stride, and looks.
    answer = max(settings.suspect_answer, beat + stride + 2 * anxious)
    heartbeat = max(settings.heartbeat_interval, WITHOUT_PACKETS * period)
    few = nodes <= FEW_NODES
    return PollIntervals(
        poll=poll,
        poll_connected=poll_connected,
        poll_in_round=min(poll, max(settings.poll_interval, nodes / 200)),
        poll_anxious=anxious,
        anxious=max(30.0, 4 * answer),
        first_look=0.0 if nodes <= LOOK_AT_ONCE else max(0.5, nodes / 400),
        coordinator=0.0 if nodes <= LOOK_AT_ONCE else nodes / 40_000,
        gathering=min(max(0.25, nodes / 16_000), settings.poll_interval),
        ending=max(1.0, nodes / 64),
        heartbeat=heartbeat,
        heartbeat_connected=max(settings.heartbeat_interval, period, 30.0),
        early=0.4 if period > settings.heartbeat_interval else 0.0,
        first_reading=0.0 if few else heartbeat,
        reading=settings.heartbeat_interval / 4 if few else heartbeat,
        lease=max(settings.heartbeat_ttl, 3 * heartbeat if heartbeat > settings.heartbeat_interval else 0.0),
        beat=beat,
        silence=silence,
        answer=answer,
        answer_unheard=max(answer, 1.2 * max(poll, poll_connected) + 2 * anxious),
        stride=stride,
    )


def budget(nodes: int, operations_per_second: float) -> float:
    """Operations a second for all nodes' looks and heartbeats: up to some thousand nodes nine tenths of the setting."""
    return 0.9 * operations_per_second * max(1.0, nodes / 17 / 150)


EARLY = 0.1
"""Actions that are due within this part of the longest wait are done at once: the coordination thread wakes up with a
beat that comes a little before, and should not have to wake up once more."""
CALM_SECONDS = 2.0
"""The longest time between two looks at the files of a coordinator that is in touch with all members: they notify it of
what they claim."""


class Schedule:
    """One participant's next looks, on its monotonic clock."""

    def __init__(self, intervals: PollIntervals, rng: random.Random, now: float) -> None:
        self._intervals = intervals
        self._early = EARLY * intervals.stride
        self._idle_stride = max(intervals.stride, min(2 * intervals.stride, CALM_SECONDS))
        self._is_idle = False
        """The next looks are due so late because all was idle."""
        self._rng = rng
        self._looked_at = now
        self.look_due = now
        """When the log is to be looked at without a notification."""
        self._interval = 0.02
        self._connected = False
        self._touched_at = float("-inf")
        self._surveyed_at = float("-inf")
        self._survey_due = now

    @property
    def is_idle_allowed(self) -> bool:
        """Return whether a coordinator would look more rarely while all is idle than else."""
        return self._idle_stride > self._intervals.stride

    def update(self, *, idle: bool) -> None:
        """Let a coordinator look as often as ever where it is idle no more (a node falls silent, say)."""
        if self._is_idle and not idle:
            self._is_idle = False
            self.look_due = min(self.look_due, self._looked_at + self._intervals.stride)
            self._survey_due = min(self._survey_due, self._surveyed_at + self._intervals.stride)

    def look_now(self, now: float, *, notified: bool, connected: bool) -> bool:
        """Return whether to look at the log, for which the next time is set then."""
        if connected:
            self._touched_at = now
        elif self._connected:  # lost: the answer to a question may be due
            self.look_due = min(self.look_due, now + self._spread(self._intervals.poll_anxious))
        self._connected = connected
        if not notified and now < self.look_due - self._early:
            return False
        self._looked_at = now
        self._interval = min(self._interval * 2, self._intervals.poll)
        self.look_due = float("inf")  # until `wait` has seen what came of it
        return True

    def survey_now(self, now: float, *, notified: bool) -> bool:
        if now < self._surveyed_at + self._intervals.coordinator:
            if notified:
                self._survey_due = min(self._survey_due, self._surveyed_at + self._intervals.coordinator)
            return False
        if not notified and now < self._survey_due - self._early:
            return False
        self._surveyed_at = now
        self._survey_due = float("inf")
        return True

    def look_later(self, now: float) -> None:
        """Look not before a notification should have come."""
        self.look_due = now + self._rng.uniform(0.5, 1.0) * self._intervals.first_look

    def new_record(self) -> None:
        self._interval = self._intervals.poll_in_round

    def hurry(self, now: float) -> None:
        """Look at once: something was committed, or lost to another, and more may be due."""
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
        ending: float | None = None,
        idle: bool = False,
    ) -> float:
        """Seconds until the next step; `ending`: between two looks for what is waited for after the close."""
        self._is_idle = idle
        if self.look_due == float("inf"):
            self.look_due = self._looked_at + self._spread(self._until_look(now, leads, connected, ending))
        due = self.look_due
        if leads and record is not None and record.status is not Status.CLOSED:
            if self._survey_due == float("inf"):
                gathers = record.status in (Status.JOINABLE, Status.FROZEN)
                self._survey_due = self._surveyed_at + (self._intervals.gathering if gathers else self._stride)
            due = min(due, max(self._survey_due, self._surveyed_at + self._intervals.coordinator))
        return min(self._intervals.stride, max(0.0, due - now))

    def _until_look(self, now: float, leads: bool, connected: bool, ending: float | None) -> float:
        if ending is not None:
            return ending
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
        return seconds * self._rng.uniform(0.85, 1.15)  # nodes that looked at one moment should not do it again
