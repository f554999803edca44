"""A lock between the processes of one user on one host, for resources that several of them change.

The lock file lies on a filesystem of this host, never beside the data: NFS asks the server for flock(2), which may
refuse, or wait without end (``LOCK_NB`` too). Nothing fails without the lock: after the timeout the caller continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


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
