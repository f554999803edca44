"""The recovery from a failure, as the text report has it: once, and not the cause again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_json import render_json
from hpc_elastic.report.render_text import render_text
from tests.rigs.run_builder import RunBuilder, make_failure

_CAUSE = "rank 2: ValueError: bad batch"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (f"restart 1 of 3 (2 left) after: {_CAUSE}", "Recovery: restart 1 of 3 (2 left) -> round 1\n"),
        (
            "restart 1 of 3 (2 left) after: rank 2: ValueError: bad ba...",
            "Recovery: restart 1 of 3 (2 left) -> round 1\n",
        ),
        (f"restart 1 of 3: {_CAUSE} and more", f"Recovery: restart 1 of 3: {_CAUSE} and more -> round 1\n"),
        ("restart 1 of 3: rank 1: gloo/a.cc", "Recovery: restart 1 of 3: rank 1: gloo/a.cc -> round 1\n"),
        ("restart 1 of 3: [/x/pair.cc:538] closed", "Recovery: restart 1 of 3: closed -> round 1\n"),
    ],
)
def test_the_reason_without_the_cause_that_stands_above(tmp_path: Path, reason: str, shown: str) -> None:
    builder = RunBuilder(tmp_path / "run")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.fail(make_failure(2, at=15, exception="ValueError: bad batch"))
    builder.round(0, 1, at=20, reason=reason)
    assert shown in render_text(Document(collect_run(builder.root)))


def _done(builder: RunBuilder) -> list[str]:
    history = collect_run(builder.root)
    done = list(Document(history).done)
    text = render_text(Document(history))
    assert all(line in text for line in done)
    return done


def _lose_n3(root: Path) -> RunBuilder:
    builder = RunBuilder(root / "run", nodes=6)
    builder.attempt(0)
    builder.round(0, 0, at=1, without=(4, 5))
    builder.event(0, "agent", 0, 33, "node_lost", round=0, node=2, host="n3", age=3.1)
    return builder


def test_a_spare_that_took_over_is_named(tmp_path: Path) -> None:
    builder = _lose_n3(tmp_path)
    place = {"group_rank": 2, "replaces_node": 2, "replaces_host": "n3"}
    builder.event(0, "agent", 0, 34, "node_replaced", round=1, node=4, host="n5", **place)
    builder.round(0, 1, at=34, without=(2, 5), reason="n3 stopped its heartbeat")
    assert _done(builder) == [
        "a new round, which costs no restart: n3 stopped its heartbeat -> round 1",
        "spare n5 took over from n3",
    ]
    (spare,) = render_json(Document(collect_run(builder.root)))["attempts"][0]["rounds"][1]["replaced"]
    assert spare == {"node": 4, "host": "n5", **place}


@pytest.mark.parametrize(
    ("without", "told"),
    [
        ((2, 4, 5), "round 1: shrunk to 3 nodes from 4, without n3"),
        ((2,), "round 1: grown to 5 nodes from 4, without n3; with n5, n6"),
        ((2, 5), "round 1: 4 nodes as before, without n3; with n5"),
    ],
)
def test_how_many_nodes_there_are_now(tmp_path: Path, without: tuple[int, ...], told: str) -> None:
    builder = _lose_n3(tmp_path)
    builder.round(0, 1, at=34, without=without, reason="n3 stopped its heartbeat")
    assert told in _done(builder)
