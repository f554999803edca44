"""One participant's signs of life in the store: its heartbeat, and the answer when it is asked whether it lives.

`StoreId` checks that the store that it beats to is still the one that it joined: a random name, given by its first
opener, that shows when the store was wiped or replaced.
"""

from __future__ import annotations

import errno
import os
import random

from hpc_elastic.errors import UnsafePathError
from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.failure_detector import HEARTBEATS
from hpc_elastic.rendezvous.schedule import PollIntervals
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import Store, StoreWipedError

_KEY = "epoch/id"


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
            self._store.put_if_absent(_KEY, os.urandom(8).hex())
            self._id = self._store.get(_KEY)
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
        found = self._store.get(_KEY)
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


class HeartbeatSender:
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
        # A node's first claim says that it lives: thousands of nodes need not write at the same moment. But the cell
        # should be there before a disk fills up, which lets one be changed, and none be made.
        few = settings.expected_nodes <= FEW_NODES
        self._first = now if few else now + rng.uniform(0.25, 1.0) * intervals.heartbeat
        self._interval = intervals.heartbeat
        self._uid = uid
        self._heartbeat = Heartbeat(store, uid)
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
        beaten_at = self._heartbeat.beaten_at
        return self._first if beaten_at is None else beaten_at + self._interval

    def is_fresh(self, now: float) -> bool:
        """Return whether nobody can think yet that this node is lost; a coordinator commits nothing without that."""
        return self._heartbeat.age(now) <= 0.6 * self._settings.heartbeat_ttl

    def beat(self, now: float) -> None:
        self._heartbeat.beat(now)

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
        elif self._heartbeat.beaten_at is None:
            self._rechecks_store = True  # once, as soon as a record has named the store that it should be
        self.beat_to_files(now)

    def beat_to_files(self, now: float) -> None:
        """Beat at once; a store that is missing is doubted."""
        try:
            self._heartbeat.beat(now)
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
        self._heartbeat.beat(now)
        self._answered_number = record.number
        return True
