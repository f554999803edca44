"""A lock between the processes of one user on one host, for what several of them change.

This module alone imports filelock. The lock file lies on a filesystem of this host, never beside what it protects: a
home may be on NFS, where flock(2) asks the server, is refused by some, and waits without end for one that is down
(``LOCK_NB`` too). So two hosts do not exclude each other. What several hosts change is made of files that are written
once, or goes through the store.

Nothing fails for want of a lock: after the timeout, or where none can be had, the caller goes on without it.

Protected today: the choice of an allocation's nodes (`launch.node_claims`). Elsewhere there is nothing to protect: the
index of jobs (`run.index`) is files of their own name, written once and whole; ``hpc-elastic config`` writes nothing;
in the runs folder (``.steps`` among it) several hosts write. A run's nodes.json is written by its supervisor without
the lock: ``--forget-nodes`` comes from another host as a rule.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import UnixFileLock

logger = logging.getLogger(__name__)


@contextmanager
def host_lock(path: Path, *, seconds: float) -> Iterator[bool]:
    """Hold a lock file while the body runs. The kernel releases it when the process ends, however that ends.

    Programs that the body starts do not inherit it.

    Args:
        path: On a filesystem of this host, in a folder that is closed to others.
        seconds: How long another process that holds it is waited for.

    Yields:
        Whether it is held.
    """
    lock = _acquired(path, seconds)
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
