"""For the catalogue of failures.

Whatever the workers' start method, what a report states of a failure is the same: a case has one expectation and one
golden file, and runs with both. ``--start-method spawn`` or ``forkserver`` leaves the other out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.failure_catalogue import Catalogue
from tests.rigs.local_run import START_METHODS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden reports in place of comparing")
    parser.addoption("--start-method", choices=START_METHODS, help="of the workers, in place of both")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "start_method" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--start-method")
        metafunc.parametrize("start_method", [chosen] if chosen else START_METHODS)


@pytest.fixture
def catalogue(request: pytest.FixtureRequest, start_method: str) -> Iterator[Catalogue]:
    """A folder for a run, and what it is compared with."""
    opened = Catalogue(update=bool(request.config.getoption("--update-golden")), start_method=start_method)
    try:
        yield opened
    finally:
        opened.close()
