"""For the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.rigs.network_mounts import NetworkMounts, started_together


@pytest.fixture(scope="session")
def network_mounts() -> Iterator[Callable[[str], NetworkMounts]]:
    """Gives the network filesystem of that name, two clients; skips the test, or fails it in CI, where it can't run."""
    with started_together() as wait_for:
        yield wait_for
