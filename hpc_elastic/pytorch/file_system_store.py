"""A ``torch.distributed.Store`` in a folder of a shared filesystem: no server, no port, no node that must not die.

Correct with any number of processes on any number of mounts (`hpc_elastic.store.key_value`); torch's own ``FileStore``
locks one file, and loses increments or hangs where locks or sizes are not coherent between nodes.

What torch 2.13's ``PrefixStore`` does not hand on to a store written in Python (its trampoline knows no such method):
``delete_key`` and ``num_keys`` (RuntimeError), ``queue_push``, ``queue_pop``, ``queue_len`` and ``list_keys``
(NotImplementedError). `FileSystemStore.prefixed` gives a prefix that has them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_elastic.clock import SystemClock
from hpc_elastic.store.base import StoreError
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.key_value import KeyValueStore, KeyValueTimeoutError

_FOLDER = "kv"


class FileSystemStore(dist.Store):  # type: ignore[misc, unused-ignore]
    """Keys and values in the folder `path`, which every process of the job opens for itself.

    A path must be fresh for each job: what is in it stays. Its parent folder exists.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: timedelta | None = None, prefix: str = "", folder: str = _FOLDER
    ) -> None:
        """Open, or create.

        Args:
            path: A folder of this user's alone (0700).
            timeout: For `get`, `wait` and `queue_pop`; torch's default (300 s) where left out.
            prefix: Put before every key.
            folder: Below `path`.

        Raises:
            UnsafePathError: the folder is a link, another user's, or open to others.
            OSError: the filesystem refuses.
        """
        super().__init__()
        self._path = os.fspath(path)
        self._prefix = prefix
        self._folder = folder
        clock = SystemClock()
        self._values = KeyValueStore(FileStore(Path(self._path), clock=clock), folder, clock=clock)
        if timeout is not None:
            self.set_timeout(timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._path, self.timeout, self._prefix, self._folder)

    def clone(self) -> FileSystemStore:
        return _rebuild(self._path, self.timeout, self._prefix, self._folder)

    def prefixed(self, prefix: str) -> FileSystemStore:
        """The same store with ``prefix/`` before every key, as ``PrefixStore`` writes it, and with all methods."""
        return _rebuild(self._path, self.timeout, f"{self._prefix}{prefix}/", self._folder)

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(self._prefix + key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, waited for until the store's timeout.

        Raises:
            torch.distributed.DistStoreError: it did not come.
        """
        try:
            return self._values.get_waiting(self._prefix + key, self.timeout.total_seconds())
        except StoreError as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, value: int) -> int:
        return self._values.add(self._prefix + key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """As ``TCPStore``: an empty `expected_value` stands for "not there"."""
        return self._values.compare_set(self._prefix + key, _bytes(expected_value), _bytes(desired_value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all have a value.

        Raises:
            torch.distributed.DistStoreError: after `timeout`, the store's where left out.
        """
        try:
            seconds = (self.timeout if timeout is None else timeout).total_seconds()
            self._values.wait([self._prefix + key for key in keys], seconds)
        except StoreError as error:
            raise dist.DistStoreError(str(error)) from error

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.check(self._prefix + key for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.delete(self._prefix + key)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        return [key[len(self._prefix) :] for key in self._values.all_keys() if key.startswith(self._prefix)]

    def append(self, key: str, value: str | bytes) -> None:
        self._values.append(self._prefix + key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values")
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._values.push(self._prefix + key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue.

        Raises:
            torch.distributed.QueueEmptyError: `block` is false and there is none.
            torch.distributed.DistStoreError: none came until the store's timeout.
        """
        if block:
            try:
                return self._values.pop_waiting(self._prefix + key, self.timeout.total_seconds())
            except KeyValueTimeoutError as error:
                raise dist.DistStoreError(str(error)) from error
        value = self._values.pop(self._prefix + key)
        if value is None:
            raise getattr(dist, "QueueEmptyError", dist.DistStoreError)(f"queue {key!r} is empty")
        return value

    def queue_len(self, key: str) -> int:
        return self._values.queue_length(self._prefix + key)


def _rebuild(path: str, timeout: timedelta, prefix: str, folder: str) -> FileSystemStore:
    return FileSystemStore(path, timeout=timeout, prefix=prefix, folder=folder)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
