"""One browser for all tests of this folder; without it they are skipped, and in CI they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser, missing, started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    why = missing()
    if why and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"no browser in CI: {why}")
    if why:
        pytest.skip(why)
    with started() as window:
        yield window


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """The run directories of these tests are large, and need to outlive nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fdatasync", lambda fd: None)
        patch.setattr("os.fsync", lambda fd: None)
        yield
