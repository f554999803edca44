"""Who is dead by its silence: what a monitor process makes of its neighbours' heartbeats. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class HeartbeatWatch:
    """Which of the next ranks in the ring are dead, by counters and the observer's own monotonic clock.

    One rank is watched; when it has been silent for half the time, all others are, too: a node's ranks die together.
    """

    def __init__(self, *, rank: int, count: int, timeout: float) -> None:
        """Args:
        rank, count: This rank, and how many there are.
        timeout: Seconds of silence after which a rank is dead.
        """
        self._ring = [(rank + step) % count for step in range(1, count)]
        self._timeout = timeout
        self._last: dict[int, tuple[int, float]] = {}
        self._dead: set[int] = set()
        self._is_suspicious = False

    @property
    def watched(self) -> list[int]:
        """Whose counters to read now."""
        left = [rank for rank in self._ring if rank not in self._dead]
        return left if self._is_suspicious else left[:1]

    def look(self, counts: Mapping[int, int], now: float) -> list[int]:
        """The ranks that are dead since the last look.

        Args:
            counts: Of those `watched`.
            now: Monotonic seconds.
        """
        silent = {}
        for rank, count in counts.items():
            before = self._last.get(rank)
            if before is None or before[0] != count:
                self._last[rank] = (count, now)
            silent[rank] = now - self._last[rank][1]
        found = sorted(rank for rank, seconds in silent.items() if seconds >= self._timeout)
        self._dead.update(found)
        self._is_suspicious = any(seconds >= self._timeout / 2 for seconds in silent.values())
        return found
