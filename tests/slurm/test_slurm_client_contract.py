"""The contract of `SlurmClient` (tests/contract/test_slurm_client.py) on the commands of a real Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.slurm.client import CommandResult, SlurmClient
from hpc_elastic.slurm.commands import command_environment
from tests.contract import test_slurm_client as contract
from tests.contract.test_slurm_client import *  # noqa: F403
from tests.rigs.slurm_cluster import SlurmCluster


@pytest.fixture
def world(cluster: SlurmCluster) -> contract.World:
    def run(argv: Sequence[str], *, timeout: float) -> CommandResult:
        done = cluster.run(list(argv), timeout=timeout, env=command_environment({}))
        return CommandResult(rc=done.returncode, stdout=done.stdout, stderr=done.stderr)

    folder = Path(mkdtemp(prefix="client-", dir=cluster.shared))
    folder.chmod(0o777)
    return contract.World(
        SlurmClient(run, SystemClock()), folder, patience=60, client_uid=int(cluster.run(["id", "-u"]).stdout)
    )
