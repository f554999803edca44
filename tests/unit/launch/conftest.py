"""A supervisor with all that is around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from tests.rigs.supervisor_stage import SETTINGS, Stage


@pytest.fixture
def stage() -> Iterator[Callable[[RendezvousSettings], Stage]]:
    """Makes one for a run of the given settings."""
    ready, never = os.eventfd(1), os.eventfd(0)
    yield lambda settings: Stage(ready, never, settings)
    os.close(ready)
    os.close(never)


@pytest.fixture
def s(stage: Callable[..., Stage]) -> Stage:
    """One for a run of three nodes that goes on with two."""
    return stage(SETTINGS)
