"""A lock between the processes of one user on one host, for a file that several of them change.

This module alone imports filelock. The lock file lies on a filesystem of this host, never beside what it protects: a
home may be on NFS, where flock(2) asks the server, is refused by some, and waits without end for one that is down
(``LOCK_NB`` too). So two hosts do not exclude each other. What several hosts change is made of files that are written
once, or goes through the store.

Nothing fails for want of a lock: after the timeout, or where none can be had, the caller goes on without it.

Protected today: what ``--forget-nodes`` rewrites (`run.node_records`), and the choice of an allocation's nodes
(`launch.node_claims`). Elsewhere there is nothing to protect: the index of jobs (`run.index`) and what attempts add to
the history of nodes are files of their own name, written once and whole; ``hpc-elastic config`` writes nothing; in
the runs folder (``.steps`` among it) several hosts write. A run's nodes.json is written by its supervisor without the
lock: ``--forget-nodes`` comes from another host as a rule.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_elastic.base.files import make_private_dir
from hpc_elastic.errors import UnsafePathError

if TYPE_CHECKING:
    from filelock import UnixFileLock

logger = logging.getLogger(__name__)

BASES = (Path("/dev/shm"), Path("/tmp"))
"""Where the folder of lock files may be; the first that can be used counts."""


def host_lock_path(name: str) -> Path | None:
    """The lock file of this user on this host for one kind of change, wherever the changed files lie.

    Args:
        name: Of the kind of change. The file is kept, so names do not come from paths or ids.

    Returns:
        None where this host has no folder for lock files.
    """
    for base in BASES:
        folder = base / f"hpc-elastic-locks-{os.geteuid()}"
        try:
            make_private_dir(folder)
        except (OSError, UnsafePathError):
            continue  # full, read-only, or planted by another user
        return folder / name
    return None


@contextmanager
def host_lock(path: Path | None, *, seconds: float) -> Iterator[bool]:
    """Hold a lock file while the body runs. The kernel releases it when the process ends, however that ends.

    Programs that the body starts do not inherit it.

    Args:
        path: On a filesystem of this host; None: there is no lock to be had.
        seconds: How long another process that holds it is waited for.

    Yields:
        Whether it is held.
    """
    lock = None if path is None else _acquired(path, seconds)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _acquired(path: Path, seconds: float) -> UnixFileLock | None:
    from filelock import UnixFileLock  # 40 ms: only where a lock is taken

    # No other argument: Debian 12 has 3.9, which knows none. The folder is private, and local filesystems have flock.
    lock = UnixFileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
        logger.warning("going on without the lock %s: %s", path, error)
        return None
    return lock
