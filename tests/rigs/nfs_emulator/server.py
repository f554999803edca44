"""The server's side of one mount: operations on handles, counted, made to fail, to wait, or to tell coarse times."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.rigs.nfs_emulator.settings import Fault, MountSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attributes:
    """What GETATTR answers. Times in nanoseconds of the server's clock, as coarse as it tells them."""

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    ino: int
    blocks: int
    atime: int
    mtime: int
    ctime: int

    @property
    def stamp(self) -> tuple[int, ...]:
        """What a client compares to notice a change."""
        return (self.mtime, self.ctime, self.size)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Server:
    """The backing folder, by handles: O_PATH descriptors, which keep their inode's number from being used again."""

    def __init__(self, backing: str, settings: MountSettings) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self.root = os.open(backing, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._faults: list[Fault] = []
        self._guard, self._wire = threading.Lock(), threading.Lock()
        self._running = threading.Event()
        self._running.set()

    # -- what tests control

    def add_fault(self, fault: Fault) -> None:
        _ = fault.number  # an unknown name is refused here
        with self._guard:
            self._faults.append(fault)

    def heal(self) -> None:
        with self._guard:
            self._faults.clear()

    def freeze(self) -> None:
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    def take_fault(self, operation: str, name: str) -> Fault | None:
        with self._guard:
            for index, fault in enumerate(self._faults):
                if not fault.matches(operation, name):
                    continue
                if fault.times is not None:
                    if fault.times <= 1:
                        del self._faults[index]
                    else:
                        self._faults[index] = replace(fault, times=fault.times - 1)
                return fault
        return None

    # -- operations

    def call(self, operation: str, name: str, work: Callable[[], T]) -> T:
        """Do `work` as one counted operation, unless a fault says otherwise."""
        with self.operation(operation, name):
            return work()

    @contextmanager
    def operation(self, operation: str, name: str) -> Iterator[None]:
        self.counters[operation] += 1
        self._running.wait()
        if self.settings.latency:
            time.sleep(self.settings.latency)
        fault = self.take_fault(operation, name)
        if fault is not None and not fault.done:
            raise OSError(fault.number, os.strerror(fault.number))
        yield
        if fault is not None:
            raise OSError(fault.number, os.strerror(fault.number))

    def attributes(self, handle: int) -> Attributes:
        """Without counting: as part of another operation's reply. Raises ESTALE where the object was removed."""
        info = os.fstat(handle)
        if info.st_nlink == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return Attributes(
            mode=info.st_mode,
            nlink=info.st_nlink,
            uid=info.st_uid,
            gid=info.st_gid,
            size=info.st_size,
            ino=info.st_ino,
            blocks=info.st_blocks,
            atime=self._told(info.st_atime_ns),
            mtime=self._told(info.st_mtime_ns),
            ctime=self._told(info.st_ctime_ns),
        )

    def _told(self, ns: int) -> int:
        shifted = ns + int(self.settings.clock_offset * 1e9)
        step = int(self.settings.granularity * 1e9)
        return shifted - shifted % step if step else shifted

    def own_time(self, ns: int) -> int:
        """A time that a client sets, in the backing filesystem's terms."""
        return ns - int(self.settings.clock_offset * 1e9)

    def open_handle(self, folder: int, name: str) -> int:
        """Without counting. Raises ENOENT."""
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)

    def _carry(self, size: int) -> None:
        """Wait as long as the bytes take: one operation after the other has the server's whole bandwidth."""
        if self.settings.bandwidth:
            with self._wire:
                time.sleep(size / self.settings.bandwidth)

    def read(self, handle: int, size: int, offset: int) -> bytes:
        self.attributes(handle)
        self._carry(size)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def write(self, handle: int, data: bytes, offset: int) -> None:
        self.attributes(handle)
        self._carry(len(data))
        fd = os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                done = os.pwrite(fd, view, offset)
                view, offset = view[done:], offset + done
        finally:
            os.close(fd)

    def list(self, handle: int) -> list[tuple[str, int]]:
        """Names and inode numbers."""
        self.attributes(handle)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(fd) as entries:
                return [(entry.name, entry.inode()) for entry in entries]
        finally:
            os.close(fd)
