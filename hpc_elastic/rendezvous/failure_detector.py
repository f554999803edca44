"""The signs of life that a participant gives, and its failure detector: which other nodes live, are suspect, or dead.

Each node sends a beat, a datagram, every second, and rewrites its heartbeat, a counter in the store, more rarely.

- A node that was heard before and is silent for `intervals.silence` seconds is a *suspect*: the coordinator writes its
  name into the log, and the node answers by rewriting its heartbeat at once.
- A suspect whose heartbeat has not changed `intervals.answer` seconds after the question is *dead*. One that answers
  lives: only its packets are lost, and it has to be heard again before its silence means anything.
- A node that was never heard, or for which the others wait (its beats come from a thread that uses no files: they are
  no answer), is dead when its heartbeat has not changed for `intervals.lease` seconds.

All ages are of this process' own monotonic clock, and none counts while this process was paused.

`StoreId` checks that the store that a participant beats to is still the one that it joined: a random name, given by its
first opener, that shows when the store was wiped or replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from collections import defaultdict
from collections.abc import Collection, Iterable

from msgspec import Struct

from hpc_elastic.base.clock import Clock, Staleness
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.rendezvous.schedule import PollIntervals
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import Store, StoreWipedError

logger = logging.getLogger(__name__)

HEARTBEATS = "hb"
"""The folder of the heartbeats' cells."""
INVALIDATE_SECONDS = 1.0
"""The least time between two invalidations of that folder, made where a heartbeat is not found."""


