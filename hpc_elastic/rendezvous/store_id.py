"""The id of a store: a random name that its first opener gives it. It shows when the store was wiped or replaced."""

from __future__ import annotations

import errno
import os

from hpc_elastic.store.base import Store, wiped

_KEY = "epoch/id"


class StoreId:
    """One participant's knowledge of the store's id."""

    def __init__(self, store: Store, run_id: str, *, patience: float) -> None:
        """Args:
        store: The run's.
        run_id: For messages, where the store has no better name.
        patience: Seconds for which the name may not be found: a stale handle reads the same for a while.
        """
        self._store = store
        self._run_id = run_id
        self._patience = patience
        self._id: str | None = None
        self._missing_since: float | None = None

    @property
    def is_known(self) -> bool:
        return self._id is not None

    def open(self) -> str:
        """The store's name, given now where it has none.

        Raises:
            OSError: it can't be read yet.
        """
        if self._id is None:
            self._store.put_if_absent(_KEY, os.urandom(8).hex())
            self._id = self._store.get(_KEY)
        if self._id is None:
            raise OSError(errno.EIO, "the store's epoch can't be read yet")
        return self._id

    def accept(self, told: str) -> None:
        """What a record of the log says; the first one is believed.

        Raises:
            StoreWipedError: it is another than before.
        """
        if self._id is None:
            self._id = told
        if told != self._id:
            raise wiped(self._store, epoch=self._id, found=told, otherwise=self._run_id)

    def check(self, now: float) -> None:
        """Look whether it is still this store, where anything is known of it.

        Args:
            now: Seconds, monotonic.

        Raises:
            OSError: its name can't be found, for the moment.
            StoreWipedError: it is gone, or another store is in its place.
        """
        if self._id is None:
            return
        found = self._store.get(_KEY)
        if found is None:
            if self._missing_since is None:
                self._missing_since = now
            if now - self._missing_since < self._patience:
                raise OSError(errno.ESTALE, "the store's epoch can't be found")
        else:
            self._missing_since = None
        if found != self._id:
            raise wiped(self._store, epoch=self._id, found=found, otherwise=self._run_id)
