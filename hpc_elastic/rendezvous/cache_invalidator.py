"""Which folders' caches are invalidated and when, so that no participant waits for ever for what a coarse clock hides.

A server that tells times by the second can show a folder unchanged although something came within the tick of the last
look. To invalidate the folder in a later tick ends that for all clients. So what is waited for is invalidated once the
tick is over, and then ever more rarely: another invalidation, or a claim in the same tick, opens the same hole again.
"""

from __future__ import annotations

from hpc_elastic.rendezvous.claims import claim_folder
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.store.base import Store

FIRST_SECONDS = 1.1
"""The longest tick of the filesystems in use, and a little."""
LAST_SECONDS = 30.0


class CacheInvalidator:
    """One participant's part in it."""

    def __init__(self, store: Store, uid: str, *, observes: bool) -> None:
        """`observes`: this participant only looks (the supervisor)."""
        self._store = store
        self._uid = uid
        self._observes = observes
        self._seen: object = None
        self._due: float | None = None
        self._delay = FIRST_SECONDS

    def before_absence(self, record: RoundRecord) -> None:
        """A decision is near that says of a node that it has not claimed: look past the caches first."""
        for folder in _claim_folders(record):
            self._store.invalidate(folder)

    def while_waiting(self, record: RoundRecord | None, *, seen: int, now: float) -> None:
        """Invalidate where only this node would notice that something is hidden, where nothing has changed for a while.

        Args:
            record: The newest.
            seen: The number of claims at the last look.
            now: Seconds, monotonic.
        """
        folders = self._folders(record)
        state = (record and record.number, seen)
        if self._due is None or state != self._seen:
            self._seen, self._delay = state, FIRST_SECONDS
            self._due = now + self._delay
        elif folders and now >= self._due:
            for folder in folders:
                # Records come from this node alone: when some calls lay in different ticks, they have done their work.
                # A call costs each node that looks a listing.
                if folder != "log" or record is None or self._delay < LAST_SECONDS:
                    self._store.invalidate(folder)
            self._delay = min(2 * self._delay, LAST_SECONDS)
            self._due = now + self._delay

    def _folders(self, record: RoundRecord | None) -> list[str]:
        if record is None:
            return ["log"]
        if record.status is Status.CLOSED:
            return ["node", "bye"] if self._observes else []
        return ["log", "gone", *_claim_folders(record)] if record.leader == self._uid else []


def _claim_folders(record: RoundRecord) -> list[str]:
    beside = record.round - 1 if record.status is Status.JOINABLE else record.round + 1
    return [claim_folder(index) for index in (record.round, beside) if index >= 0]