class HeartbeatAges(Staleness[str]):
    """Seconds for which each participant's heartbeat in the store has looked the same to this process."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._invalidated_at = float("-inf")

    def look(self, uid: str, now: float) -> None:
        key = f"{HEARTBEATS}/{uid}"
        try:
            value = self._store.version(key)
            if value is None and now >= self._invalidated_at + INVALIDATE_SECONDS:
                # A client may never find what it once did not find, where the folder's times are coarse.
                self._invalidated_at = now
                self._store.invalidate(HEARTBEATS)
                value = self._store.version(key)
        except OSError:
            self.forget(uid)
            return
        self.observe(uid, value, now)


class _Peer(Struct):
    heard_at: float | None = None
    """When its last packet came; None: its silence means nothing."""
    hears_us: bool = False
    asked_at: float | None = None
    """When it became a suspect."""
    cut_off_since: float | None = None
    """It has answered through the files and is not heard: when its last packet came."""
    read_due: float | None = None
    """When its heartbeat is to be read next, where it is not heard."""


class LostLink(Struct, frozen=True, kw_only=True):
    """Packets of a node that lived did not come through for a while."""

    uid: str
    since: float
    seconds: float
    over: bool


class FailureDetector:
    def __init__(self, store: Store, settings: RendezvousSettings, intervals: PollIntervals, clock: Clock) -> None:
        self._intervals = intervals
        self._longest_gap = max(4 * intervals.stride, settings.heartbeat_ttl / 2)
        self._clock = clock
        self._heartbeats = HeartbeatAges(store)
        self._peers: defaultdict[str, _Peer] = defaultdict(_Peer)
        self._suspects: frozenset[str] = frozenset()
        self._awaited: frozenset[str] = frozenset()
        self._waited = 0.0
        self._restored: list[LostLink] = []
        self.mark = clock.monotonic()
        """When heartbeats were last looked at: the moment that a decision is about."""
        self._listened = self.mark

    def begin_step(self) -> float:
        """All datagrams so far have been taken in: none are while the step blocks on a file."""
        self._listened = self._clock.monotonic()
        return self._listened

    def heard(self, uids: Iterable[str], *, hears_us: bool | None = True) -> None:
        """Take in datagrams of these; `hears_us`: what they say of this participant, None where they don't."""
        now = self._clock.monotonic()
        for uid in uids:
            peer = self._peers[uid]
            peer.heard_at = now
            if (since := peer.cut_off_since) is not None:
                self._restored.append(LostLink(uid=uid, since=since, seconds=now - since, over=True))
                peer.cut_off_since = None
            if hears_us is not None:
                peer.hears_us = hears_us

    def expect(self, uids: Iterable[str]) -> None:
        """Let the silence of these mean something from now on: they will send their beats to this participant."""
        now = self._clock.monotonic()
        for uid in uids:
            peer = self._peers[uid]
            peer.heard_at = now if peer.heard_at is None else peer.heard_at

    def forget(self, uid: str) -> None:
        """Let its silence mean nothing until it is heard again."""
        self._peers[uid].heard_at = None

    def silence(self, uid: str) -> float | None:
        """Seconds since it was heard, up to this step's begin; None where it was not, which says nothing."""
        peer = self._peers.get(uid)
        return None if peer is None or peer.heard_at is None else self._listened - peer.heard_at

    def hears(self, uid: str) -> bool:
        silent = self.silence(uid)
        return silent is not None and silent <= self._intervals.silence

    def is_silent(self, uid: str) -> bool:
        silent = self.silence(uid)
        return silent is not None and silent > self._intervals.silence

    def is_connected(self, uid: str) -> bool:
        """Return whether it and this participant hear each other, as far as they have said."""
        return self.hears(uid) and self._peers[uid].hears_us

    def packets_dropped_for(self, seconds: float) -> None:
        """This host may have dropped the packets of the last `seconds`: that time counts as silence of no node."""
        now = self._clock.monotonic()
        for peer in self._peers.values():
            if peer.heard_at is not None:
                peer.heard_at = min(now, peer.heard_at + seconds)

    def asked(self, suspects: Iterable[str], now: float) -> None:
        before, self._suspects = self._suspects, frozenset(suspects)
        for uid in before - self._suspects:
            self._peers[uid].asked_at = None
        for uid in self._suspects - before:
            self._peers[uid].asked_at = now

    def answered(self, suspects: Iterable[str]) -> frozenset[str]:
        """Those that have rewritten their heartbeat since they were asked, or are heard and not awaited.

        A node that is heard was silent when it was asked; or another participant asked, which does not hear it.
        """
        found = set()
        for uid in suspects:
            peer = self._peers[uid]
            if peer.asked_at is None:
                continue
            hears = self.hears(uid)
            changed = self._heartbeats.changed_since(uid, peer.asked_at)
            if changed or (hears and uid not in self._awaited):
                found.add(uid)
            if changed and not hears:
                self.has_cut_off(uid)
        return frozenset(found)

    def has_cut_off(self, uid: str) -> None:
        peer = self._peers[uid]
        if peer.cut_off_since is None:
            peer.cut_off_since = peer.heard_at
        peer.heard_at = None

    def cut_off(self) -> frozenset[str]:
        """Those that were heard once, live by the files, and are not heard."""
        return frozenset(uid for uid, peer in self._peers.items() if peer.cut_off_since is not None)

    def links_lost(self, *, to_the_end: bool) -> list[LostLink]:
        """Links that have come back, each once; `to_the_end`: those that are still lost too."""
        found, self._restored = self._restored, []
        if to_the_end:
            now = self._clock.monotonic()
            for uid, peer in self._peers.items():
                if (since := peer.cut_off_since) is not None:
                    found.append(LostLink(uid=uid, since=since, seconds=now - since, over=False))
                    peer.cut_off_since = None
        return found

    def lost(self, uids: Iterable[str]) -> None:
        """Forget the lost links of nodes that are lost to the run: their silence meant more."""
        for uid in uids:
            self._peers[uid].cut_off_since = None

    def look_at(self, uids: Iterable[str], *, closely: bool = False) -> float:
        """Read the heartbeats that are worth it; `closely`: all of them, now. Returns for how many seconds this process
        was paused since it last did; no node has aged for that."""
        for uid in uids:
            now = self._clock.monotonic()
            if closely or self._is_worth_reading(uid, now):
                self._heartbeats.look(uid, now)
                self._peers[uid].read_due = now + self._intervals.reading
        now = self._clock.monotonic()
        gap = now - self.mark
        self.mark = now
        if gap <= self._longest_gap:
            return 0.0
        logger.warning("this process was paused for %.1f s: no node counts as lost because of that", gap)
        self._heartbeats.paused_for(gap, now=now)
        self.packets_dropped_for(gap)
        for peer in self._peers.values():
            if peer.asked_at is not None:
                peer.asked_at = min(now, peer.asked_at + gap)
            if peer.cut_off_since is not None:
                peer.cut_off_since = min(now, peer.cut_off_since + gap)
        return gap

    def _is_worth_reading(self, uid: str, now: float) -> bool:
        peer = self._peers[uid]
        if peer.asked_at is not None:
            return True
        if self.hears(uid) and uid not in self._awaited:
            return False
        if self.is_silent(uid):
            return True  # what its cell says before it is asked
        if peer.read_due is None:
            peer.read_due = now + self._intervals.first_reading
        return now >= peer.read_due

    def unchanged(self, uid: str) -> float:
        return self._heartbeats.age(uid)

    def wait_for(self, uids: Iterable[str], *, waited: float) -> None:
        """The coordinator's round has waited for these members for so long. A common restart costs no reading."""
        self._awaited = frozenset(uids) if waited > self._intervals.silence else frozenset()
        self._waited = waited

    def stale(self) -> dict[str, float]:
        """The awaited nodes to ask though they are heard: uid → seconds for which the heartbeat has not changed.

        Half the lease passes first: most members end their workers in that time. Then it is half the time of the wait.
        """
        limit = max(self._intervals.lease, self._waited) / 2
        ages = {uid: self.unchanged(uid) for uid in self._awaited if self.hears(uid)}
        return {uid: age for uid, age in ages.items() if min(age, self._waited) >= limit}

    def overdue(self, uids: Collection[str], *, closely: bool = False) -> frozenset[str]:
        """Read their heartbeats. Returns those of which a change, and the time to see one, are overdue."""
        self.look_at(uids, closely=closely)
        limit = self._intervals.heartbeat + self._intervals.answer_unheard
        return frozenset(uid for uid in uids if self.unchanged(uid) > limit)

    def last_sign(self, uid: str) -> float:
        """Seconds since it was heard; else since its heartbeat changed, which that of a connected node does rarely."""
        silent = self.silence(uid)
        return self.unchanged(uid) if silent is None else silent

    def is_dead(self, uid: str, *, patience: float = 0.0) -> bool:
        """Its lease has passed without a sign of life, or it gave no answer in time; `patience`: seconds more."""
        silent = self.silence(uid)
        peer = self._peers[uid]
        if peer.asked_at is not None:
            # A node that was connected notices that it is not any more, and looks; another looks as rarely as ever.
            allowed = self._intervals.answer if peer.hears_us else self._intervals.answer_unheard
            unchanged = self._heartbeats.unchanged_from(uid, peer.asked_at)
            if uid in self._awaited and unchanged > self._intervals.lease + patience:
                return True
            if unchanged > allowed + patience:
                return silent is None or silent >= self._intervals.silence
        age = self._heartbeats.age(uid)
        return (age if silent is None else min(age, silent)) > self._intervals.lease + patience


