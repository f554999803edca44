"""The soak in short: three faults of a fixed seed on a run that really trains. All kinds: ``python -m tests.soak``."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.soak.faults import Kind, plan
from tests.soak.soak import Size, Soak

KINDS = (Kind.WORKER_SEGFAULT, Kind.NODE_OFF, Kind.NOTICE)


@pytest.mark.torch
def test_a_short_soak_ends_with_the_right_loss_and_every_fault_explained(cluster: SlurmCluster) -> None:
    soak = Soak(cluster, size=Size(partition="", nodes="2-3", spares=0))
    result = soak.soak(islice(plan(9, KINDS), len(KINDS)))
    assert result.complaints == []
    assert result.skipped == []
    assert {deed.fault.kind for deed in result.deeds} == set(KINDS)
    assert all(deed.explained for deed in result.deeds)
    assert result.attempts >= 2, "a notice ends one"
    assert result.steps > 0
