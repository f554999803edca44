"""Who is alive: a counter that its owner changes, and observers that time the changes on their own clocks.

No time of one host is ever compared with another host's: the observer remembers since when, on its own monotonic
clock, it has seen the same value.

When each node's packets came last, by this process' own clock; and which nodes were asked whether they live.

The failure detector of one participant: heartbeats in the files, beats on the network, and answers to a question.

All ages are of this process' own monotonic clock, and none counts while this process itself was held up.

A node whose beats arrive is not read: thousands of heartbeats are in nobody's budget. A node whose beats never arrived
is read now and then. A node that falls silent is read, asked, and read until it answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.schedule import PollIntervals
from hpc_elastic.store.base import Store

_FOLDER = "hb"
INVALIDATE_SECONDS = 1.0
"""The least time between two invalidations of the heartbeats' folder, made where a heartbeat is not found."""


class Heartbeat:
    """The owner's side: one cell, rewritten every `interval` seconds."""

    def __init__(self, store: Store, uid: str, *, interval: float, first: float | None = None) -> None:
        """Args:
        store: Where.
        uid: Whose.
        interval: Seconds; may be changed at any time.
        first: When the first change is due, on the clock of `beat_if_due`. None: at once.
        """
        self.interval = interval
        self._store = store
        self._key = f"{_FOLDER}/{uid}"
        self._first = first
        self._count = 0
        self._nonce = os.urandom(4).hex()
        self._renewed_at: float | None = None

    def beat_if_due(self, now: float) -> float:
        """Change the cell where its interval has passed.

        Args:
            now: Seconds, monotonic.

        Returns:
            Seconds until the next change is due.

        Raises:
            OSError: the filesystem refused; the lease keeps ageing until a later call succeeds.
        """
        due = self.due(now)
        if now < due:
            return due - now
        self.beat_now(now)
        return self.interval

    def due(self, now: float) -> float:
        """When the next change is."""
        if self._renewed_at is not None:
            return self._renewed_at + self.interval
        return now if self._first is None else self._first

    def beat_now(self, now: float) -> None:
        """Change the cell, due or not: somebody asked whether this participant lives.

        Raises:
            OSError: as `beat_if_due`.
        """
        self._store.overwrite(self._key, f"{self._count} {self._nonce}")
        self._count += 1
        self._renewed_at = now  # taken before the write: a slow write ages the lease

    def age(self, now: float) -> float:
        """Seconds since the last renewal began; infinite before the first."""
        return float("inf") if self._renewed_at is None else now - self._renewed_at


class _Seen(Struct):
    value: str | None
    since: float
    looked: float


