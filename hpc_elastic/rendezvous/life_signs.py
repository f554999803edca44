"""Who lives, as one participant sees it: heartbeats in the files, beats on the network, and answers to a question.

All ages are of this process' own monotonic clock, and none counts while this process itself was held up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hpc_elastic.clock import Clock
from hpc_elastic.rendezvous.hearing import Hearing
from hpc_elastic.rendezvous.settings import RendezvousSettings
from hpc_elastic.store.base import Store
from hpc_elastic.store.lease import Liveness

logger = logging.getLogger(__name__)


class LifeSigns:
    """One participant's view of the others' lives."""

    def __init__(self, store: Store, settings: RendezvousSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._liveness = Liveness(store)
        self._hearing = Hearing()
        self.mark = clock.monotonic()
        """When heartbeats were last read, in the clock's seconds: the moment that a decision is about."""
        self._listened = self.mark

    def begin_step(self) -> float:
        """All datagrams so far have been taken in: while the step blocks on a file, none are. Returns the time."""
        self._listened = self._clock.monotonic()
        return self._listened

    def heard(self, uids: Iterable[str]) -> None:
        """Datagrams of these have come in."""
        self._hearing.heard(uids, self._clock.monotonic())

    def was_deaf(self, seconds: float) -> None:
        """For so long nobody could be heard."""
        self._hearing.was_deaf(seconds, now=self._clock.monotonic())

    def asked(self, suspects: Iterable[str], now: float) -> None:
        """These are suspects in the log's newest record."""
        self._hearing.asked(suspects, now)

    def forget(self, uid: str) -> None:
        """What was heard of it counts no more: it has to be heard anew before its silence means anything."""
        self._hearing.forget(uid)

    def look_at(self, uids: Iterable[str]) -> float:
        """Read heartbeats.

        Returns:
            Seconds for which this process was held up since it last did; nobody has aged for that. 0: it was not.
        """
        for uid in uids:
            self._liveness.look(uid, self._clock.monotonic())
        now = self._clock.monotonic()
        gap = now - self.mark
        self.mark = now
        if gap <= max(4 * self._settings.poll_interval, self._settings.heartbeat_ttl / 2):
            return 0.0
        logger.warning("held up for %.1f s; nobody counts as lost for that", gap)
        self._liveness.forgive(gap, now=now)
        self._hearing.forgive(gap, now=now)
        return gap

    def unchanged(self, uid: str) -> float:
        """Seconds for which its heartbeat has looked the same."""
        return self._liveness.age(uid)

    def silence(self, uid: str) -> float | None:
        """Seconds since it was heard, up to this step's begin; None where it was not, which says nothing."""
        return self._hearing.silence(uid, self._listened)

    def is_silent(self, uid: str) -> bool:
        """Whether it was heard before, and is not any more."""
        silent = self.silence(uid)
        return silent is not None and silent > self._settings.beat_silence

    def is_dead(self, uid: str) -> bool:
        """No sign of life in its cell for the lease's time, nor on the network; or asked, and no answer in time."""
        silent = self.silence(uid)
        asked = self._hearing.asked_since(uid)
        if asked is not None and self._liveness.unchanged_from(uid, asked) > self._settings.suspect_answer:
            return silent is None or silent >= self._settings.beat_silence
        age = self._liveness.age(uid)
        return (age if silent is None else min(age, silent)) > self._settings.heartbeat_ttl

    def answered(self, suspects: Iterable[str]) -> frozenset[str]:
        """Those that have rewritten their heartbeat since they were asked, or were heard again."""
        found = set()
        for uid in suspects:
            asked = self._hearing.asked_since(uid)
            silent = self.silence(uid)
            if asked is None:
                continue
            if silent is not None and self._listened - silent > asked:
                found.add(uid)
            elif self._liveness.changed_since(uid, asked):
                found.add(uid)
                self._hearing.forget(uid)
        return frozenset(found)
