"""The soak in short: three faults of a fixed seed on a run that really trains. All kinds: ``python -m tests.soak``."""

from __future__ import annotations

from itertools import islice

import pytest

import tests.soak.soak
from tests.rigs.slurm_cluster import SlurmCluster
from tests.soak.faults import Kind, plan
from tests.soak.soak import Size, Soak

KINDS = (Kind.WORKER_SEGFAULT, Kind.NODE_OFF, Kind.NOTICE)


@pytest.mark.torch
def test_a_short_soak_ends_with_the_right_loss_and_every_fault_explained(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = Soak(cluster, size=Size(partition="", nodes="2-3", spares=0))
    result = soak.soak(islice(plan(9, KINDS), len(KINDS)))
    assert result.complaints == []
    assert result.skipped == []
    assert {deed.fault.kind for deed in result.deeds} == set(KINDS)
    assert all(deed.explained for deed in result.deeds)
    assert result.attempts >= 2, "a notice ends one"
    assert result.steps > 0
    # It would have told a wrong one: of a run that forgot the least of its steps, or did it twice.
    right, final = result.expected, soak.journal.final
    assert final is not None
    monkeypatch.setattr(tests.soak.soak, "undisturbed", lambda steps, folder: right)
    least = min(step.loss for step in soak.journal.steps)
    assert 0 < least < final["loss_sum"]
    for wrong in (right + least, right - least, float("nan")):
        final["loss_sum"] = wrong
        soak.judge_loss()
        assert f"add up to {wrong!r}, undisturbed to {right!r}" in result.complaints.pop()
    assert result.complaints == []