class HeartbeatAges:
    """The observer's side: for how long each participant's heartbeat has looked the same to this process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, _Seen] = {}
        self._invalidated_at = float("-inf")

    def look(self, uid: str, now: float) -> None:
        """Read `uid`'s cell. Not having been able to is no evidence: the age starts anew.

        Args:
            uid: Whose.
            now: Taken before the read, which may block: what it shows is no younger.
        """
        try:
            value = self._store.version(f"{_FOLDER}/{uid}")
            if value is None and now >= self._invalidated_at + INVALIDATE_SECONDS:
                # A client may never find what it once did not find, where the folder's times are coarse.
                self._invalidated_at = now
                self._store.invalidate(_FOLDER)
                value = self._store.version(f"{_FOLDER}/{uid}")
        except OSError:
            self._seen.pop(uid, None)
            return
        seen = self._seen.get(uid)
        if seen is None or seen.value != value:
            self._seen[uid] = _Seen(value, now, now)
        else:
            seen.looked = now

    def age(self, uid: str) -> float:
        """For how many seconds `uid`'s cell had not changed when it was last looked at; 0 before a second look.

        Not up to now: what this process has not looked at, because it was held up, has not aged.
        """
        seen = self._seen.get(uid)
        return max(0.0, seen.looked - seen.since) if seen else 0.0

    def unchanged_from(self, uid: str, moment: float) -> float:
        """For how many seconds after `moment` of this process' clock `uid`'s cell was seen not to change; 0 where it
        did, or where it was not looked at since."""
        seen = self._seen.get(uid)
        return max(0.0, seen.looked - moment) if seen and seen.since <= moment else 0.0

    def changed_since(self, uid: str, moment: float) -> bool:
        """Whether a change of `uid`'s cell was first seen after `moment` of this process' clock."""
        seen = self._seen.get(uid)
        return seen is not None and seen.since > moment

    def paused_for(self, seconds: float, *, now: float) -> None:
        """This process itself was paused for so long (a frozen filesystem, SIGSTOP): no heartbeat aged meanwhile."""
        for seen in self._seen.values():
            seen.since = min(now, seen.since + seconds)

    def forget(self, uid: str) -> None:
        self._seen.pop(uid, None)


class PacketSilence:
    """Bookkeeping of one participant. Times are seconds of its monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._hears: dict[str, bool] = {}
        self._out: dict[str, float] = {}
        """Who answered through the files and is not heard: when it was heard last."""
        self._back: list[tuple[str, float, float]] = []

    def heard(self, uids: Iterable[str], now: float, *, hears_us: bool | None = True) -> None:
        """Args:
        uids: Whose datagrams came.
        now: When.
        hears_us: Whether they say that they hear this participant; None: they did not say.
        """
        for uid in uids:
            self._heard[uid] = now
            if (since := self._out.pop(uid, None)) is not None:
                self._back.append((uid, since, now))
            if hears_us is not None:
                self._hears[uid] = hears_us

    def hears_us(self, uid: str) -> bool:
        """Whether its last word was that it hears this participant."""
        return self._hears.get(uid, False)

    def expect(self, uids: Iterable[str], now: float) -> None:
        """Those that were not heard yet are to be heard from now on: from now on their silence means something."""
        for uid in uids:
            self._heard.setdefault(uid, now)

    def silence(self, uid: str, now: float) -> float | None:
        """Seconds since `uid` was heard; None where it was not heard at all, which says nothing."""
        at = self._heard.get(uid)
        return None if at is None else now - at

    def forget(self, uid: str) -> None:
        """It has to be heard again before its silence means anything: no packet of its comes through, and it lives."""
        self._heard.pop(uid, None)

    def asked(self, suspects: Iterable[str], now: float) -> None:
        """These are suspects now: remember since when, for those that were not before."""
        self._asked = {uid: self._asked.get(uid, now) for uid in suspects}

    def answered(self, uid: str) -> None:
        """It was asked, and has answered through the files: it lives, and no packet of its comes through."""
        if (at := self._heard.get(uid)) is not None:
            self._out.setdefault(uid, at)
        self.forget(uid)

    def take_back(self) -> list[tuple[str, float, float]]:
        """Whose packets come through again since the last call, from when to when they did not."""
        taken, self._back = self._back, []
        return taken

    def out(self) -> dict[str, float]:
        """Whose packets do not come through, though it lives: since when."""
        return dict(self._out)

    def lost(self, uids: Iterable[str]) -> None:
        """These are lost: their silence was no matter of packets."""
        for uid in uids:
            self._out.pop(uid, None)

    def asked_since(self, uid: str) -> float | None:
        return self._asked.get(uid)

    def packets_dropped_for(self, seconds: float, *, now: float) -> None:
        """This host may have dropped the packets of the last `seconds`: that time counts as silence of no node."""
        for uid in self._heard:
            self._heard[uid] = min(now, self._heard[uid] + seconds)

    def paused_for(self, seconds: float, *, now: float) -> None:
        """This process was paused for so long: that time counts as silence of no node, and for no answer."""
        for times in (self._heard, self._asked, self._out):
            for uid in times:
                times[uid] = min(now, times[uid] + seconds)


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
