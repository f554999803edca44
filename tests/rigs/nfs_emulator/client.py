"""One mount's caches: what an NFS client believes about the server, and when it asks again."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tests.rigs.nfs_emulator.server import Attributes, Server
from tests.rigs.nfs_emulator.settings import MountSettings

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)

CHUNK = 1 << 20
"""Bytes of one READ or WRITE."""
LARGEST_CACHED = 8 << 20
"""Bytes of a file that is read without a cache."""
MOST_NODES = 4000
_NEVER = float("-inf")
_LINUX_UTIME_NOW = (1 << 30) - 1
_LINUX_UTIME_OMIT = (1 << 30) - 2


@dataclass(slots=True)
class Entry:
    """A name that was looked up: the node, or that there is none."""

    node: Node | None
    at: float
    stamp: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """An object on the server that this client has a handle of."""

    handle: int
    name: str
    attributes: Attributes
    at: float
    entries: dict[str, Entry] = field(default_factory=dict)
    listing: tuple[list[tuple[str, int]], float, tuple[int, ...]] | None = None
    data: bytearray | None = None
    target: str | None = None
    dirty: list[tuple[int, bytes]] = field(default_factory=list)
    dirty_since: float = 0.0
    write_error: OSError | None = None
    opens: int = 0
    silly: tuple[Node, str] | None = None
    forgotten: bool = False


class Client:
    """Path and handle operations as the kernel's FUSE asks for them. Callers hold one lock per mount."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._nodes: dict[int, Node] = {}
        self._root = Node(server.root, "", server.attributes(server.root), time.monotonic())
        self._nodes[self._root.attributes.ino] = self._root
        self._silly_count = 0

    @property
    def settings(self) -> MountSettings:
        return self._server.settings

    # -- caches

    def drop_caches(self) -> None:
        for node in list(self._nodes.values()):
            node.entries.clear()
            node.listing = node.data = None
            node.at = _NEVER
            if node is not self._root and not node.opens:
                self._forget(node)

    def _forget(self, node: Node) -> None:
        if node.forgotten or node is self._root:
            return
        node.forgotten = True
        self._nodes.pop(node.attributes.ino, None)
        if not node.opens:
            os.close(node.handle)

    def _take_in(self, node: Node, found: Attributes) -> None:
        if found.stamp != node.attributes.stamp:
            node.listing = node.data = None
        node.attributes = found
        node.at = time.monotonic()

    def _ask(self, node: Node) -> Attributes:
        """GETATTR. Raises ESTALE."""
        found = self._server.call("getattr", node.name, lambda: self._server.attributes(node.handle))
        self._take_in(node, found)
        return found

    def fresh(self, node: Node) -> Attributes:
        """Its attributes, asked again where they are too old."""
        limit = self.settings.directories if node.attributes.is_folder else self.settings.attributes
        if time.monotonic() - node.at >= limit:
            return self._ask(node)
        return node.attributes

    def _holds(self, at: float, stamp: tuple[int, ...], folder: Node) -> bool:
        if self.settings.revalidation == "time":
            return time.monotonic() - at < self.settings.directories
        return self.fresh(folder).stamp == stamp

    def _child(self, folder: Node, name: str) -> Node:
        entry = folder.entries.get(name)
        if entry is not None:
            gone = entry.node is not None and entry.node.forgotten
            if not gone and self._holds(entry.at, entry.stamp, folder):
                if entry.node is None:
                    raise FileNotFoundError(errno.ENOENT, name)
                return entry.node
        return self._look_up(folder, name)

    def _look_up(self, folder: Node, name: str) -> Node:
        stamp = folder.attributes.stamp  # as known before, so that a change meanwhile is noticed

        def work() -> int:
            self._server.attributes(folder.handle)
            return self._server.open_handle(folder.handle, name)

        try:
            handle = self._server.call("lookup", name, work)
        except FileNotFoundError:
            folder.entries[name] = Entry(None, time.monotonic(), stamp)
            raise
        return self._adopt(folder, name, handle, stamp)

    def _adopt(self, folder: Node, name: str, handle: int, stamp: tuple[int, ...]) -> Node:
        """The node for a handle that was just opened."""
        try:
            found = self._server.attributes(handle)
        except OSError:
            os.close(handle)
            raise
        node = self._nodes.get(found.ino)
        if node is not None:
            os.close(handle)
            self._take_in(node, found)
        else:
            if len(self._nodes) >= MOST_NODES:
                for old in list(self._nodes.values()):
                    if not old.opens and not old.attributes.is_folder:
                        self._forget(old)
            node = Node(handle, name, found, time.monotonic())
            self._nodes[found.ino] = node
        folder.entries[name] = Entry(node, time.monotonic(), stamp)
        return node

    def _walk(self, path: str) -> Node:
        node = self._root
        for name in path.split("/"):
            if name:
                node = self._child(node, name)
        return node

    def _by_path(self, path: str, work: Callable[[Node], T]) -> T:
        """Walk and do; once more without the caches where a handle was stale, as Linux's path walk does."""
        try:
            return work(self._walk(path))
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        node = self._root
        node.at = _NEVER
        for name in path.split("/"):
            if not name:
                continue
            entry = node.entries.pop(name, None)
            if entry is not None and entry.node is not None:
                try:
                    self._server.attributes(entry.node.handle)
                except OSError:
                    self._forget(entry.node)
            node = self._look_up(node, name)
        return work(node)

    # -- reading

    def getattr(self, path: str) -> Attributes:
        return self._by_path(path, self.getattr_node)

    def getattr_node(self, node: Node) -> Attributes:
        if node.dirty:
            self._write_back(node, keep_error=True)  # size and time are the server's
        return self.fresh(node)

    def readlink(self, path: str) -> str:
        def work(node: Node) -> str:
            self.fresh(node)
            if node.target is None:
                link = os.fsencode("")
                raw = self._server.call("readlink", node.name, lambda: os.readlink(link, dir_fd=node.handle))
                node.target = raw.decode("utf-8", "surrogateescape")
            return node.target

        return self._by_path(path, work)

    def open_folder(self, path: str) -> Node:
        def work(node: Node) -> Node:
            if self.settings.revalidation != "time":
                self._ask(node)
            node.opens += 1
            return node

        return self._by_path(path, work)

    def list(self, node: Node) -> list[tuple[str, int]]:
        self.fresh(node)
        if node.listing is not None:
            names, at, stamp = node.listing
            if self._holds(at, stamp, node):
                return names
        stamp = node.attributes.stamp
        names = self._server.call("readdir", node.name, lambda: self._server.list(node.handle))
        node.listing = (names, time.monotonic(), stamp)
        return names

    def open(self, path: str) -> Node:
        def work(node: Node) -> Node:
            if not node.dirty:
                self._ask(node)
            node.opens += 1
            return node

        return self._by_path(path, work)

    def read(self, node: Node, size: int, offset: int) -> bytes:
        if not node.dirty:
            self.fresh(node)
        if node.attributes.size > LARGEST_CACHED:
            self._write_back(node, keep_error=True)
            return self._server.call("read", node.name, lambda: self._server.read(node.handle, size, offset))
        return bytes(self._contents(node)[offset : offset + size])

    def _contents(self, node: Node) -> bytearray:
        if node.data is None:
            data = bytearray()
            while len(data) < node.attributes.size:
                at = len(data)
                want = min(CHUNK, node.attributes.size - at)
                with self._server.operation("read", node.name):
                    chunk = self._server.read(node.handle, want, at)
                data += chunk
                if len(chunk) < want:
                    break
            node.data = data
            for offset, written in node.dirty:
                _patch(data, offset, written)
        return node.data

    # -- writing

    def write(self, node: Node, data: bytes, offset: int) -> int:
        if node.data is not None:
            _patch(node.data, offset, data)
        if not node.dirty:
            node.dirty_since = time.monotonic()
        if node.dirty and node.dirty[-1][0] + len(node.dirty[-1][1]) == offset and len(node.dirty[-1][1]) < CHUNK:
            before = node.dirty.pop()
            node.dirty.append((before[0], before[1] + data))
        else:
            node.dirty.append((offset, data))
        if not self.settings.write_behind or sum(len(piece) for _, piece in node.dirty) > 4 * CHUNK:
            self._write_back(node)
        return len(data)

    def _write_back(self, node: Node, *, keep_error: bool = False) -> None:
        """Raises: OSError: the server refused; what was not written is lost, as with Linux's NFS."""
        dirty, node.dirty = node.dirty, []
        try:
            for offset, data in dirty:
                with self._server.operation("write", node.name):
                    mine = self._server.attributes(node.handle).stamp == node.attributes.stamp
                    self._server.write(node.handle, data, offset)
                    if not mine:
                        node.data = None  # another client wrote too
                    node.attributes = self._server.attributes(node.handle)
                    node.at = time.monotonic()
        except OSError as error:
            node.data, node.at = None, _NEVER
            if not keep_error:
                raise
            node.write_error = error

    def write_back_old(self) -> None:
        """What the kernel's flusher does now and then. An error is told at the next close or fsync."""
        before = time.monotonic() - self.settings.written_back
        for node in list(self._nodes.values()):
            if node.dirty and node.dirty_since <= before:
                self._write_back(node, keep_error=True)

    def flush(self, node: Node) -> None:
        """At each close()."""
        try:
            self._write_back(node)
        except OSError as error:
            # Also told at the next fsync: a forked child that closes its copy takes no error away from its parent.
            node.write_error = error
            raise
        if node.write_error is not None:
            error, node.write_error = node.write_error, None
            raise error

    def fsync(self, node: Node) -> None:
        self._write_back(node)
        if node.write_error is not None:
            error, node.write_error = node.write_error, None
            raise error
        self._server.call("commit", node.name, lambda: None)

    def release(self, node: Node) -> None:
        if node.dirty:
            self._write_back(node, keep_error=True)
        node.opens -= 1
        if node.opens:
            return
        if node.silly is not None:
            folder, name = node.silly
            node.silly = None
            try:
                self._server.call("remove", name, lambda: os.unlink(name, dir_fd=folder.handle))
            except OSError:
                pass  # left behind, as with a client that lost its server
            self._changed(folder, name)
            self._forget(node)
        if node.forgotten:
            os.close(node.handle)

    def truncate(self, node: Node, length: int) -> None:
        self._write_back(node)
        self._set(node, lambda at: os.truncate(at, length))

    def chmod(self, path: str, mode: int) -> None:
        self._by_path(path, lambda node: self._set(node, lambda at: os.chmod(at, mode)))

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._by_path(path, lambda node: self._set(node, lambda at: os.chown(at, uid, gid)))

    def truncate_path(self, path: str, length: int) -> None:
        self._by_path(path, lambda node: self.truncate(node, length))

    def utimens(self, path: str, atime: int, mtime: int) -> None:
        def work(node: Node) -> None:
            self._write_back(node, keep_error=True)
            info = os.fstat(node.handle)
            times = (self._time_to_set(atime, info.st_atime_ns), self._time_to_set(mtime, info.st_mtime_ns))
            self._set(node, lambda at: os.utime(at, ns=times))

        self._by_path(path, work)

    def _time_to_set(self, ns: int, before: int) -> int:
        if ns == _LINUX_UTIME_OMIT:
            return before
        return time.time_ns() if ns == _LINUX_UTIME_NOW else self._server.own_time(ns)

    def _set(self, node: Node, work: Callable[[str], None]) -> None:
        try:
            with self._server.operation("setattr", node.name):
                self._server.attributes(node.handle)
                if stat.S_ISLNK(node.attributes.mode):
                    return
                work(f"/proc/self/fd/{node.handle}")
        finally:
            node.at, node.data = _NEVER, None

    # -- names

    def _in_folder(self, path: str, operation: str, work: Callable[[Node, str], T]) -> T:
        parent, _, name = path.rpartition("/")

        def in_folder(folder: Node) -> T:
            def on_server() -> T:
                self._server.attributes(folder.handle)
                return work(folder, name)

            try:
                return self._server.call(operation, name, on_server)
            finally:
                self._changed(folder, name)

        return self._by_path(parent, in_folder)

    def _changed(self, folder: Node, name: str) -> None:
        """This client tried to change a folder: it trusts nothing about it any more."""
        folder.at, folder.listing = _NEVER, None
        folder.entries.pop(name, None)
        for missing in [key for key, entry in folder.entries.items() if entry.node is None]:
            del folder.entries[missing]

    def create(self, path: str, mode: int, flags: int, owner: tuple[int, int]) -> Node:
        def work(folder: Node, name: str) -> tuple[Node, int]:
            wanted = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (flags & (os.O_EXCL | os.O_TRUNC))
            with _acting_for(owner):
                os.close(os.open(name, wanted, stat.S_IMODE(mode), dir_fd=folder.handle))
            return folder, self._server.open_handle(folder.handle, name)

        folder, handle = self._in_folder(path, "create", work)
        node = self._adopt(folder, path.rpartition("/")[2], handle, folder.attributes.stamp)
        node.opens += 1
        return node

    def mkdir(self, path: str, mode: int, owner: tuple[int, int]) -> None:
        def work(folder: Node, name: str) -> None:
            with _acting_for(owner):
                os.mkdir(name, mode, dir_fd=folder.handle)

        self._in_folder(path, "mkdir", work)

    def symlink(self, path: str, target: str, owner: tuple[int, int]) -> None:
        def work(folder: Node, name: str) -> None:
            with _acting_for(owner):
                os.symlink(target.encode("utf-8", "surrogateescape"), os.fsencode(name), dir_fd=folder.handle)

        self._in_folder(path, "symlink", work)

    def mknod(self, path: str, mode: int, dev: int) -> None:
        self._in_folder(path, "mknod", lambda folder, name: os.mknod(name, mode, dev, dir_fd=folder.handle))

    def link(self, new: str, existing: str) -> None:
        node = self._by_path(existing, lambda found: found)
        self._write_back(node, keep_error=True)

        def work(folder: Node, name: str) -> None:
            self._server.attributes(node.handle)
            os.link(f"/proc/self/fd/{node.handle}", name, dst_dir_fd=folder.handle, follow_symlinks=True)

        try:
            self._in_folder(new, "link", work)
        finally:
            node.at = _NEVER

    def unlink(self, path: str) -> None:
        node = self._by_path(path, lambda found: found)
        if node.opens and node.silly is None and not node.forgotten:
            self._silly_count += 1
            silly = f".nfs{node.attributes.ino:016x}{self._silly_count:08x}"

            def rename(folder: Node, name: str) -> None:
                os.rename(name, silly, src_dir_fd=folder.handle, dst_dir_fd=folder.handle)
                node.silly = (folder, silly)

            self._in_folder(path, "rename", rename)
            return
        self._in_folder(path, "remove", lambda folder, name: os.unlink(name, dir_fd=folder.handle))
        self._see_whether_gone(node)

    def rmdir(self, path: str) -> None:
        node = self._by_path(path, lambda found: found)
        self._in_folder(path, "rmdir", lambda folder, name: os.rmdir(name, dir_fd=folder.handle))
        self._see_whether_gone(node)

    def rename(self, old: str, new: str) -> None:
        target, _, new_name = new.rpartition("/")
        folder_to = self._by_path(target, lambda found: found)
        try:
            replaced: Node | None = self._by_path(new, lambda found: found)
        except FileNotFoundError:
            replaced = None
        moved = self._by_path(old, lambda found: found)
        self._write_back(moved, keep_error=True)
        try:
            self._in_folder(
                old,
                "rename",
                lambda folder, name: os.rename(name, new_name, src_dir_fd=folder.handle, dst_dir_fd=folder_to.handle),
            )
        finally:
            self._changed(folder_to, new_name)
            moved.at = _NEVER
        if replaced is not None:
            self._see_whether_gone(replaced)

    def _see_whether_gone(self, node: Node) -> None:
        if os.fstat(node.handle).st_nlink == 0:
            self._forget(node)
        else:
            node.at = _NEVER

    def statfs(self) -> os.statvfs_result:
        return self._server.call("statfs", "", lambda: os.statvfs(f"/proc/self/fd/{self._root.handle}"))


def _patch(data: bytearray, offset: int, written: bytes) -> None:
    if len(data) < offset:
        data += bytes(offset - len(data))
    data[offset : offset + len(written)] = written


@contextmanager
def _acting_for(owner: tuple[int, int]) -> Iterator[None]:
    """What is made belongs to the caller from the first moment on: another client may look at once."""
    if os.geteuid() != 0 or owner[0] == 0:
        yield
        return
    # Of this thread alone; glibc hands setuid() on to all threads, but not this.
    _libc.setfsgid(owner[1])
    _libc.setfsuid(owner[0])
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)
