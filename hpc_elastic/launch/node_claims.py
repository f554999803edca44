"""The nodes of an allocation that a run takes: requested, and not held by another run of the allocation.

A claim is a flock(2) on a file of this host, one for each node, which the srun that runs the node's agent inherits (as
filelock's can't be): it ends with the last process that holds it. Other hosts do not see the claims.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.slurm.notation import compress

logger = logging.getLogger(__name__)

_KEPT_SECONDS = 7 * 86400.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class NodeWish(Struct, frozen=True, kw_only=True):
    listed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    """Names that the allocation does not have are no mistake: it was made without them."""
    least: int | None = None
    """MIN of ``--nodes``; None: not given, all free nodes are wanted."""
    most: int | None = None


def choose_nodes(allocated: Sequence[str], wish: NodeWish, taken: Mapping[str, str]) -> tuple[str, ...]:
    listed, excluded = set(wish.listed), set(wish.excluded)
    foreign = [node for node in wish.listed if node not in allocated]
    if foreign:
        raise UsageError(f"--nodelist: {compress(foreign)} not in this allocation, which has {compress(allocated)}")
    if both := listed & excluded:
        raise UsageError(f"--nodelist and --exclude both name {compress(sorted(both))}")
    allowed = [node for node in allocated if node not in excluded]
    if not allowed:
        raise UsageError(f"--exclude {compress(wish.excluded)}: this allocation has no other node")
    if busy := [node for node in allowed if node in listed and node in taken]:
        raise UsageError(f"--nodelist: {_in_use(busy, taken)}")
    if wish.most is not None and len(listed) > wish.most:
        raise UsageError(f"--nodelist names {len(listed)} nodes, and --nodes with the spares is {wish.most}")
    free = [node for node in allowed if node not in taken]
    if wish.most is None:
        busy = [node for node in allowed if node in taken]
        if busy and not listed:
            rest = f"give --nodelist {compress(free)} for the others" if free else "wait for its end"
            raise UsageError(f"{_in_use(busy, taken)}; {rest}")
        return tuple(node for node in allowed if not listed or node in listed)
    chosen = listed | set([node for node in free if node not in listed][: wish.most - len(listed)])
    if len(chosen) < (wish.least or 1) and taken:
        raise UsageError(
            f"--nodes {wish.least}: {len(chosen)} of this allocation's {len(allocated)} nodes are free: "
            f"{_in_use([node for node in allowed if node in taken], taken)}"
        )
    return tuple(node for node in allowed if node in chosen)


def _in_use(nodes: Sequence[str], taken: Mapping[str, str]) -> str:
    runs = ", ".join(dict.fromkeys(taken[node] or "another run" for node in nodes))
    return f"{compress(nodes)} of this allocation in use by {runs}"


@contextmanager
def host_lock(path: Path, *, seconds: float) -> Iterator[bool]:
    """Hold a lock file while the body runs; yields whether it is held, after waiting for `seconds` at most.

    The file is on a filesystem of this host, in a private folder. The kernel releases the lock when the process ends,
    however that ends. Programs that the body starts do not inherit it.
    """
    from filelock import UnixFileLock  # 40 ms: only where a lock is taken

    # No other argument: Debian 12 has 3.9, which knows none. The folder is private, and local filesystems have flock.
    lock = UnixFileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
        logger.warning("going on without the lock %s: %s", path, error)
    try:
        yield lock.is_locked
    finally:
        lock.release()


class NodeClaims(Struct):
    folder: Path | None
    """None: no claims can be made here, and runs are not kept apart."""
    held: dict[str, int] = field(default_factory=dict)

    def claim(self, allocated: Sequence[str], wish: NodeWish) -> tuple[str, ...]:
        """Choose nodes and hold them until all that inherit the descriptors have ended."""
        if self.folder is None:
            return choose_nodes(allocated, wish, {})
        chosen: tuple[str, ...] = ()
        try:
            with host_lock(self.folder / "choosing", seconds=10.0):
                taken = self._lock_all(self.folder, allocated)
                try:
                    chosen = choose_nodes(allocated, wish, taken)
                finally:
                    for node in [node for node in self.held if node not in chosen]:
                        os.close(self.held.pop(node))
            self.sign("")
        except OSError as error:
            logger.warning("runs of this allocation are not kept apart: %s", error)  # a full /dev/shm, say
            return choose_nodes(allocated, wish, {})
        return chosen

    def sign(self, run: str) -> None:
        for fd in self.held.values():
            os.truncate(fd, 0)
            os.pwrite(fd, run.encode("utf-8", "surrogateescape"), 0)

    def _lock_all(self, folder: Path, allocated: Sequence[str]) -> dict[str, str]:
        taken = {}
        for node in allocated:
            fd = os.open(folder / _UNSAFE.sub("-", node), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.held[node] = fd
            except BlockingIOError:
                taken[node] = os.pread(fd, 500, 0).decode("utf-8", "replace")
                os.close(fd)
        return taken


def open_claims(job_id: str, restart_count: int, bases: Iterator[Path], *, clock: Clock) -> NodeClaims:
    """The claims on an allocation's nodes, in the first of `bases` that can be written. Removes old ones."""
    for base in bases:
        try:
            top = base / f"hpc-elastic-nodes-{os.getuid()}"
            make_private_dir(top)
            folder = top / f"{_UNSAFE.sub('-', job_id)}-{restart_count}"
            make_private_dir(folder)
            for other in top.iterdir():
                if other != folder and clock.time_ns() / 1e9 - other.stat().st_mtime > _KEPT_SECONDS:
                    _remove_unused(other)
            return NodeClaims(folder)
        except (OSError, UnsafePathError):
            continue
    return NodeClaims(None)


def _remove_unused(folder: Path) -> None:
    paths = list(folder.iterdir())
    fds = [os.open(path, os.O_RDWR | os.O_NOFOLLOW) for path in paths]
    try:
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in paths:
            path.unlink()
        folder.rmdir()
    except OSError:
        pass  # a job that has lasted for a week
    finally:
        for fd in fds:
            os.close(fd)
