"""The store's Protocol over a ``Store`` of torch's: processes that share a ``TCPStore`` meet in it, without files.

A value is one key, created by compare-and-set. Listings, which torch's stores lack, are one text for each folder. Every
writer appends a line to it, which the server does as a whole: none is lost, however many write.

- The value is written before its name is listed: a name that is listed can be read. One that finds a value there before
  its own lists the name too, in case its writer died in between.
- A name that was deleted is listed as such before the value goes. Names are never used again, so the order of the lines
  says nothing. Those that say nothing any more are dropped now and then.

Nothing here blocks on what is not there, so that threads which share one client don't hold each other up. But a thread
that waits in a ``TCPStore`` (``get``, ``wait``) does hold up all others of that client: give this store a clone of its
own where one does. An operation on a server that was stopped, or whose host is gone without a reset, has no timeout
in torch 2.13: use a thread that may hang.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hpc_elastic.store.base import Store, StoreError

_NOT_THERE = b"\0"
"""No value: all begin with a tag."""
_ONCE = b"="
_LONGEST_WASTE = 4096
"""Bytes that deleted names may take in a listing, before they are dropped."""

T = TypeVar("T")


class C10dStore(Store):
    """The contract of `hpc_elastic.store.base.Store` over `store`. Safe to share between threads."""

    def __init__(self, store: dist.Store) -> None:
        """Args:
        store: A ``TCPStore``, a ``HashStore``, or a ``PrefixStore`` over one, which keeps this apart from other users.
        """
        self._store = store
        self._appends = bool(store.has_extended_api())
        self._known: set[str] = set()
        """Folders and cells of which this process has seen that they are listed."""
        self._count = 0
        self._nonce = secrets.token_hex(4)

    def put_if_absent(self, key: str, value: str) -> bool:
        raw = _ONCE + b" " + _encode(value)
        there = self._compare_set(f"v/{key}", b"", raw)
        self._enlist(key, sure=there == raw)
        return there == raw

    def get(self, key: str) -> str | None:
        raw = self._read(f"v/{key}")
        return None if raw is None else raw.partition(b" ")[2].decode("utf-8", "surrogateescape")

    def version(self, key: str) -> str | None:
        raw = self._read(f"v/{key}")
        return None if raw is None else raw.decode("utf-8", "surrogateescape")

    def list(self, folder: str) -> list[str]:
        return [*_names(self._read(f"l/{folder}") or b"")]

    def overwrite(self, key: str, value: str) -> None:
        self._count += 1  # two threads may take the same: a cell has one owner
        tag = f"{self._nonce}.{self._count}".encode()
        self._do(lambda: self._store.set(f"v/{key}", tag + b" " + _encode(value)))
        if key not in self._known:
            self._enlist(key, sure=False)
            self._known.add(key)
        self._read(
            f"v/{key}"
        )  # a TCPStore says nothing to `set` and `append`: its next answer says that it has done it

    def delete(self, key: str) -> None:
        folder, _, name = key.rpartition("/")
        if name in _names(self._read(f"l/{folder}") or b""):
            self._append(folder, f"-{name}\n")
        self._known.discard(key)
        self._do(lambda: self._store.delete_key(f"v/{key}"))
        self._tidy_to(_LONGEST_WASTE, folder)

    def invalidate(self, folder: str) -> None:
        """Nothing: there are no caches."""

    def _enlist(self, key: str, *, sure: bool) -> None:
        """List a key whose value is there; `sure`: it is not listed yet, as far as this process can know."""
        folder, _, name = key.rpartition("/")
        self._enlist_folder(folder)
        if not sure and name in _names(self._read(f"l/{folder}") or b""):
            return
        self._append(folder, f"+{name}\n")
        if self._read(f"v/{key}") is None:  # (and the answer says that the line is there)
            # Deleted since, perhaps with the line that said so: this process was stopped for a while.
            self._append(folder, f"-{name}\n")

    def _enlist_folder(self, folder: str) -> None:
        if not folder or folder in self._known:
            return
        above, _, name = folder.rpartition("/")
        self._enlist_folder(above)
        if name not in _names(self._read(f"l/{above}") or b""):
            self._append(above, f"+{name}\n")
        self._known.add(folder)

    def _append(self, folder: str, line: str) -> None:
        key, raw = f"l/{folder}", line.encode()
        if self._appends:
            self._do(lambda: self._store.append(key, raw))
            return
        while True:
            old = self._read(key) or b""
            if self._compare_set(key, old, old + raw) == old + raw:
                return

    def _tidy_to(self, waste: int, folder: str) -> None:
        key = f"l/{folder}"
        old = self._read(key) or b""
        new = b"".join(b"+%b\n" % name.encode() for name in _names(old))
        if len(old) - len(new) > waste:
            self._compare_set(key, old, new)  # where another process has appended meanwhile: some other time

    def _read(self, key: str) -> bytes | None:
        # torch's `get` blocks on what is not there. This never sets anything: no value is what is expected.
        found = self._compare_set(key, _NOT_THERE, _NOT_THERE)
        return None if found == _NOT_THERE else found

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._do(lambda: self._store.compare_set(key, expected, desired)))

    def _do(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except dist.DistNetworkError as error:
            # A client does not connect again: trying once more won't help.
            why = f"its server does not answer any more: {_first_line(error)}"
            raise StoreError(root=type(self._store).__name__, why=why) from error
        except dist.DistError as error:
            raise OSError(errno.EIO, f"{type(self._store).__name__}: {_first_line(error)}") from error


def _names(raw: bytes) -> dict[str, None]:
    """Of a listing's lines, in order."""
    lines = raw.decode().split("\n")
    deleted = {line[1:] for line in lines if line.startswith("-")}
    return {line[1:]: None for line in lines if line.startswith("+") and line[1:] not in deleted}


def _encode(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
