"""A shared filesystem that refuses this process: with what, since when, and whether it refuses the others too."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hpc_elastic.light_dataclasses import dataclass
from hpc_elastic.store.base import StoreFullError

WORTH_TELLING = 1.0
"""Seconds from which on a refusal is an event: a stale handle passes sooner."""
ALONE_SECONDS = 10.0
"""For so long this process has to be refused, and a peer not, before the refusal is this node's own problem."""
_HEARD_SECONDS = 3.0
"""A peer's beat says so long how the filesystem treats the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One time of refusal, which lasts or has ended."""

    error: str
    """As the system calls the error: ``Permission denied``."""
    path: str
    """What was refused first."""
    since: float
    """Seconds, monotonic."""
    since_ns: int
    """The wall clock."""

    def __str__(self) -> str:
        return f"{self.error} ({self.path})" if self.path else self.error

    def fields(self, now: float, *, over: bool) -> dict[str, Any]:
        """Of the event ``filesystem_refused``."""
        return {
            "error": self.error,
            "path": self.path,
            "since_ns": self.since_ns,
            "seconds": round(now - self.since, 3),
            "over": over,
        }


class RefusalWatch:
    """What one participant knows of it. Times are seconds of its monotonic clock. `is_alone` is for any thread."""

    def __init__(self) -> None:
        self.now: Refusal | None = None
        """The refusal that lasts."""
        self._peers: frozenset[str] = frozenset()
        """The peers that said last that they are refused too."""
        self._peer_refused_at = float("-inf")
        self._peer_fine_at = float("-inf")

    def refused(self, error: Exception, now: float, now_ns: int) -> bool:
        """An access was refused. Returns whether that is the first one of its time."""
        if self.now is not None:
            return False
        cause = error.__cause__ if isinstance(error, StoreFullError) else error
        # Of a link's two names the second one is its own; the first is what it holds.
        path = getattr(cause, "filename2", None) or getattr(cause, "filename", None)
        text = getattr(cause, "strerror", None)
        if isinstance(path, bytes):
            path = path.decode("utf-8", "replace")
        where = str(path) if path else str(error.facts["root"]) if isinstance(error, StoreFullError) else ""
        self.now = Refusal(error=str(text or error), path=where, since=now, since_ns=now_ns)
        return True

    def answered(self) -> Refusal | None:
        """All accesses of a step worked. Returns the refusal that this ends."""
        ended, self.now = self.now, None
        return ended

    def heard(self, beats: Collection[str], refused: frozenset[str], now: float) -> bool:
        """Take in what peers' beats say.

        Args:
            beats: The peers that beat.
            refused: Those of them that are refused.
            now: The time.

        Returns:
            Whether a peer is refused that was not before: this process should find out how it fares itself.
        """
        if refused:
            self._peer_refused_at = now
        if len(refused) < len(beats):
            self._peer_fine_at = now
        news = bool(refused - self._peers)
        self._peers = (self._peers - frozenset(beats)) | refused
        return news

    def is_alone(self, now: float) -> bool:
        """Whether this process has been refused for a while, and its peers are not."""
        refusal = self.now
        if refusal is None or now - self._peer_fine_at > _HEARD_SECONDS:
            return False
        return now - max(refusal.since, self._peer_refused_at) >= ALONE_SECONDS
