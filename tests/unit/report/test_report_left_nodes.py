"""A node that failed a health check: told once, with its own reason, whoever's word of it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import render_text
from hpc_elastic.run.paths import UNHEALTHY_CODE
from tests.rigs.run_builder import RunBuilder, make_failure

WHY = "health check failed: GPU 2 has 3 uncorrectable ECC errors"


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run-1")


def tell(builder: RunBuilder, *, own: bool = True, coordinator: bool = True) -> None:
    """Node n3 leaves after round 0, in which rank 0 failed; round 1 goes on without it."""
    builder.begin()
    builder.fail(make_failure(0, at=30, exception="ValueError: bad"))
    builder.stopped(0, 0, at=31)
    if own:
        builder.event(0, "agent", 2, 31.5, "health_check_failed", round=0, checks=["gpu"], reason=WHY)
    if coordinator:
        builder.event(0, "agent", 0, 32, "node_left", round=1, node=2, host="n3", reason=WHY)
    builder.event(0, "supervisor", -1, 32, "agent_ended", node=2, name="n3", code=UNHEALTHY_CODE)


@pytest.mark.parametrize(("own", "coordinator", "where"), [(True, True, 0), (True, False, 0), (False, True, 1)])
def test_it_is_told_once(builder: RunBuilder, own: bool, coordinator: bool, where: int) -> None:
    tell(builder, own=own, coordinator=coordinator)
    (attempt,) = collect_run(builder.root).attempts
    losses = [loss for part in attempt.rounds for loss in part.lost_nodes]
    assert [(loss.round, loss.node, loss.summary) for loss in losses] == [(where, 2, f"n3 left: {WHY}")]


def test_a_node_whose_words_did_not_get_through_is_lost_with_its_agent_s_code(builder: RunBuilder) -> None:
    tell(builder, own=False, coordinator=False)
    builder.event(0, "agent", 0, 32, "node_lost", round=0, node=2, host="n3", age=None)
    (attempt,) = collect_run(builder.root).attempts
    (loss,) = attempt.rounds[0].lost_nodes
    assert loss.detail == "its agent took it out: a health check failed"


def test_rounds_that_lost_different_nodes_are_not_told_as_the_same(builder: RunBuilder) -> None:
    """With spares the rounds look alike but for that."""
    builder.attempt(0)
    for index, node in enumerate((1, 2)):
        builder.round(0, index, at=10 * index + 1)
        builder.event(0, "agent", 0, 10 * index + 8, "node_lost", round=index, node=node, host=f"n{node + 1}", age=7.0)
        builder.stopped(0, index, at=10 * index + 8.1)
    text = render_text(Document(collect_run(builder.root)))
    assert [line for line in text.splitlines() if line.endswith(("node n2 was lost", "node n3 was lost"))][-2:] == [
        line for line in text.splitlines() if line.strip().startswith(("round 0:", "round 1:"))
    ]
    assert "the same" not in text
