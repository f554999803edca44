"""A descriptor kept for the moment when there is none left.

Who can open nothing can't look at ``/proc``, and a look that fails must not pass for "there is no process": workers
would be taken for gone that still run. So one descriptor is held back, and lent to one look at a time.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class SpareDescriptor:
    """One descriptor, held by `hold` and given up while `lend` needs its number. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def hold(self) -> None:
        """Take it, where it is not held. To be called while there are descriptors; there may be none: no matter."""
        with self._lock:
            self._take()

    def lend(self, action: Callable[[], T]) -> T:
        """Do what needs a descriptor for a moment, with the spare one where there is no other.

        Raises:
            OSError: what `action` raised; no descriptor, where the spare one was not held, or was snatched away.
        """
        try:
            return action()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            try:
                return action()
            finally:
                self._take()

    def _take(self) -> None:
        if self._fd < 0:
            try:
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                pass  # the next one that needs it finds out


SPARE = SpareDescriptor()
"""This process'. Nothing is opened before `hold`."""
