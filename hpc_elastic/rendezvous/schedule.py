"""The times of a participant: when it looks at the files and beats, and until when its workers may go on (its lease).

A metadata server takes some 10,000 operations a second, and a job should leave nearly all of them to others: the
intervals grow with the number of nodes, so that all together stay below `budget`. Where packets get through, each beat
carries the number of the newest record, and a silent coordinator is noticed within seconds.

The others go on without a node only after a silence of some seconds, so each beat renews its lease. An agent that stood
still (frozen, suspended, starved) has lost it, and reads the newest record past all caches before it renews it. A
filesystem that hangs ends no lease by itself: the beats need no file.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.spec import RendezvousSettings

logger = logging.getLogger(__name__)

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


LEASE_SHARE = 0.6
"""Part of the silence after which the others go on: for how long one beat renews the lease."""
LEASE_PATIENCE = 0.9
"""Part of the silence after which the next attempt goes on: a shorter one costs no grace."""
_LEASE_EXPIRED = 1
LEASE_OVER = -1
"""Written in place of the time of the last look: another round, or attempt, has taken the place of the workers'."""


def is_round_over(record: RoundRecord, *, round_index: int, uid: str, node: int, was_silent: bool) -> bool:
    """Others may train in place of the workers. `was_silent`: for so long that the next attempt may not have waited."""
    if record.status is Status.CLOSED:
        return was_silent
    if record.round == round_index:
        return record.member(uid) is None or node in record.lost
    # An open round waits for this node, whose workers have their grace; it begins without it only where it is lost.
    return node in record.lost or record.round > round_index + 1 or record.status is not Status.JOINABLE


class Lease:
    """One agent's lease. For any thread. Times are seconds of the clock that the workers read too (CLOCK_BOOTTIME)."""

    def __init__(self, clock: Clock, *, uid: str, node: int, questions: int = -1) -> None:
        """`questions` is the descriptor of a pipe: a byte asks for a look at the newest record; -1: nobody asks."""
        self._clock = clock
        self._uid, self._node = uid, node
        self._questions = questions
        self._lock = threading.RLock()
        self._seconds = self._patience = float("inf")
        self._round = -1
        self._record: RoundRecord | None = None
        self._write: Callable[[int, int], None] | None = None
        self._renewed_at = self._stepped_at = 0.0
        self._lapsed_at: float | None = None
        """When a gap was noticed after which no look has begun yet."""
        self._looked_at = 0.0
        self._is_asked = False
        self.is_over = False
        """The workers' round is over without this node: nothing that they write may arrive any more."""

    def fileno(self) -> int:
        """Readable when a worker asks for a look; -1: none can."""
        return self._questions

    def set_intervals(self, intervals: PollIntervals, *, has_beats: bool) -> None:
        self._patience = LEASE_PATIENCE * intervals.lease
        silence = min(intervals.lease, intervals.silence + intervals.answer) if has_beats else intervals.lease
        self._seconds = max(LEASE_SHARE * silence, 1.2 * intervals.beat)

    def begin(self, round_index: int, write: Callable[[int, int], None]) -> None:
        """A round's workers are about to start; `write` puts until when and the last look, nanoseconds, before them."""
        with self._lock:
            self._round, self._write, self.is_over = round_index, write, False
            self._judge(was_silent=False)
            self._show()

    def end(self) -> None:
        with self._lock:
            self._write = None

    def renew(self) -> bool:
        """Give a sign of life now. Returns whether a look is needed first."""
        with self._lock:
            self._notice_gap()
            self._renewed_at = self._clock.monotonic()
            self._show()
            return self._lapsed_at is not None

    def wants_look(self) -> bool:
        """Return whether the newest record is to be read now, past all caches. For the thread that reads it."""
        with self._lock:
            self._notice_gap()
            if self._questions >= 0:
                try:
                    self._is_asked |= bool(os.read(self._questions, 4096))
                except BlockingIOError:
                    pass
            return self._is_asked or self._lapsed_at is not None

    def note(self, record: RoundRecord) -> None:
        with self._lock:
            self._notice_gap()
            self._record = record
            self._judge(was_silent=self._clock.monotonic() - self._stepped_at > self._patience)

    def looked(self, began: float) -> None:
        """A look that `began` then has shown the record that was noted last."""
        with self._lock:
            self._notice_gap()
            self._is_asked, self._looked_at = False, began
            if self._lapsed_at is not None and began >= self._lapsed_at:
                self._lapsed_at = None
            self._show()

    def stepped(self, *, renews: bool) -> None:
        """All reads and writes of a step have worked; it `renews` where there are no beats."""
        self._stepped_at = self._clock.monotonic()
        if renews:
            self.renew()

    def _show(self) -> None:
        """Put the lease before the workers. One that is over shows no time that has not passed."""
        if self._write is not None and self._renewed_at:
            is_valid = self._lapsed_at is None and not self.is_over
            until_ns = int((self._renewed_at + self._seconds) * 1e9) if is_valid else _LEASE_EXPIRED
            self._write(until_ns, LEASE_OVER if self.is_over else int(self._looked_at * 1e9))

    def _notice_gap(self) -> None:
        now = self._clock.monotonic()
        if self._renewed_at and now - self._renewed_at > self._seconds:
            logger.warning(
                "this agent was silent for %.1f s: its workers wait until it has read the newest record",
                now - self._renewed_at,
            )
            self._renewed_at, self._lapsed_at = now, now
            self._show()

    def _judge(self, *, was_silent: bool) -> None:
        if self._record is None or self._write is None or self.is_over:
            return
        self.is_over = is_round_over(
            self._record, round_index=self._round, uid=self._uid, node=self._node, was_silent=was_silent
        )
        if self.is_over:
            logger.warning("round %d went on without this node: its workers are killed at once", self._round)
            self._show()
