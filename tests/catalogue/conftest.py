"""For the catalogue of failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.failure_catalogue import Catalogue


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden reports in place of comparing")


@pytest.fixture
def catalogue(request: pytest.FixtureRequest) -> Iterator[Catalogue]:
    """A folder for a run, and what it is compared with."""
    opened = Catalogue(update=bool(request.config.getoption("--update-golden")))
    try:
        yield opened
    finally:
        opened.close()
