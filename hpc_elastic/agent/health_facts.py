"""What a node's health is judged by, measured. Every function may hang where a mount does: each has its own thread."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from hpc_elastic.agent.health import ClockOffset, MemoryFacts, RoomFacts, SharedFacts, size
from hpc_elastic.atomic_file import make_private_dir
from hpc_elastic.clock import Clock
from hpc_elastic.errors import UnsafePathError
from hpc_elastic.file_thread import is_refusal
from hpc_elastic.host_facts import available_memory
from hpc_elastic.processes.cgroup import memory_folders
from hpc_elastic.processes.spare_fd import OUT_OF_DESCRIPTORS

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def measure_room(path: str) -> RoomFacts:
    """How much is free on the filesystem of `path`; a folder that is not there has no want of room."""
    try:
        found = os.statvfs(path)
    except (FileNotFoundError, PermissionError):
        return RoomFacts(path=path, free=_NO_LIMIT)
    except OSError as error:
        return RoomFacts(path=path, error=error.strerror or str(error))
    # Some filesystems count no inodes at all: then both are 0.
    return RoomFacts(
        path=path, free=found.f_bavail * found.f_frsize, has_inodes=not found.f_files or found.f_favail > 0
    )


def measure_memory(proc: str = "/proc") -> MemoryFacts | None:
    """The least of what the node and the cgroups above this process have left; None where nothing can be read.

    What the kernel keeps of files counts as free: it gives that up first. `proc`: where the cgroups are looked up.
    """
    found: list[MemoryFacts] = []
    available = available_memory()
    if available is not None:
        found.append(MemoryFacts(free=available))
    for folder, is_v2 in memory_folders(proc=proc):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(os.path.join(folder, name)) for name in names)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        kept = _kept_of_files(os.path.join(folder, "memory.stat"), is_v2=is_v2)
        free = limit - max(0, used - kept)
        found.append(MemoryFacts(free=max(0, free), limited_by=f"the cgroup's limit of {size(limit)}"))
    return min(found, key=lambda facts: facts.free, default=None)


def measure_shared(path: Path, clock: Clock) -> SharedFacts:
    """Write a few bytes to a file of one's own, have them on the server, and read them back.

    Args:
        path: The file; it is left there, and rewritten the next time.
        clock: The wall clock that the server's stamp is compared with.
    """
    text = os.urandom(16).hex().encode()
    folder = str(path.parent)
    try:
        make_private_dir(path.parent)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            before = clock.time_ns()
            os.pwrite(fd, text, 0)
            _sync(fd)
            after = clock.time_ns()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            back = os.pread(fd, len(text) + 1, 0)
            stamp = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
    except FileNotFoundError:
        return SharedFacts(path=folder)  # somebody removed the run: the store says so itself, and better
    except OSError as error:
        return SharedFacts(
            path=folder,
            error=_no_descriptor(error) or error.strerror or str(error),
            is_full=error.errno in _FULL,
            lacks_descriptor=error.errno in OUT_OF_DESCRIPTORS,
            is_refusal=is_refusal(error),
        )
    except UnsafePathError as error:
        return SharedFacts(path=folder, error=str(error))
    if back != text:
        return SharedFacts(path=folder, error="what was written is not what is read back")
    return SharedFacts(path=folder, clock=ClockOffset(least=(stamp - after) / 1e9, most=(stamp - before) / 1e9))


def _no_descriptor(error: OSError) -> str:
    """Who has none left, in words; empty where the error is another one."""
    if error.errno == errno.EMFILE:
        return f"open files: an agent may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -Hn)"
    return "the whole node has no open file left (fs.file-max)" if error.errno == errno.ENFILE else ""


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None  # "max" among them


def _kept_of_files(path: str, *, is_v2: bool) -> int:
    wanted = ("inactive_file", "active_file") if is_v2 else ("total_inactive_file", "total_active_file")
    kept = 0
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key in wanted:
                    kept += int(value)
    except (OSError, ValueError):
        pass
    return kept
