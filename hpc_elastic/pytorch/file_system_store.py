"""A ``torch.distributed.Store`` in a folder of a shared filesystem: no server, no port, no node that must not die.

torch's own ``FileStore`` locks one file, and loses increments or hangs where locks or sizes are not coherent.

What torch 2.13's ``PrefixStore`` does not hand on to a store written in Python (its trampoline knows no such method):
``delete_key`` and ``num_keys`` (RuntimeError), and ``list_keys`` (NotImplementedError). `FileSystemStore.prefixed`
gives a prefix that has them. It has no queues, which torch itself does not use: NotImplementedError.

It behaves as ``TCPStore`` does, errors and their words included, but adding to a value that is no number is a
ValueError (a ``TCPStore`` drops the connection, or adds to the digits in front), and a counter does not wrap.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.store.file_store import FileStore, StoreError
from hpc_elastic.store.key_value import KeyValueStore, KeyValueTimeoutError

_FOLDER = "kv"
_LARGEST = 2**63
_alive: list[dist.Store] = []
"""All that were ever made. torch's C++ side (a ``PrefixStore``, a process group) holds a store's C++ half alone. Were
the Python half collected, as after ``init_process_group(store=FileSystemStore(…))``, the next operation would find no
method ("pure virtual function", torch 2.4 and 2.13). Nobody says when the C++ half goes. They are small."""


class FileSystemStore(dist.Store):  # type: ignore[misc, unused-ignore]
    """Keys and values in the folder `path`, which every process of the job opens for itself.

    A path must be fresh for each job: what is in it stays. Its parent folder exists, and no other user can rename what
    is in that: torch's collectives of objects unpickle values.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: timedelta | None = None, prefix: str = "", folder: str = _FOLDER
    ) -> None:
        """Open, or create.

        Args:
            path: A folder of this user's alone (0700).
            timeout: Time for `get` and `wait`; torch's default (300 s) where left out.
            prefix: Put before every key.
            folder: Below `path`.

        Raises:
            UnsafePathError: the folder is a link, another user's, or open to others.
            OSError: the filesystem refuses.
        """
        clock = SystemClock()
        values = KeyValueStore(FileStore(Path(path), clock=clock), folder, clock=clock)
        self._set_up(os.fspath(path), timeout, prefix, folder, values)

    def _set_up(
        self, path: str, timeout: timedelta | None, prefix: str, folder: str, values: KeyValueStore
    ) -> FileSystemStore:
        super().__init__()
        self._path = path
        self._prefix = prefix
        self._folder = folder
        self._values = values
        if timeout is not None:
            self.set_timeout(timeout)
        _alive.append(self)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = functools.partial(FileSystemStore, timeout=self.timeout, prefix=self._prefix, folder=self._folder)
        return rebuild, (self._path,)

    def __repr__(self) -> str:
        return f"FileSystemStore({self._path!r}, folder={self._folder!r}, prefix={self._prefix!r})"

    def clone(self) -> FileSystemStore:
        return self._with_prefix(self._prefix)

    def prefixed(self, prefix: str) -> FileSystemStore:
        """The same store with ``prefix/`` before every key, as ``PrefixStore`` writes it, and with all methods."""
        return self._with_prefix(f"{self._prefix}{_text(prefix)}/")

    def _with_prefix(self, prefix: str) -> FileSystemStore:
        found = FileSystemStore.__new__(FileSystemStore)
        return found._set_up(self._path, self.timeout, prefix, self._folder, self._values)

    def set(self, key: str, value: str | bytes) -> None:
        with self._torch_errors("set"):
            self._values.set(self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, waited for until the store's timeout. DistStoreError: it did not come."""
        with self._torch_errors("get"):
            return self._values.get_waiting(self._key(key), self.timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Raises: ValueError: what is there is not a number."""
        amount = operator.index(value)
        if not -_LARGEST <= amount < _LARGEST:
            raise TypeError(f"add: {amount} does not fit into 64 bits")
        with self._torch_errors("add"):
            return self._values.add(self._key(key), amount)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """An empty `expected_value` stands for "not there", as in ``TCPStore``."""
        with self._torch_errors("compare_set"):
            return self._values.compare_set(self._key(key), _bytes(expected_value), _bytes(desired_value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all have a value. DistStoreError: after `timeout`, the store's where left out."""
        limit = self.timeout if timeout is None else timeout
        if not isinstance(limit, timedelta):
            raise TypeError(f"wait: the timeout {timeout!r} is not a timedelta")
        with self._torch_errors("wait"):
            self._values.wait(self._keys(keys), limit.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        with self._torch_errors("check"):
            return self._values.check(self._keys(keys))

    def delete_key(self, key: str) -> bool:
        with self._torch_errors("delete_key"):
            return self._values.delete_key(self._key(key))

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        with self._torch_errors("list_keys"):
            return [key[len(self._prefix) :] for key in self._values.all_keys() if key.startswith(self._prefix)]

    def append(self, key: str, value: str | bytes) -> None:
        with self._torch_errors("append"):
            self._values.append(self._key(key), _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        raw = [_bytes(value) for value in values]
        if len(keys) != len(raw):
            raise dist.DistStoreError("multiSet keys and values vectors must be of same size")
        for key, value in zip(self._keys(keys), raw, strict=True):
            with self._torch_errors("multi_set"):
                self._values.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def _key(self, key: str | bytes) -> str:
        return self._prefix + _text(key)

    def _keys(self, keys: Sequence[str]) -> list[str]:
        if isinstance(keys, str | bytes):
            raise TypeError(f"{keys!r} is one key: give a list of them")
        return [self._key(key) for key in keys]

    @contextmanager
    def _torch_errors(self, operation: str) -> Iterator[None]:
        """Raise torch's error for any fault of the files, so that what handles a TCPStore's handles this one's."""
        try:
            yield
        except KeyValueTimeoutError as error:
            keys = ", ".join(f"/{key}" for key in error.missing)
            why = f"wait timeout after {round(error.seconds * 1000)}ms, keys: {keys} (in {self._path}/{self._folder})"
            raise dist.DistStoreError(why) from error
        except (StoreError, OSError) as error:
            raise dist.DistStoreError(f"{operation} in {self._path}: {error}") from error


def _bytes(value: str | bytes) -> bytes:
    """Raises: TypeError: what torch's stores refuse too: neither text nor bytes, or text that is not UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{value!r} can't be written as UTF-8") from None
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(f"{value!r:.100} is neither text nor bytes")


def _text(key: str | bytes) -> str:
    raw = _bytes(key)
    return key if isinstance(key, str) else raw.decode("utf-8", "surrogateescape")
