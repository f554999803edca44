"""The kernel's FUSE requests, one after another, to the client's caches."""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.rigs.nfs_emulator.client import Client, Node
from tests.rigs.nfs_emulator.fuse_library import mfusepy
from tests.rigs.nfs_emulator.server import Attributes, Server

FUSE_OPTIONS = {
    "foreground": True,
    "allow_other": True,
    "default_permissions": True,
    # The kernel caches nothing: the caches are ours.
    "entry_timeout": 0,
    "negative_timeout": 0,
    "attr_timeout": 0,
    "use_ino": True,
    "direct_io": True,
    "hard_remove": True,  # else libfuse renames files that are removed while open, before we can
}


def _passed_on(name: str) -> Callable[..., int]:
    """An operation that is the client's own."""

    def operation(self: EmulatedFilesystem, *arguments: Any) -> int:
        with self.lock_of_mount:
            getattr(self._client, name)(*arguments)
        return 0

    return operation


class EmulatedFilesystem(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True
    mknod, link, rename = _passed_on("mknod"), _passed_on("link"), _passed_on("rename")
    unlink, rmdir = _passed_on("unlink"), _passed_on("rmdir")
    chmod, chown = _passed_on("chmod"), _passed_on("chown")

    def __init__(self, server: Server, client: Client) -> None:
        self._server = server
        self._client = client
        self.lock_of_mount = threading.Lock()
        self._open: dict[int, Node] = {}
        self._flocks: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def _remember(self, node: Node) -> int:
        number = next(self._numbers)
        self._open[number] = node
        return number

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self.lock_of_mount:
            if fh is not None and fh in self._open:
                return _told(self._client.getattr_node(self._open[fh]))
            return _told(self._client.getattr(path))

    def readlink(self, path: str) -> str:
        with self.lock_of_mount:
            return self._client.readlink(path)

    def opendir(self, path: str) -> int:
        with self.lock_of_mount:
            return self._remember(self._client.open_folder(path))

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        with self.lock_of_mount:
            found = [(".", 1), ("..", 1), *self._client.list(self._open[fh])]
        return [(name, {"st_ino": ino}, 0) for name, ino in found]

    def releasedir(self, path: str, fh: int) -> int:
        with self.lock_of_mount:
            self._client.release(self._open.pop(fh))
        return 0

    def open(self, path: str, flags: int) -> int:
        with self.lock_of_mount:
            return self._remember(self._client.open(path))

    def create(self, path: str, mode: int, fi: int = 0) -> int:
        with self.lock_of_mount:
            return self._remember(self._client.create(path, mode, fi, mfusepy.fuse_get_context()[:2]))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self.lock_of_mount:
            return self._client.read(self._open[fh], size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self.lock_of_mount:
            return self._client.write(self._open[fh], data, offset)

    def flush(self, path: str, fh: int) -> int:
        with self.lock_of_mount:
            self._client.flush(self._open[fh])
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        with self.lock_of_mount:
            self._client.fsync(self._open[fh])
        return 0

    def release(self, path: str, fh: int) -> int:
        with self.lock_of_mount:
            self._client.release(self._open.pop(fh))
            fd = self._flocks.pop(fh, None)
        if fd is not None:
            os.close(fd)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        with self.lock_of_mount:
            if fh is not None and fh in self._open:
                self._client.truncate(self._open[fh], length)
            else:
                self._client.truncate_path(path, length)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        with self.lock_of_mount:
            self._client.mkdir(path, mode, mfusepy.fuse_get_context()[:2])
        return 0

    def symlink(self, target: str, source: str) -> int:
        with self.lock_of_mount:
            self._client.symlink(target, source, mfusepy.fuse_get_context()[:2])
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        now = time.time_ns()
        with self.lock_of_mount:
            self._client.utimens(path, *(times or (now, now)))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        with self.lock_of_mount:
            info = self._client.statfs()
        return {name: getattr(info, name) for name in dir(info) if name.startswith("f_") and name != "f_fsid"}

    def flock(self, path: str, fh: int, op: int) -> int:
        node = self._open[fh]
        with self._server.operation("lock", node.name):
            if fh not in self._flocks:  # a description of its own: one lock for each open file
                self._flocks[fh] = os.open(f"/proc/self/fd/{node.handle}", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._flocks[fh], op)  # may wait: without the mount's lock
        return 0


def _told(found: Attributes) -> dict[str, Any]:
    return {
        "st_mode": found.mode,
        "st_nlink": found.nlink,
        "st_uid": found.uid,
        "st_gid": found.gid,
        "st_size": found.size,
        "st_ino": found.ino,
        "st_blocks": found.blocks,
        "st_atime": found.atime,
        "st_mtime": found.mtime,
        "st_ctime": found.ctime,
    }
