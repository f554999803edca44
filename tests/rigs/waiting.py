"""Waiting for what another process, or another host's mount, is about to show."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "the condition",
    *,
    seconds: float = 120.0,
    every: float = 0.005,
) -> T:
    """Wait for a condition with a deadline, and look `every` so many seconds. Returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(every)
    return value
