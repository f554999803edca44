"""The how-manyeth agent of its node an agent is: later agents supersede earlier ones, whatever the node's clock says.

A node can come back with another time than it had, an hour back say. Its new agent would take the dead one for the
newer, and leave; so starts are counted in the store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.clock import Clock
from hpc_elastic.store.base import Store, StoreFullError
from hpc_elastic.store.file_store import FileStore

PATIENCE = 120.0
"""Seconds for which a filesystem that refuses is waited for, as the health check does before a round."""
"""Seconds for which a filesystem may refuse."""
_PAUSE = 0.1


def claim_start_number(root: Path, node: int, *, clock: Clock) -> int:
    """Count this start, in the attempt's store at `root`. From 1.

    Raises:
        OSError: the filesystem has refused for `PATIENCE`.
        UnsafePathError, StoreError: the store is not usable.
    """
    return next_start_number(lambda: FileStore(root, clock=clock), node, clock=clock)


def next_start_number(open_store: Callable[[], Store], node: int, *, clock: Clock) -> int:
    """`claim_start_number`, on any store."""
    folder = f"start/{node:05d}"
    mine = os.urandom(8).hex()
    least = 1
    deadline = clock.monotonic() + PATIENCE
    while True:
        try:
            store = open_store()
            number = max([least, *(int(name) + 1 for name in store.list(folder) if name.isdecimal())])
            try:
                if store.put_if_absent(f"{folder}/{number}", mine):
                    return number
            except StoreFullError:
                return number  # not written down: a later start has the same one, and goes by its clock
            least = number + 1  # a cache hid the last one
        except OSError:
            if clock.monotonic() >= deadline:
                raise
        clock.wait(threading.Event(), _PAUSE)
