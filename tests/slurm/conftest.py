"""The real-Slurm tier: one cluster of four nodes that the session's tests share, healed after each.

Where no rig can run, the tests are skipped with one line that says why; in CI (``CI=true``), or with
``HPC_ELASTIC_REQUIRE_SLURM=1``, they fail instead. ``HPC_ELASTIC_SLURM_FS=emulated`` has all of them run
on emulated NFS. ``HPC_ELASTIC_SLURM_RELEASE=trixie`` has those marked ``any_release`` run on that Debian release's
Slurm, in a root folder of its own (made once, in minutes), without accounting.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.rigs.slurm_cluster import SlurmCluster, caches_of, missing_prerequisites, must_run
from tests.rigs.slurm_runs import SlurmRuns

_HERE = Path(__file__).parent
_LOG_CHARACTERS = 2500
_RELEASE = os.environ.get("HPC_ELASTIC_SLURM_RELEASE", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("slurm")
    if _RELEASE:
        left_out = [item for item in items if _HERE in item.path.parents and not _runs_on_any_release(item)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _runs_on_any_release(item: pytest.Item) -> bool:
    """The mark is for the function; of its filesystems only the plain one is there."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return item.get_closest_marker("any_release") is not None and parameters.get("cluster", "plain") == "plain"


@pytest.fixture(scope="session")
def slurm_can_run() -> None:
    """Skip, or fail where the tier must run, with the reason in one line."""
    reasons = missing_prerequisites()
    if not reasons:
        return
    why = f"real-Slurm tests: {'; '.join(reasons)} (as root: python -m tests.rigs.slurm_cluster install)"
    if must_run(os.environ):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def plain_cluster(slurm_can_run: None) -> Iterator[SlurmCluster]:
    """Four nodes, with accounting, SlurmdTimeout 20 s, KillWait 15 s, a requeue delay of 11 s; one for the session."""
    with SlurmCluster(4, gpus=2, release=_RELEASE, accounting=not _RELEASE) as started:
        yield started


@pytest.fixture(scope="session")
def emulated_cluster(slurm_can_run: None) -> Iterator[SlurmCluster]:
    """The same on emulated NFS, whose caches hold for 3 s: a mount of its own on each node and on the login host."""
    with SlurmCluster(4, gpus=2, fs=caches_of(3.0)) as started:
        yield started


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> SlurmCluster:
    """The session's cluster whose filesystem the test's parameter names: plain, emulated, or emulated with caches that
    hold for a minute."""
    filesystem = getattr(request, "param", os.environ.get("HPC_ELASTIC_SLURM_FS", "plain"))
    found: SlurmCluster = request.getfixturevalue("plain_cluster" if filesystem == "plain" else "emulated_cluster")
    if filesystem == "minute":
        found.change_caches(60.0)
    return found


@pytest.fixture
def runs(cluster: SlurmCluster) -> SlurmRuns:
    """The test's runs on that cluster."""
    return SlurmRuns(cluster)


@pytest.fixture(autouse=True)
def _healed_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bring the shared cluster back to its first state after each test that used it."""
    yield
    shared = request.node.funcargs.get("cluster")
    if isinstance(shared, SlurmCluster):
        shared.heal()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the daemons' logs to the report of a failed test, for each cluster that it used."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, SlurmCluster):
                report.sections.append((f"Slurm's logs ({name})", value.logs(limit=_LOG_CHARACTERS)))
    return report
