"""Waiting until one of several descriptors can be read, whatever their numbers.

Not `select.select`: it takes no descriptor beyond 1023, and an agent of 200 workers has more.
"""

from __future__ import annotations

import math
import select
from collections.abc import Iterable
from typing import Protocol


class HasFileno(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int: ...


def wait_readable(watched: Iterable[int | HasFileno], seconds: float) -> set[int]:
    """Wait until something can be read, has ended or is broken, or the time has passed.

    Args:
        watched: Descriptors, or what has one.
        seconds: How long at most; rounded up to whole milliseconds.

    Returns:
        The descriptors (numbers) that are ready; empty when the time has passed.
    """
    poller = select.poll()
    for one in watched:
        poller.register(one if isinstance(one, int) else one.fileno(), select.POLLIN)
    return {fd for fd, _ in poller.poll(max(0, math.ceil(seconds * 1000)))}
