"""A node's lease on its workers' round: until when they may take that round for the current one.

The others go on without a node only after a silence of some seconds, so each beat renews its lease. An agent that stood
still (frozen, suspended, starved) has lost it, and reads the newest record past all caches before it renews it. A
filesystem that hangs ends no lease by itself: the beats need no file.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from hpc_elastic.base.clock import Clock
from hpc_elastic.rendezvous.schedule import PollIntervals
from hpc_elastic.rendezvous.state import RoundRecord, Status

logger = logging.getLogger(__name__)

SHARE = 0.6
"""Part of the silence after which the others go on: for how long one beat renews the lease."""
PATIENCE = 0.9
"""Part of the silence after which the next attempt goes on: a shorter one costs no grace."""
_EXPIRED = 1
OVER = -1
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
        self._patience = PATIENCE * intervals.lease
        silence = min(intervals.lease, intervals.silence + intervals.answer) if has_beats else intervals.lease
        self._seconds = max(SHARE * silence, 1.2 * intervals.beat)

    def begin(self, round_index: int, write: Callable[[int, int], None]) -> None:
        """A round's workers are about to start; `write` puts until when and the last look, nanoseconds, before them."""
        with self._lock:
            self._round, self._write, self.is_over = round_index, write, False
            self._judge(was_silent=False)
            self.show()

    def end(self) -> None:
        with self._lock:
            self._write = None

    def renew(self) -> bool:
        """Give a sign of life now. Returns whether a look is needed first."""
        with self._lock:
            self._notice_gap()
            self._renewed_at = self._clock.monotonic()
            self.show()
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
            self.show()

    def stepped(self, *, renews: bool) -> None:
        """All reads and writes of a step have worked; it `renews` where there are no beats."""
        self._stepped_at = self._clock.monotonic()
        if renews:
            self.renew()

    def show(self) -> None:
        """Put the lease before the workers. One that is over shows no time that has not passed."""
        if self._write is not None and self._renewed_at:
            is_valid = self._lapsed_at is None and not self.is_over
            until_ns = int((self._renewed_at + self._seconds) * 1e9) if is_valid else _EXPIRED
            self._write(until_ns, OVER if self.is_over else int(self._looked_at * 1e9))

    def _notice_gap(self) -> None:
        now = self._clock.monotonic()
        if self._renewed_at and now - self._renewed_at > self._seconds:
            logger.warning(
                "this agent was silent for %.1f s: its workers wait until it has read the newest record",
                now - self._renewed_at,
            )
            self._renewed_at, self._lapsed_at = now, now
            self.show()

    def _judge(self, *, was_silent: bool) -> None:
        if self._record is None or self._write is None or self.is_over:
            return
        self.is_over = is_round_over(
            self._record, round_index=self._round, uid=self._uid, node=self._node, was_silent=was_silent
        )
        if self.is_over:
            logger.warning("round %d went on without this node: its workers are killed at once", self._round)
            self.show()