_ID_KEY = "epoch/id"


class StoreId:
    def __init__(self, store: Store, run_id: str, *, patience: float) -> None:
        """`patience`: seconds for which the id may not be found: a stale handle reads the same for a while."""
        self._store = store
        self._run_id = run_id
        self._patience = patience
        self._id: str | None = None
        self._missing_since: float | None = None

    @property
    def is_known(self) -> bool:
        return self._id is not None

    def open(self) -> str:
        """The store's id, given now where it has none. OSError: it can't be read yet."""
        if self._id is None:
            self._store.put_if_absent(_ID_KEY, os.urandom(8).hex())
            self._id = self._store.get(_ID_KEY)
        if self._id is None:
            raise OSError(errno.EIO, "the store's epoch can't be read yet")
        return self._id

    def accept(self, found: str) -> None:
        """Take the id of a record; the first one is believed. StoreWipedError: it is another than before."""
        if self._id is None:
            self._id = found
        if found != self._id:
            raise self._wiped(found)

    def check(self, now: float) -> None:
        """Check that it is still the store of a known id. OSError: that can't be found, for the moment."""
        if self._id is None:
            return
        found = self._store.get(_ID_KEY)
        if found is not None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        if self._missing_since is not None and now - self._missing_since < self._patience:
            raise OSError(errno.ESTALE, "the store's epoch can't be found")
        if found != self._id:
            raise self._wiped(found)

    def _wiped(self, found: str | None) -> StoreWipedError:
        why = "has lost its epoch" if found is None else f"was replaced (its epoch is {found}, and was {self._id})"
        try:
            if (check := getattr(self._store, "check", None)) is not None:
                check()
        except FileNotFoundError:
            why = "was removed"
        except (OSError, UnsafePathError) as error:
            why = f"is not what it was ({error})"
        return StoreWipedError(root=str(getattr(self._store, "root", self._run_id)), why=why)


