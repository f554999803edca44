"""What of the workers' output was lost, whose, and why: told once per episode, not once per line.

An episode begins with the first byte that a file does not get, which is said at once, and ends when nothing has been
lost for `QUIET_S`; then it is summed up. What the job log could not keep up with is told of there in its place, by
`job_log`; here it is counted for the event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.output.job_log import JobLogSource

QUIET_S = 10.0
LONGEST_EPISODE_S = 600.0
"""After so long what was lost so far is told, though it goes on."""
_NAMED = 8
"""Streams that a line names."""


class StreamLoss(Struct, frozen=True, kw_only=True):
    """What was lost of one stream in an episode, in bytes of what the worker printed."""

    rank: int
    stream: str
    """``stdout`` or ``stderr``."""
    path: Path
    not_in_file: int
    not_in_job_log: int


class LossEpisode(Struct, frozen=True, kw_only=True):
    """What was lost on this node from one quiet time to the next."""

    reason: str
    """Why files did not get it; empty where they did and the job log alone could not keep up."""
    streams: tuple[StreamLoss, ...]
    """The largest losses first."""

    @property
    def not_in_files(self) -> int:
        return sum(one.not_in_file for one in self.streams)

    @property
    def not_in_job_log(self) -> int:
        return sum(one.not_in_job_log for one in self.streams)

    def describe(self) -> str:
        """What files lack, in one line."""
        lacking = [one for one in self.streams if one.not_in_file]
        named = ", ".join(f"rank {one.rank} {one.stream} {one.not_in_file}" for one in lacking[:_NAMED])
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.not_in_files} bytes of the workers' output are not in their files: {named}{more}{why}"


class StreamAccount:
    """One stream's losses that no episode has told of yet. Only its `LossBook` changes it."""

    __slots__ = ("has_ended", "lost", "path", "rank", "seen_dropped", "source", "stream")

    def __init__(self, *, rank: int, stream: str, path: Path, source: JobLogSource | None) -> None:
        self.rank = rank
        self.stream = stream
        self.path = path
        self.source = source
        self.lost = 0
        self.seen_dropped = 0
        self.has_ended = False

    def take(self) -> StreamLoss | None:
        dropped = self.source.dropped - self.seen_dropped if self.source is not None else 0
        if not (self.lost or dropped):
            return None
        loss = StreamLoss(
            rank=self.rank, stream=self.stream, path=self.path, not_in_file=self.lost, not_in_job_log=dropped
        )
        self.seen_dropped += dropped
        self.lost = 0
        return loss


class LossBook:
    """All accounts of a node. Any thread may call it; none waits for another that writes."""

    def __init__(self, *, clock: Clock, say: Callable[[str], None]) -> None:
        """Args:
        clock: For what is quiet and what is long.
        say: Writes a line to the job log, without waiting.
        """
        self._clock = clock
        self._say = say
        self._lock = threading.Lock()
        self._accounts: set[StreamAccount] = set()
        self._began: float | None = None
        self._changed_at = 0.0
        self._total = 0
        """By when it was looked at last."""
        self._lost = 0
        self._reason = ""

    def open(self, account: StreamAccount) -> StreamAccount:
        """Keep `account`, until it was ended and told of."""
        with self._lock:
            self._accounts.add(account)
        return account

    def end(self, account: StreamAccount) -> None:
        """Nothing more will be lost of it, but by the job log what waits there."""
        with self._lock:
            account.has_ended = True
            self._forget()

    def lose(self, account: StreamAccount, count: int, reason: str) -> None:
        """`count` bytes will not be in its file."""
        with self._lock:
            account.lost += count
            self._accounts.add(account)
            self._lost += count
            is_first = not self._reason
            self._reason = self._reason or reason
        if is_first:
            self._say(
                f"{account.path}: {reason}; the workers run on, and what they print is lost until it can be written"
                " again"
            )

    def settle(self, *, final: bool = False) -> LossEpisode | None:
        """To be called every few seconds: the episode that has ended, or has lasted long; None: nothing to tell."""
        now = self._clock.monotonic()
        with self._lock:
            total = self._lost + sum(a.source.dropped for a in self._accounts if a.source is not None)
            if total != self._total:
                self._total, self._changed_at = total, now
                self._began = now if self._began is None else self._began
            if self._began is None or not (
                final or now - self._changed_at >= QUIET_S or now - self._began >= LONGEST_EPISODE_S
            ):
                self._forget()
                return None
            losses = [loss for account in self._accounts if (loss := account.take()) is not None]
            episode = LossEpisode(
                reason=self._reason,
                streams=tuple(
                    sorted(losses, key=lambda one: (-one.not_in_file, -one.not_in_job_log, one.rank, one.stream))
                ),
            )
            self._began, self._reason = None, ""
            self._forget()
            self._total = self._lost + sum(a.source.dropped for a in self._accounts if a.source is not None)
        if episode.not_in_files:
            self._say(episode.describe())
        return episode

    def _forget(self) -> None:
        """Let go of the accounts that have ended and lack nothing that was not told. Called with the lock."""
        for account in [a for a in self._accounts if a.has_ended]:
            dropped = account.source.dropped if account.source is not None else 0
            if not account.lost and dropped == account.seen_dropped:
                self._accounts.discard(account)
                self._total -= dropped
