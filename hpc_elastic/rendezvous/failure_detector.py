"""The failure detector of one participant: heartbeats in the files, beats on the network, and answers to a question.

All ages are of this process' own monotonic clock, and none counts while this process itself was held up.

A node whose beats arrive is not read: thousands of heartbeats are in nobody's budget. A node whose beats never arrived
is read now and then. A node that falls silent is read, asked, and read until it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hpc_elastic.clock import Clock
from hpc_elastic.rendezvous.packet_silence import PacketSilence
from hpc_elastic.rendezvous.poll_intervals import PollIntervals
from hpc_elastic.rendezvous.settings import RendezvousSettings
from hpc_elastic.store.base import Store
from hpc_elastic.store.lease import HeartbeatAges

logger = logging.getLogger(__name__)


class FailureDetector:
    """Judges which nodes live, are suspect, or are dead, as one participant sees them."""

    def __init__(self, store: Store, settings: RendezvousSettings, intervals: PollIntervals, clock: Clock) -> None:
        self._intervals = intervals
        self._longest_gap = max(4 * intervals.stride, settings.heartbeat_ttl / 2)
        self._clock = clock
        self._heartbeats = HeartbeatAges(store)
        self._packets = PacketSilence()
        self._next_look: dict[str, float] = {}
        self.mark = clock.monotonic()
        """When heartbeats were last looked at, in the clock's seconds: the moment that a decision is about."""
        self._listened = self.mark

    def begin_step(self) -> float:
        """All datagrams so far have been taken in: while the step blocks on a file, none are. Returns the time."""
        self._listened = self._clock.monotonic()
        return self._listened

    def heard(self, uids: Iterable[str], *, hears_us: bool | None = True) -> None:
        """Datagrams of these have come in; `hears_us`: what they say of this participant, None where they don't."""
        self._packets.heard(uids, self._clock.monotonic(), hears_us=hears_us)

    def is_connected(self, uid: str) -> bool:
        """Whether it and this participant hear each other, as far as they have told."""
        return self.hears(uid) and self._packets.hears_us(uid)

    def hears(self, uid: str) -> bool:
        """Whether this participant hears it."""
        silent = self.silence(uid)
        return silent is not None and silent <= self._intervals.silence

    def packets_dropped_for(self, seconds: float) -> None:
        """This host may have dropped the packets of the last `seconds`."""
        self._packets.packets_dropped_for(seconds, now=self._clock.monotonic())

    def asked(self, suspects: Iterable[str], now: float) -> None:
        """These are suspects in the log's newest record."""
        self._packets.asked(suspects, now)

    def links_lost(self, *, to_the_end: bool) -> list[tuple[str, float, float, bool]]:
        """Whose packets did not come through for a while: from when, for how many seconds, and whether that is over.

        Each once, when it is over; those that last where this is the end.
        """
        now = self._clock.monotonic()
        found = [(uid, since, until - since, True) for uid, since, until in self._packets.take_back()]
        if to_the_end:
            lasting = self._packets.out()
            self._packets.lost(lasting)
            found += [(uid, since, now - since, False) for uid, since in lasting.items()]
        return found

    def lost(self, uids: Iterable[str]) -> None:
        """These are lost to the run: their silence meant more than a lost link."""
        self._packets.lost(uids)

    def expect(self, uids: Iterable[str]) -> None:
        """These will send their beats to this participant from now on."""
        self._packets.expect(uids, self._clock.monotonic())

    def forget(self, uid: str) -> None:
        """What was heard of it counts no more: it has to be heard anew before its silence means anything."""
        self._packets.forget(uid)

    def look_at(self, uids: Iterable[str], *, closely: bool = False) -> float:
        """Read the heartbeats that are worth it.

        Args:
            uids: Whose.
            closely: All of them, now.

        Returns:
            Seconds for which this process was held up since it last did; nobody has aged for that. 0: it was not.
        """
        for uid in uids:
            now = self._clock.monotonic()
            if closely or self._worth_reading(uid, now):
                self._heartbeats.look(uid, now)
                self._next_look[uid] = now + self._intervals.reading
        now = self._clock.monotonic()
        gap = now - self.mark
        self.mark = now
        if gap <= self._longest_gap:
            return 0.0
        logger.warning("held up for %.1f s; nobody counts as lost for that", gap)
        self._heartbeats.paused_for(gap, now=now)
        self._packets.paused_for(gap, now=now)
        return gap

    def _worth_reading(self, uid: str, now: float) -> bool:
        if self._packets.asked_since(uid) is not None:
            return True
        if self.hears(uid):
            return False
        if self.is_silent(uid):
            return True  # what its cell says before it is asked
        return now >= self._next_look.setdefault(uid, now + self._intervals.first_reading)

    def unchanged(self, uid: str) -> float:
        """Seconds for which its heartbeat has looked the same."""
        return self._heartbeats.age(uid)

    def is_overdue(self, uid: str) -> bool:
        """Read its heartbeat: whether a beat to the files is overdue, and the time to see it over."""
        self.look_at([uid], closely=True)
        return self.unchanged(uid) > self._intervals.heartbeat + self._intervals.answer_unheard

    def silence(self, uid: str) -> float | None:
        """Seconds since it was heard, up to this step's begin; None where it was not, which says nothing."""
        return self._packets.silence(uid, self._listened)

    def last_sign(self, uid: str) -> float:
        """Seconds since its last sign of life, as far as this participant can tell.

        Who was in touch changes its heartbeat rarely: that says less than when it was last heard. (What was heard of
        somebody whose heartbeat changed later is forgotten by then.)
        """
        silent = self.silence(uid)
        return self.unchanged(uid) if silent is None else silent

    def is_silent(self, uid: str) -> bool:
        """Whether it was heard before, and is not any more."""
        silent = self.silence(uid)
        return silent is not None and silent > self._intervals.silence

    def is_dead(self, uid: str, *, patience: float = 0.0) -> bool:
        """No sign of life in its cell for the lease's time, nor on the network; or asked, and no answer in time.

        `patience`: seconds more than that.
        """
        silent = self.silence(uid)
        asked = self._packets.asked_since(uid)
        if asked is not None:
            # Who was in touch notices that it is not any more, and looks; who was not, only looks as often as it does.
            allowed = self._intervals.answer if self._packets.hears_us(uid) else self._intervals.answer_unheard
            if self._heartbeats.unchanged_from(uid, asked) > allowed + patience:
                return silent is None or silent >= self._intervals.silence
        age = self._heartbeats.age(uid)
        return (age if silent is None else min(age, silent)) > self._intervals.lease + patience

    def answered(self, suspects: Iterable[str]) -> frozenset[str]:
        """Those that have rewritten their heartbeat since they were asked, or are heard.

        Who is heard was silent when it was asked; or somebody else has asked, who does not hear it.
        """
        found = set()
        for uid in suspects:
            asked = self._packets.asked_since(uid)
            if asked is None:
                continue
            if self.hears(uid):
                found.add(uid)
            elif self._heartbeats.changed_since(uid, asked):
                found.add(uid)
                self._packets.answered(uid)
        return frozenset(found)
