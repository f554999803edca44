"""What this participant was rung about and has not found yet: the client's caches hide it, so they are to be stirred.

A ring is faster than the caches of a shared filesystem: a folder's listing may be trusted for seconds (sshfs,
GlusterFS, NFS mounted ``nocto``), or while the folder's time, which a server may tell by the second, has not changed.
Whoever rings therefore says what it wrote. Where that is not in the listings, their folders are stirred, once for each
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
        self._keys: set[str] = set()

    def add(self, keys: Iterable[str]) -> None:
        """As `record_name` or `claims.claim_key` make them; anything else is ignored."""
        for key in keys:
            if len(self._keys) < MOST:
                self._keys.add(key)

    def take_hidden(self, *, newest: int, claims: Mapping[int, Claims]) -> set[str]:
        """The folders to stir, after a look; nothing of the list is left.

        Args:
            newest: The number of the newest record seen, 0 for none.
            claims: The rounds whose claims were listed, with what was found; none where this node does not coordinate.
        """
        if not self._keys:
            return set()
        shown = {
            f"{claim_folder(index)}/{kind}+{uid}"
            for index, found in claims.items()
            for kind, uids in found.items()
            for uid in uids
        }
        folders = {claim_folder(index) for index in claims}
        hidden = set()
        for key in self._keys - shown:
            folder, _, name = key.rpartition("/")
            if folder in folders or (folder == _LOG and name.isdecimal() and len(name) < 20 and int(name) > newest):
                hidden.add(folder)
        self._keys.clear()
        return hidden
