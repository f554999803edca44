"""Who is alive: a counter that its owner changes, and observers that time the changes on their own clocks.

No time of one host is ever compared with another host's: the observer remembers since when, on its own monotonic
clock, it has seen the same value.
"""

from __future__ import annotations

import os

from hpc_elastic.light_dataclasses import dataclass
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


@dataclass(slots=True)
class _Seen:
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
