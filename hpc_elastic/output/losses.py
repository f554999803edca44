"""The workers' output that was lost, whose, and why: reported once per episode, not once per line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.text import first_of
from hpc_elastic.output.job_log import JobLogSource
from hpc_elastic.run.agent_events import OutputLost, StreamLoss
from hpc_elastic.run.paths import round_index

QUIET_S = 10.0
LONGEST_EPISODE_S = 600.0
"""An episode that lasts longer is reported before its end."""
_NAMED = 8
_MOST_STREAMS = 100


class StreamAccount:
    __slots__ = ("has_ended", "lost", "path", "rank", "reported", "source", "stream")

    def __init__(self, *, rank: int, stream: str, path: Path, source: JobLogSource | None) -> None:
        self.rank = rank
        self.stream = stream
        self.path = path
        self.source = source
        self.lost = 0
        self.reported = 0
        """Bytes that the job log dropped, of which an episode has reported."""
        self.has_ended = False

    @property
    def dropped(self) -> int:
        return self.source.dropped if self.source is not None else 0

    def take(self) -> StreamLoss:
        loss = StreamLoss(
            round=round_index(self.path.parent.parent.name),
            rank=self.rank,
            stream=self.stream,
            not_in_file=self.lost,
            not_in_job_log=self.dropped - self.reported,
        )
        self.reported += loss.not_in_job_log
        self.lost = 0
        return loss


class LossBook:
    """All accounts of a node. Any thread may call it; none waits for another that writes."""

    def __init__(self, *, clock: Clock, log: Callable[[str], None]) -> None:
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._accounts: set[StreamAccount] = set()
        self._began: float | None = None
        self._changed_at = 0.0
        self._total = 0
        self._lost = 0
        self._reason = ""

    def open(self, account: StreamAccount) -> StreamAccount:
        with self._lock:
            self._accounts.add(account)
        return account

    def end(self, account: StreamAccount) -> None:
        with self._lock:
            account.has_ended = True
            self._forget()

    def lose(self, account: StreamAccount, count: int, reason: str) -> None:
        with self._lock:
            account.lost += count
            self._accounts.add(account)
            self._lost += count
            is_first = not self._reason
            self._reason = self._reason or reason
        if is_first:
            self._log(
                f"{account.path}: {reason}; the workers run on, and what they print is lost until it can be written"
                " again"
            )

    def settle(self, *, final: bool = False) -> OutputLost | None:
        """The episode that has ended, or has lasted long; None: there is none. It is asked for every few seconds."""
        now = self._clock.monotonic()
        with self._lock:
            total = self._lost + sum(account.dropped for account in self._accounts)
            if total != self._total:
                self._total, self._changed_at = total, now
                self._began = now if self._began is None else self._began
            if self._began is None or not (
                final or now - self._changed_at >= QUIET_S or now - self._began >= LONGEST_EPISODE_S
            ):
                self._forget()
                return None
            losses = [
                account.take() for account in self._accounts if account.lost or account.dropped > account.reported
            ]
            losses.sort(key=lambda one: (-one.not_in_file, -one.not_in_job_log, one.rank, one.stream))
            reason = self._reason
            self._began, self._reason = None, ""
            self._forget()
            self._total = self._lost + sum(account.dropped for account in self._accounts)
        lacking = [f"rank {one.rank} {one.stream} {one.not_in_file}" for one in losses if one.not_in_file]
        not_in_files = sum(one.not_in_file for one in losses)
        if lacking:
            why = f" ({reason})" if reason else ""
            whose = first_of(lacking, _NAMED)
            self._log(f"{not_in_files} bytes of the workers' output are not in their files: {whose}{why}")
        return OutputLost(
            reason=reason or "the job log could not keep up",
            not_in_files=not_in_files,
            not_in_job_log=sum(one.not_in_job_log for one in losses),
            streams=tuple(losses[:_MOST_STREAMS]),
        )

    def _forget(self) -> None:
        for account in [account for account in self._accounts if account.has_ended]:
            if not account.lost and account.dropped == account.reported:
                self._accounts.discard(account)
                self._total -= account.dropped
