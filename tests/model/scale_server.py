"""A model of one NFS server and its clients, in simulated time: what the scale bench puts below the real `FileStore`.

The server does `CAPACITY` operations a second, each `LATENCY` long where nobody waits; who comes when it is busy waits
for the first free slot. Every effect becomes visible when its operation ends. A client keeps names, attributes and
listings as Linux's NFSv3 client does, after the same rules as the NFS emulator: they hold while their folder's time is
unchanged, which is asked for again after `ATTRIBUTES` seconds and whenever the folder is opened (close-to-open).

Counted is what a server would see: lookup, getattr, readlink, read, readdir (one for each 32 KiB of names), create,
mkdir, symlink, link, remove, write, commit, setattr. Not modelled: bandwidth, and the time that clients compute.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from bisect import bisect_right, insort
from collections import Counter
from functools import cache
from typing import Any

LATENCY = 0.001
CAPACITY = 15_000.0
ATTRIBUTES = 30.0
"""Seconds: Linux's acdirmin. Its acregmin of 3 s matters to nobody here, since each read opens its file anew."""
NAMES_IN_A_READDIR = 250
READ_SIZE = 1 << 20
_SLOT = 0.001


class Server:
    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.root = Inode("folder")
        self._in_slot: dict[int, int] = {}
        self._next: dict[int, int] = {}

    @property
    def operations(self) -> int:
        return sum(self.counters.values())

    def serve(self, at: float, kind: str) -> float:
        self.counters[kind] += 1
        wanted = int(at / _SLOT)
        slot = self._free(wanted)
        taken = self._in_slot.get(slot, 0) + 1
        self._in_slot[slot] = taken
        if taken >= int(CAPACITY * _SLOT):
            self._next[slot] = slot + 1
        return (at if slot == wanted else slot * _SLOT) + LATENCY

    def _free(self, slot: int) -> int:
        passed = []
        while (after := self._next.get(slot)) is not None:
            passed.append(slot)
            slot = after
        for one in passed:
            self._next[one] = slot
        return slot

    def make_folder(self, path: str) -> None:
        folder = self.root
        for name in path.strip("/").split("/"):
            entry = folder.children.get(name)
            if entry is None:
                entry = folder.children[name] = Entry(Inode("folder"), 0.0)
            folder = entry.inode


class Entry:
    """A name in a folder, from one time to another."""

    __slots__ = ("inode", "since", "until")

    def __init__(self, inode: Inode, since: float) -> None:
        self.inode = inode
        self.since = since
        self.until = float("inf")


class Inode:
    __slots__ = ("changes", "children", "kind", "target", "versions")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.changes: list[float] = []
        """When a folder's entries, or a file's contents, changed; ascending."""
        self.children: dict[str, Entry] = {}
        self.target = b""
        self.versions: list[bytes] = []

    def stamp(self, at: float) -> int:
        return bisect_right(self.changes, at)

    def child(self, name: str, at: float) -> Inode | None:
        entry = self.children.get(name)
        return entry.inode if entry is not None and entry.since <= at < entry.until else None

    def contents(self, at: float) -> bytes:
        seen = self.stamp(at)
        return self.versions[seen - 1] if seen else b""


class _Open:
    __slots__ = ("at", "dirty", "inode", "path", "position")

    def __init__(self, inode: Inode, path: str) -> None:
        self.inode = inode
        self.path = path
        self.dirty: bytes | None = None
        self.position = 0


@cache
def _steps(path: str) -> tuple[tuple[str, str, str], ...]:
    """(folder's path, name, its path) for each component."""
    found, at = [], ""
    for name in path.strip("/").split("/"):
        found.append((at, name, f"{at}/{name}"))
        at = f"{at}/{name}"
    return tuple(found)


