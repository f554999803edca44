"""The security tier: what another normal user of the same machine and filesystem can do to a run.

Root makes two throw-away users, once per session. Elsewhere the tests are skipped with one line that says why; in CI
(``CI=true``), as root, they fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.two_users import TwoUsers, User, missing_prerequisites, two_users


@pytest.fixture(scope="session")
def users() -> Iterator[TwoUsers]:
    """Both users, for the session."""
    reasons = missing_prerequisites()
    if reasons:
        why = f"tests with two users: {'; '.join(reasons)}"
        if os.geteuid() == 0 and os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    with two_users() as made:
        yield made


@pytest.fixture
def attacker(users: TwoUsers) -> User:
    """A normal user who owns none of the runs."""
    return users.attacker


@pytest.fixture
def victim(users: TwoUsers) -> User:
    """The normal user whose runs are attacked."""
    return users.victim


@pytest.fixture
def shared(users: TwoUsers) -> Iterator[Path]:
    """A folder, empty for each test, that both users can write into (mode 0777, not sticky)."""
    folder = users.shared / "case"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)
