"""A store in this process's memory: for model tests and for participants that share one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hpc_elastic.store.file_store import Store


class MemoryStore(Store):
    """The same contract as `FileStore`, without a disk. Safe to share between threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, value: str) -> bool:
        with self._lock:
            return self._values.setdefault(key, value) == value

    def get(self, key: str) -> str | None:
        with self._lock:
            return self._values.get(key)

    def version(self, key: str) -> str | None:
        return self.get(key)

    def list(self, folder: str) -> list[str]:
        prefix = folder + "/"
        with self._lock:
            names = {key[len(prefix) :].split("/", 1)[0] for key in self._values if key.startswith(prefix)}
        return list(names)

    def overwrite(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def invalidate(self, folder: str) -> None:
        pass


class SpyStore(MemoryStore):
    """Notes what is asked of it; `hidden` keys are listed and can't be read, and a key that `refuse` names is no more
    written or removed."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.listings: list[str] = []
        self.writes: list[str] = []
        self.deleted: list[str] = []
        self.invalidated: list[str] = []
        self.hidden: set[str] = set()
        self.refuse: Callable[[str], bool] = lambda key: False
        self.on_read: Callable[[str], None] = lambda key: None

    def get(self, key: str) -> str | None:
        self.reads.append(key)
        self.on_read(key)
        return None if key in self.hidden else super().get(key)

    def version(self, key: str) -> str | None:
        self.on_read(key)
        return super().get(key)

    def list(self, folder: str) -> list[str]:
        self.listings.append(folder)
        return super().list(folder)

    def put_if_absent(self, key: str, value: str) -> bool:
        self._check(key)
        self.writes.append(key)
        return super().put_if_absent(key, value)

    def overwrite(self, key: str, value: str) -> None:
        self._check(key)
        super().overwrite(key, value)

    def delete(self, key: str) -> None:
        self._check(key)
        self.deleted.append(key)
        super().delete(key)

    def invalidate(self, folder: str) -> None:
        self.invalidated.append(folder)

    def _check(self, key: str) -> None:
        if self.refuse(key):
            raise OSError(5, "Input/output error")


def fits_key(name: str) -> bool:
    """Return whether `name` can be one component of a key: short, printable, no dot first (readers skip dot-names)."""
    return 0 < len(name) <= 200 and name[0] != "." and all(c.isalnum() or c in "-_.+" for c in name) and name.isascii()
