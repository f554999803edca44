"""A supervisor with all that is around it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rigs.supervisor_stage import Stage


@pytest.fixture
def s() -> Iterator[Stage]:
    """One for a run of three nodes that goes on with two."""
    ready, never = os.eventfd(1), os.eventfd(0)
    yield Stage(ready, never)
    os.close(ready)
    os.close(never)
