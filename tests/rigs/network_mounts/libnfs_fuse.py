"""A mount of an NFSv3 export, by libnfs and FUSE: a client of a real server where the kernel has none.

::

    python -m tests.rigs.network_mounts.libnfs_fuse SERVER EXPORT FOLDER SECONDS

The kernel trusts names that were there, and attributes, for so many seconds; libnfs remembers nothing. It stays in the
foreground until it is unmounted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from typing import Any

import mfusepy

_STAT = ("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks", "atime", "mtime", "ctime",
         "atime_nsec", "mtime_nsec", "ctime_nsec", "used")  # fmt: skip
_UNCHANGED = (-1, 2**32 - 1)


class _Stat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _STAT]


class _Entry(ctypes.Structure):
    _fields_ = [("next", ctypes.c_void_p), ("name", ctypes.c_char_p), ("inode", ctypes.c_uint64)]


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("microseconds", ctypes.c_long)]


class Mount(mfusepy.Operations):  # type: ignore[misc, unused-ignore]
    """One client. FUSE calls from one thread."""

    use_ns = True

    def __init__(self, server: str, export: str) -> None:
        self._lib = ctypes.CDLL("libnfs.so.13")
        self._lib.nfs_init_context.restype = ctypes.c_void_p
        self._lib.nfs_get_error.restype = ctypes.c_char_p
        self._lib.nfs_readdir.restype = ctypes.POINTER(_Entry)
        self._nfs = ctypes.c_void_p(self._lib.nfs_init_context())
        if self._lib.nfs_mount(self._nfs, server.encode(), export.encode()) != 0:
            raise SystemExit(f"{server}:{export}: {self._lib.nfs_get_error(self._nfs)!r}")
        self._lib.nfs_set_dircache(self._nfs, 0)
        self._open: dict[int, ctypes.c_void_p] = {}
        self._count = 0

    def _do(self, operation: str, *arguments: Any) -> int:
        told = [os.fsencode(each) if isinstance(each, str) else each for each in arguments]
        result: int = getattr(self._lib, f"nfs_{operation}")(self._nfs, *told)
        if result < 0:
            raise mfusepy.FuseOSError(-result)
        return result

    def _keep(self, handle: ctypes.c_void_p) -> int:
        self._count += 1
        self._open[self._count] = handle
        return self._count

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = _Stat()
        self._do("lstat64", path, ctypes.byref(found))
        told = {f"st_{name}": getattr(found, name) for name in ("mode", "ino", "nlink", "uid", "gid", "size")}
        for name in ("atime", "mtime", "ctime"):
            told[f"st_{name}"] = getattr(found, name) * 10**9 + getattr(found, f"{name}_nsec")
        return {**told, "st_blocks": found.used // 512}

    def readdir(self, path: str, fh: int) -> list[str]:
        folder = ctypes.c_void_p()
        self._do("opendir", path, ctypes.byref(folder))
        names = []
        while entry := self._lib.nfs_readdir(self._nfs, folder):
            names.append(os.fsdecode(entry.contents.name))
        self._lib.nfs_closedir(self._nfs, folder)
        return names

    def readlink(self, path: str) -> str:
        target = ctypes.create_string_buffer(4096)
        self._do("readlink", path, target, 4096)
        return os.fsdecode(target.value)

    def mkdir(self, path: str, mode: int) -> int:
        return self._do("mkdir2", path, mode)

    def rmdir(self, path: str) -> int:
        return self._do("rmdir", path)

    def unlink(self, path: str) -> int:
        return self._do("unlink", path)

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        if flags:
            raise mfusepy.FuseOSError(errno.EINVAL)
        return self._do("rename", old, new)

    def symlink(self, target: str, source: str) -> int:
        return self._do("symlink", source, target)

    def link(self, target: str, source: str) -> int:
        return self._do("link", source, target)

    def chmod(self, path: str, mode: int) -> int:
        return self._do("chmod", path, mode & 0o7777)

    def chown(self, path: str, uid: int, gid: int) -> int:
        now = self.getattr(path)
        owner = now["st_uid"] if uid in _UNCHANGED else uid
        return self._do("lchown", path, owner, now["st_gid"] if gid in _UNCHANGED else gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        told = (_Time * 2)(*(_Time(t // 10**9, t % 10**9 // 1000) for t in times or (time.time_ns(),) * 2))
        return self._do("lutimes", path, told)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return self._do("truncate", path, ctypes.c_uint64(length))

    def open(self, path: str, flags: int) -> int:
        handle = ctypes.c_void_p()
        self._do("open", path, flags & (os.O_ACCMODE | os.O_TRUNC), ctypes.byref(handle))
        return self._keep(handle)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        handle = ctypes.c_void_p()
        self._do("open2", path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode & 0o7777, ctypes.byref(handle))
        return self._keep(handle)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        count = self._do("pread", self._open[fh], ctypes.c_uint64(offset), ctypes.c_uint64(size), found)
        return found.raw[:count]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._do("pwrite", self._open[fh], ctypes.c_uint64(offset), ctypes.c_uint64(len(data)), data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return self._do("fsync", self._open[fh])

    def flush(self, path: str, fh: int) -> int:
        return self.fsync(path, 0, fh)

    def release(self, path: str, fh: int) -> int:
        return self._do("close", self._open.pop(fh))


def main(server: str, export: str, folder: str, seconds: str) -> None:
    trusted = dict.fromkeys(("attr_timeout", "entry_timeout"), float(seconds))
    mfusepy.FUSE(
        Mount(server, export), folder, foreground=True, nothreads=True, allow_other=True, direct_io=True,
        fsname="libnfs", subtype="nfs", **trusted,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
