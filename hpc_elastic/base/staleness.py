"""How long something has looked the same, by the observer's own monotonic clock.

The one way in which this package finds that something is gone; no time of another host is read. Time in which the
observer itself was paused (SIGSTOP, a filesystem that hung) does not count: it saw nothing then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Seen:
    """Not a `Struct`: the in-process wrapper runs where msgspec is not installed."""

    __slots__ = ("looked", "since", "value")

    def __init__(self, value: object, now: float) -> None:
        self.value = value
        self.since = now
        self.looked = now


class Staleness(Generic[K]):
    """The age of the last change of each of several observed values. Times are seconds of one monotonic clock."""

    def __init__(self, *, longest_gap: float = float("inf")) -> None:
        """`longest_gap`: a longer time between two observations is a pause of the observer, in which nothing aged."""
        self._longest_gap = longest_gap
        self._seen: dict[K, _Seen] = {}
        self._observed_at: float | None = None

    def observe(self, key: K, value: object, now: float) -> float:
        """Record the value of `key`; `now` was taken before it was read: a slow read does not make it younger.

        Returns its age: seconds for which it has looked the same; 0 at the first observation and after a change.
        """
        self._note_gap(now)
        seen = self._seen.get(key)
        if seen is None or seen.value != value:
            self._seen[key] = _Seen(value, now)
            return 0.0
        seen.looked = now
        return max(0.0, now - seen.since)

    def observe_all(self, values: Mapping[K, object], now: float) -> dict[K, float]:
        self._note_gap(now)
        for key in self._seen.keys() - values.keys():
            del self._seen[key]
        return {key: self.observe(key, value, now) for key, value in values.items()}

    def age(self, key: K) -> float:
        """Seconds for which `key` had not changed when it was last observed; it does not age unobserved."""
        seen = self._seen.get(key)
        return max(0.0, seen.looked - seen.since) if seen else 0.0

    def unchanged_from(self, key: K, moment: float) -> float:
        """Seconds after `moment` for which it was seen not to change; 0: it changed, or was not observed since."""
        seen = self._seen.get(key)
        return max(0.0, seen.looked - moment) if seen and seen.since <= moment else 0.0

    def changed_since(self, key: K, moment: float) -> bool:
        seen = self._seen.get(key)
        return seen is not None and seen.since > moment

    def paused_for(self, seconds: float, *, now: float) -> None:
        for seen in self._seen.values():
            seen.since = min(now, seen.since + seconds)

    def forget(self, key: K) -> None:
        """Reset its age: it could not be observed, which is no evidence."""
        self._seen.pop(key, None)

    def _note_gap(self, now: float) -> None:
        if self._observed_at is not None and now - self._observed_at > self._longest_gap:
            self.paused_for(now - self._observed_at, now=now)
        self._observed_at = now