FEW_NODES = 64
"""Number of nodes that may make their heartbeats' cells when they start."""


class Heartbeat:
    """A participant's cell in the store, which it alone changes. Times are seconds of its monotonic clock."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._key = f"{HEARTBEATS}/{uid}"
        self._count = 0
        self._nonce = os.urandom(4).hex()  # two agents with one name never write the same
        self.beaten_at: float | None = None

    def beat(self, now: float) -> None:
        """Change the cell. `now` is taken before the write: a slow write, or a refused one, ages the lease."""
        self._store.overwrite(self._key, f"{self._count} {self._nonce}")
        self._count += 1
        self.beaten_at = now

    def age(self, now: float) -> float:
        return float("inf") if self.beaten_at is None else now - self.beaten_at


class HeartbeatSender(Heartbeat):
    def __init__(
        self,
        store: Store,
        uid: str,
        *,
        store_id: StoreId,
        settings: RendezvousSettings,
        intervals: PollIntervals,
        rng: random.Random,
        now: float,
    ) -> None:
        super().__init__(store, uid)
        # A node's first claim says that it lives: thousands of nodes need not write at the same moment. But the cell
        # should be there before a disk fills up, which lets one be changed, and none be made.
        few = settings.expected_nodes <= FEW_NODES
        self._first = now if few else now + rng.uniform(0.25, 1.0) * intervals.heartbeat
        self._interval = intervals.heartbeat
        self._uid = uid
        self._store_id = store_id
        self._settings = settings
        self._intervals = intervals
        self._answered_number = 0
        self._rechecks_store = False

    def recheck_store_id(self) -> None:
        """Have the next step check whether the store is still the one that was joined."""
        self._rechecks_store = True

    def recheck_if_asked(self, now: float) -> None:
        if self._rechecks_store and self._store_id.is_known:
            self._store_id.check(now)
            self._rechecks_store = False

    @property
    def due(self) -> float:
        return self._first if self.beaten_at is None else self.beaten_at + self._interval

    def is_fresh(self, now: float) -> bool:
        """Return whether nobody can think yet that this node is lost; a coordinator commits nothing without that."""
        return self.age(now) <= 0.6 * self._settings.heartbeat_ttl

    def beat_if_due(self, now: float, *, leads: bool, connected: bool, look_due: float) -> None:
        """Beat where that is due, or soon is and the files are looked at now anyway; `connected`: more rarely."""
        if leads:
            self._interval = self._settings.heartbeat_interval
        else:
            self._interval = self._intervals.heartbeat_connected if connected else self._intervals.heartbeat
        early = now >= look_due and self.due - now < self._intervals.early * self._interval
        if not (now >= self.due or early):
            return
        if leads:
            self._store_id.check(now)
        elif self.beaten_at is None:
            self._rechecks_store = True  # once, as soon as a record has named the store that it should be
        self.beat_to_files(now)

    def beat_to_files(self, now: float) -> None:
        """Beat at once; a store that is missing is doubted."""
        try:
            self.beat(now)
        except FileNotFoundError:
            self._rechecks_store = True  # for a moment, or for good
            raise

    def answer_if_asked(self, record: RoundRecord | None, now: float) -> bool:
        """Returns whether the record's author is to be notified. A supervisor that supersedes this attempt asks all
        nodes: it waits for those that answer."""
        if record is None or record.number <= self._answered_number:
            return False
        if self._uid not in record.suspects and record.outcome is not Outcome.SUPERSEDED:
            return False
        self.beat(now)
        self._answered_number = record.number
        return True
