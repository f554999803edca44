"""The soak in short: four faults of a fixed seed on a run that really trains. All kinds: ``python -m tests.soak``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace

import tests.soak.soak
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.goodput import goodput_of
from tests.rigs.slurm_cluster import SlurmCluster
from tests.soak.faults import Kind, plan
from tests.soak.soak import Size, Soak, undisturbed

KINDS = (Kind.WORKER_SEGFAULT, Kind.NODE_OFF, Kind.TIME_LIMIT, Kind.WORKER_KILLED)


@pytest.mark.torch
def test_a_short_soak_ends_with_the_right_loss_and_every_fault_explained(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    soak = Soak(cluster, size=Size(partition="", nodes="2-3", spares=0))
    result = soak.soak(islice(plan(9, KINDS), len(KINDS)))
    assert result.complaints == []
    assert result.skipped == []
    assert {injection.fault.kind for injection in result.injections} == set(KINDS)
    assert all(injection.explained for injection in result.injections)
    assert result.attempts >= 2, "a notice ends one"
    assert result.steps > 0
    assert goodput_of(collect_run(soak.run.root)).steps_known
    # It would have found a wrong one: a run that forgot a step's loss, or counted one twice.
    assert result.comparison.compared > 0
    expected = undisturbed(result.steps, tmp_path / "undisturbed")
    monkeypatch.setattr(tests.soak.soak, "undisturbed", lambda steps, folder: expected)
    final = soak.journal.final
    assert final is not None
    right, wrong = soak.journal.steps[-1], 1e-6
    soak.journal.steps[-1] = replace(right, loss=(right.loss or 0.0) + wrong)
    soak.judge_losses()
    assert "the losses part at step" in result.complaints.pop()
    soak.journal.steps[-1] = right
    final["loss_sum"] += right.loss or 0.0
    soak.judge_losses()
    assert "add up to" in result.complaints.pop()
    assert result.complaints == []
    final["loss_sum"] -= right.loss or 0.0
    # And a fault that the script did not come back from: the judge is that of `hpc-elastic rehearse`.
    soak.journal.steps = [step for step in soak.journal.steps if step.at <= result.injections[-1].at]
    soak.judge_losses()
    assert [text for text in result.complaints if f"#{result.injections[-1].fault.number} " in text]
    assert "it did not train again" in result.complaints[0]
