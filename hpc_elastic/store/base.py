"""The store's Protocol: the few operations that hold on every shared filesystem.

Keys are ``folder/name`` or ``folder/sub/name``; no key is ever used again for another value, so nobody can mistake an
old value for a new one. Values are text of at least one character.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Protocol

from hpc_elastic.errors import HpcElasticError


class StoreError(HpcElasticError):
    """The store can't do what was asked, and trying again won't help."""

    template = "store {root}: {why}"


class StoreFullError(StoreError):
    """A disk or a quota is full: nothing was written, and nothing can be until there is room."""


class StoreRefusedError(StoreError):
    """The filesystem has refused every access for longer than anything waits for it."""

    template = "the filesystem of the run directory has refused for {seconds:.0f} s: {why}"


class StoreWipedError(StoreError):
    """The store that this participant joined is gone or was replaced: going on could contradict what others read."""

    template = (
        "the run's store {root} {why} while the run was in progress, and it can't continue without it; "
        "start the run again, and exclude this folder from automatic clean-up"
    )


class Store(Protocol):
    """Values that are written once, cells that one owner rewrites, and listings.

    Any method may raise OSError for a passing fault of the filesystem; the caller tries again at its next step.
    """

    def put_if_absent(self, key: str, value: str) -> bool:
        """Give `key` its value, once and for good.

        Returns whether `key` now holds `value`: true also when an earlier try of the same caller had worked although it
        looked like a failure (a lost reply). Where StoreFullError or StoreError is raised, nothing was written.
        """

    def get(self, key: str) -> str | None:
        """The value of `key`, or None where there is none yet (or it can't be read whole yet).

        Of a cell: maybe an older value, and on GlusterFS for as long as it is not rewritten once more; `version` tells.
        """

    def list(self, folder: str) -> list[str]:
        """The names in `folder`, in no order, fresh from the server; empty where the folder is not there.

        On a server whose times are coarse, what changed within one tick (up to a second) of the last look may be missed
        until the next change; a client that caches by time alone (sshfs) shows what others changed that much later:
        `invalidate` before what must not be missed.
        """

    def version(self, key: str) -> str | None:
        """A value that changes with each `overwrite` of a cell, also with one that found no room; None: no cell."""

    def overwrite(self, key: str, value: str) -> None:
        """Rewrite a cell of one's own. One writer per cell; readers may see the old value for a while."""

    def delete(self, key: str) -> None:
        """Remove a key that nobody will look for again, or an empty folder; one that is not empty stays."""

    def invalidate(self, folder: str) -> None:
        """Make caches of `folder` expire: this client's at once, all others' when the server's clock has ticked.

        Called before a decision that depends on something's absence, and now and then while waiting for something.
        """

    def make_folder(self, folder: str) -> None:
        """Create a folder before anybody looks into it: one that is missing is asked for again and again."""

    def get_many(self, keys: Sequence[str]) -> builtins.list[str | None]:
        """`get` for each of `keys`; several at a time where many round trips cost more than one."""
        return [self.get(key) for key in keys]