class Client:
    """One node's mount. `now` is its process' time: each operation moves it on."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.now = 0.0
        self.calls = 0
        """System calls that name a file or list a folder: three for a listing."""
        self._attributes: dict[str, tuple[float, int]] = {}
        self._names: dict[str, tuple[Inode | None, int]] = {}
        self._listings: dict[str, tuple[int, list[str]]] = {}
        self._cached: dict[str, int] = {}
        self._open: dict[int, _Open] = {}
        self._next_fd = 3

    def _operation(self, kind: str) -> None:
        self.now = self.server.serve(self.now, kind)

    def _fresh(self, path: str, inode: Inode) -> int:
        known = self._attributes.get(path)
        if known is not None and self.now - known[0] < ATTRIBUTES:
            return known[1]
        return self._ask(path, inode)

    def _ask(self, path: str, inode: Inode) -> int:
        self._operation("getattr")
        stamp = inode.stamp(self.now)
        self._attributes[path] = (self.now, stamp)
        return stamp

    def walk(self, path: str) -> Inode:
        """The object at a path. Raises FileNotFoundError."""
        inode = self.server.root
        if "" not in self._attributes:
            self._attributes[""] = (self.now, inode.stamp(self.now))
        for folder, name, full in _steps(path):
            stamp = self._fresh(folder, inode)
            known = self._names.get(full)
            if known is not None and known[1] == stamp:
                found = known[0]
            else:
                self._operation("lookup")
                found = inode.child(name, self.now)
                self._names[full] = (found, stamp)
                if found is not None:
                    self._attributes[full] = (self.now, found.stamp(self.now))
            if found is None:
                raise FileNotFoundError(errno.ENOENT, full)
            inode = found
        return inode

    def _changed(self, folder: str, inode: Inode, path: str) -> None:
        """The reply to an own change has the folder's attributes (NFSv3's post_op_attr); what was known is outdated."""
        self._attributes[folder] = (self.now, inode.stamp(self.now))
        self._names.pop(path, None)
        self._listings.pop(folder, None)

    def _add(self, operation: str, path: str, inode: Inode) -> None:
        folder_path, _, name = path.rpartition("/")
        folder = self.walk(folder_path)
        self._operation(operation)
        entry = folder.children.get(name)
        there = entry is not None and self.now < entry.until
        if entry is not None and there:
            self.now = max(self.now, entry.since)
        else:
            folder.children[name] = Entry(inode, self.now)
            insort(folder.changes, self.now)
        self._changed(folder_path, folder, path)
        if there:
            raise FileExistsError(errno.EEXIST, path)

    def symlink(self, target: bytes | str, path: bytes | str) -> None:
        inode = Inode("link")
        inode.target = os.fsencode(target)
        self._add("symlink", os.fsdecode(path), inode)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        self._add("mkdir", path, Inode("folder"))

    def link(self, source: str, path: str) -> None:
        self._add("link", path, self.walk(source))

    def unlink(self, path: str) -> None:
        folder_path, _, name = path.rpartition("/")
        folder = self.walk(folder_path)
        self._operation("remove")
        if folder.child(name, self.now) is None:
            raise FileNotFoundError(errno.ENOENT, path)
        folder.children[name].until = self.now
        insort(folder.changes, self.now)
        self._changed(folder_path, folder, path)

    def readlink(self, path: str) -> bytes:
        inode = self.walk(path)
        if inode.kind != "link":
            raise OSError(errno.EINVAL, path)
        if path not in self._cached:
            self._operation("readlink")
            self._cached[path] = 0
        return inode.target

    def listdir(self, path: str) -> list[str]:
        inode = self.walk(path)
        stamp = self._ask(path, inode)
        known = self._listings.get(path)
        if known is not None and known[0] == stamp:
            return list(known[1])
        at = self.now
        names = [name for name, entry in inode.children.items() if entry.since <= at < entry.until]
        for _ in range(1 + len(names) // NAMES_IN_A_READDIR):
            self._operation("readdir")
        self._listings[path] = (stamp, names)
        return list(names)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        opened = None
        if flags & os.O_CREAT:
            try:
                if flags & os.O_EXCL:
                    raise FileNotFoundError
                inode = self.walk(path)
            except FileNotFoundError:
                inode = Inode("file")
                self._add("create", path, inode)
                opened = inode
        else:
            inode = self.walk(path)
        if opened is None:
            self._ask(path, inode)
        fd = self._next_fd
        self._next_fd += 1
        self._open[fd] = _Open(inode, path)
        return fd

    def read(self, fd: int, size: int) -> bytes:
        file = self._open[fd]
        stamp = file.inode.stamp(self.now)
        data = file.inode.contents(self.now)
        if self._cached.get(file.path) != stamp:
            for _ in range(max(1, -(-len(data) // READ_SIZE))):
                self._operation("read")
            self._cached[file.path] = stamp
        part = data[file.position : file.position + size]
        file.position += len(part)
        return part

    def write(self, fd: int, data: Any) -> int:
        file = self._open[fd]
        file.dirty = (file.dirty or b"") + bytes(data)
        return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._open[fd].dirty = data
        return len(data)

    def ftruncate(self, fd: int, size: int) -> None:
        """Values that are rewritten here never get shorter."""

    def flush(self, fd: int) -> None:
        file = self._open[fd]
        if file.dirty is None:
            return
        self._operation("write")
        file.inode.versions.append(file.dirty)
        insort(file.inode.changes, self.now)
        file.dirty = None

    def fsync(self, fd: int) -> None:
        self.flush(fd)
        self._operation("commit")

    def fstat(self, fd: int) -> os.stat_result:
        self.flush(fd)
        inode = self._open[fd].inode
        kind = stat.S_IFDIR if inode.kind == "folder" else stat.S_IFREG
        size = len(inode.contents(self.now))
        at = inode.stamp(self.now)
        return os.stat_result((kind | 0o600, 0, 0, 1, os.geteuid(), 0, size, at, at, at))

    def close(self, fd: int) -> None:
        self.flush(fd)
        del self._open[fd]


class ModelOs:
    """Stands where `os` does in `file_store`: file calls go to the client whose turn it is, others to the real one."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.path = ModelPath(self)

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            return getattr(os, name)

        def call(*args: Any, **_: Any) -> Any:
            client = self._client
            client.calls += _CALLS[name]
            return getattr(client, name)(*(os.fsdecode(arg) if name in _NAMED else arg for arg in args))

        return call

    @property
    def _client(self) -> Client:
        assert self.client is not None
        return self.client


_NAMED = ("readlink", "link", "unlink", "listdir")
_CALLS = {
    **dict.fromkeys(("symlink", "mkdir", "open", *_NAMED), 1),
    **dict.fromkeys(("close", "read", "write", "pwrite", "fsync", "fstat", "ftruncate"), 0),
    "listdir": 3,
}
"""What the client does → system calls that name a file or list a folder."""


class ModelPath:
    """`os.path`, but for what looks at the disk."""

    def __init__(self, model: ModelOs) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(os.path, name)

    def lexists(self, path: str) -> bool:
        try:
            self._model._client.walk(path)
        except FileNotFoundError:
            return False
        return True


class ClientClock:
    """The clock of a participant on one client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def monotonic(self) -> float:
        return self._client.now

    def time_ns(self) -> int:
        return int(self._client.now * 1e9) + 1_700_000_000_000_000_000

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self._client.now += seconds
        return stop.is_set()
