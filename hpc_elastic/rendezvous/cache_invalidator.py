"""Invalidates folders' caches, so that nothing that others wrote stays hidden.

A client may trust a folder's listing for seconds (sshfs, GlusterFS, NFS mounted ``nocto``), or while the folder's time
has not changed, which a server may show by the second: what came within the tick of the last look is not shown. To
invalidate the folder in a later tick ends that for all clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpc_elastic.rendezvous.claims import Claims, claim_folder
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.store.file_store import Store

FIRST_SECONDS = 1.1
"""The longest tick of the filesystems in use, and a little."""
LAST_SECONDS = 30.0


class CacheInvalidator:
    def __init__(self, store: Store, uid: str, *, observes: bool) -> None:
        self._store = store
        self._uid = uid
        self._observes = observes
        self._seen: object = None
        self._due: float | None = None
        self._delay = FIRST_SECONDS

    def before_absence(self, record: RoundRecord) -> None:
        """Look past the caches, before a decision that a node has not claimed."""
        for folder in _claim_folders(record):
            self._store.invalidate(folder)

    def while_waiting(self, record: RoundRecord | None, *, seen: int, now: float) -> None:
        """Invalidate what only this node would notice as hidden, where the number of claims `seen` has not changed for
        a while."""
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


MOST = 256
"""Things kept at a time; of more, polling has to find what caches hide."""
_LOG = "log"


def record_name(number: int) -> str:
    return f"{_LOG}/{number}"


class PendingNotifications:
    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.newest_record = 0
        """The highest number of a record that was named since the last `take_hidden`; 0: none was."""

    def add(self, keys: Iterable[str]) -> None:
        for key in keys:
            if len(self.keys) < MOST:
                self.keys.add(key)
                self.newest_record = max(self.newest_record, _number(key))

    def add_news(self, keys: Iterable[str], *, newest: int) -> None:
        self.add(key for key in keys if _number(key) > newest)

    def take_hidden(self, *, newest: int, claims: Mapping[int, Claims]) -> set[str]:
        """Forget all, and return the folders to invalidate: those of keys that neither `claims`, as listed by the
        coordinator, nor record `newest` shows."""
        if not self.keys:
            return set()
        shown = {
            f"{claim_folder(index)}/{kind}+{uid}"
            for index, found in claims.items()
            for kind, uids in found.items()
            for uid in uids
        }
        folders = {claim_folder(index) for index in claims}
        hidden = set()
        for key in self.keys - shown:
            folder = key.rpartition("/")[0]
            if folder in folders or _number(key) > newest:
                hidden.add(folder)
        self.keys.clear()
        self.newest_record = 0
        return hidden


def _number(key: str) -> int:
    folder, _, name = key.rpartition("/")
    return int(name) if folder == _LOG and name.isdecimal() and len(name) < 20 else 0
