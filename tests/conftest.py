"""For all tests."""

from __future__ import annotations

import os

import pytest

from tests.rigs.shown_output import ShownOutput

# What the machine and the developer have configured is no part of a test; processes that tests start inherit it.
os.environ["HPC_ELASTIC_SITE_CONFIG"] = os.environ["HPC_ELASTIC_USER_CONFIG"] = ""
# torch looks up the name of each address that a TCPStore connects to; a DNS server that loses a packet takes it 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A process for each core in each of several tests at once: threads that spin for work would take it from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:
    pass  # tests/gpu, on a machine with little else than torch, needs none
else:
    # A busy machine is no defect: the tiers' budgets are what holds the time.
    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")


LONGEST = (
    "integration/test_chaos_runs.py",
    "integration/test_rehearse.py",
    "integration/test_local_run_ddp_hangs.py",
    "integration/test_notifier_lost_nodes.py",
    "integration/test_local_run_silent_hangs.py",
    "integration/test_local_run_ddp_script.py",
    "integration/test_containers.py",
    "integration/test_inprocess_faults.py",
    "integration/test_examples.py",
    "integration/test_inprocess_replacement.py",
    "integration/test_torchrun_backend.py",
    "slurm/test_requeue_and_bad_nodes.py::test_a_controller_that_is_down_loses_no_requeue",
    "slurm/test_one_owner.py::test_the_end_of_a_run_whose_batch_host_slurm_has_given_up_is_finished_by_another_node",
    "slurm/test_one_owner.py::test_an_attempt_on_a_node_that_slurm_has_lost_ends_before_the_next_one_trains",
    "slurm/test_main_job.py::test_a_node_that_loses_its_power_shrinks_the_run",
    "slurm/test_soak.py",
)
"""Files and tests that begin first, so that no process is left over with one of them at the end of its tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-docs", action="store_true", help="write the output that the docs show in place of comparing"
    )


@pytest.fixture
def shown_output(request: pytest.FixtureRequest) -> ShownOutput:
    """The output that the documentation shows."""
    return ShownOutput(update=bool(request.config.getoption("--update-docs")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        found = (number for number, name in enumerate(LONGEST) if item.nodeid.startswith(f"tests/{name}"))
        return next(found, len(LONGEST))

    items.sort(key=place)
