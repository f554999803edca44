"""What this participant was rung about and has not found yet: the client's caches hide it, so they are invalidated.

A ring is faster than the caches of a shared filesystem: a folder's listing may be trusted for seconds (sshfs,
GlusterFS, NFS mounted ``nocto``), or while the folder's time, which a server may tell by the second, has not changed.
So a ring carries what was written. Where that is not in the listings, their folders are invalidated, once for each
thing: a ring about something that does not exist costs one more look and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpc_elastic.rendezvous.claims import Claims, claim_folder

MOST = 256
"""Things kept at a time; of more, polling has to find what caches hide."""
_LOG = "log"


def record_name(number: int) -> str:
    """How a ring calls a record of the log."""
    return f"{_LOG}/{number}"


class RungAbout:
    """One participant's list."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.newest_record = 0
        """The highest number of a record that was named since the last `take_hidden`; 0: none was."""

    def add(self, keys: Iterable[str]) -> None:
        """As `record_name` or `claims.claim_key` make them; anything else is ignored."""
        for key in keys:
            if len(self.keys) < MOST:
                self.keys.add(key)
                self.newest_record = max(self.newest_record, _number(key))

    def add_news(self, keys: Iterable[str], *, newest: int) -> None:
        """Of `keys`, those of records after number `newest`."""
        self.add(key for key in keys if _number(key) > newest)

    def take_hidden(self, *, newest: int, claims: Mapping[int, Claims]) -> set[str]:
        """The folders to invalidate, after a look; nothing of the list is left.

        Args:
            newest: The number of the newest record seen, 0 for none.
            claims: The rounds whose claims were listed, with what was found; none where this node does not coordinate.
        """
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
    """Of a record, 0 where `key` is none's."""
    folder, _, name = key.rpartition("/")
    return int(name) if folder == _LOG and name.isdecimal() and len(name) < 20 else 0
