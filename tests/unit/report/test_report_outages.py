"""What came and went stands in the report; a refusal that several nodes saw is its cause, and no node's fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document, choose_subject
from hpc_elastic.report.history import Outage, OutageKind, RunHistory, attributed
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.verdict import Cause
from hpc_elastic.report.write import node_evidence, render_json
from hpc_elastic.run.node_score import EvidenceKind
from hpc_elastic.run.paths import REFUSED_CODE
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure

NODES = ("n1", "n2", "n3")


def build(
    root: Path,
    *,
    left: Iterable[int] = (),
    refused: Iterable[int] = (),
    seconds: float = 130.0,
    links: Iterable[dict[str, Any]] = (),
    outcome: str = "too_few_nodes",
) -> RunHistory:
    """Three nodes in a round; which were refused, and which left for that; -1: the supervisor, on n1."""
    builder = RunBuilder(root / "r", nodes=len(NODES)).begin()
    builder.fail(make_failure(1, at=5, exitcode=-9))
    for node in refused:
        role = "agent" if node >= 0 else "supervisor"
        told = {"error": "Permission denied", "path": "/runs/r/hb", "seconds": seconds, "over": node >= 0}
        builder.event(0, role, node, 140, "filesystem_refused", since_ns=START_NS + 10**10, **told)
    for node in left:
        builder.event(0, "supervisor", -1, 130, "agent_ended", node=node, name=NODES[node], code=REFUSED_CODE)
    for link in links:
        builder.event(0, "agent", link.pop("by"), 50, "link_lost", round=0, host=NODES[link["node"]], **link)
    builder.end(0, at=150, outcome=outcome, code=0 if outcome == "succeeded" else 1)
    return collect_run(builder.root)


def test_a_refusal_that_passed_is_told(tmp_path: Path) -> None:
    history = build(tmp_path, refused=(0, 1, 2), seconds=25.0, outcome="succeeded")
    text = render_text(Document(history))
    assert "  filesystem   : refused n1, n2 and n3 for 25 s from " in text
    assert "on: Permission denied\n                 /runs/r/hb\n" in text
    assert choose_subject(history).verdict.cause is Cause.WORKER, "the worker's failure was survived as ever"
    told = render_json(Document(history))["attempts"][0]["outages"]
    assert [(one["kind"], one["host"], one["seconds"], one["over"]) for one in told] == [
        ("filesystem", host, 25.0, True) for host in NODES
    ]


@pytest.mark.parametrize("left", [(0, 1, 2), (1, 2), (2,)])
def test_one_that_lasted_on_several_nodes_is_the_cause_and_no_fault_of_theirs(
    left: tuple[int, ...], tmp_path: Path
) -> None:
    history = build(tmp_path, left=left, refused=(-1, *{0, 1, 2}.difference(left)))
    verdict = choose_subject(history).verdict
    assert verdict.cause is Cause.FILESYSTEM
    assert verdict.summary == "the filesystem of the run directory refused its nodes: Permission denied (/runs/r/hb)"
    assert "n1" in verdict.evidence
    assert "n3" in verdict.evidence
    assert "SIGKILL" in verdict.evidence, "what the nodes could not go on from"
    text = render_text(Document(history))
    assert "Permission denied" in text.partition("Root Cause")[2]
    assert [one.node for one in node_evidence(history, attempt=0) if one.kind is not EvidenceKind.FIRST_FAILURE] == []


def test_one_that_one_node_alone_saw_counts_against_it(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "r", nodes=len(NODES)).begin()
    builder.event(0, "supervisor", -1, 130, "agent_ended", node=2, name="n3", code=REFUSED_CODE)
    earlier = {"error": "Stale file handle", "path": "", "since_ns": START_NS + 10**10, "seconds": 3.0, "over": True}
    builder.event(0, "agent", 0, 20, "filesystem_refused", **earlier)
    builder.event(0, "agent", 0, 131, "node_lost", round=0, node=2, host="n3", age=0.2)
    builder.end(0, at=150, outcome="too_few_nodes", code=1)
    history = collect_run(builder.root)
    verdict = choose_subject(history).verdict
    assert verdict.cause is Cause.NODE
    assert "the filesystem of the run directory refused it" in verdict.evidence
    assert [(one.node, one.kind) for one in node_evidence(history, attempt=0)] == [("n3", EvidenceKind.UNHEALTHY)]


def link(node: int, *, since: float, seconds: float = 8.0, by: int = 0, over: bool = True) -> dict[str, Any]:
    return {"node": node, "since_ns": int(since * 1e9), "seconds": seconds, "by": by, "over": over}


def test_a_flapping_link_is_told_with_its_number_and_its_time(tmp_path: Path) -> None:
    flaps = [link(2, since=10.0 * number, seconds=8.4) for number in range(5)]
    text = render_text(Document(build(tmp_path, links=flaps, outcome="succeeded")))
    assert "  network      : n3: network link lost 5 times, 42 s in all, first at " in text
    (tmp_path / "other").mkdir()
    text = render_text(
        Document(build(tmp_path / "other", links=[link(1, since=10.0, over=False)], outcome="succeeded"))
    )
    assert "n2: network link lost once, 8 s, first at " in text
    assert "; it was not back at the end" in text


def outage(node: int, *, since: float, by: int = 0, seconds: float = 5.0) -> Outage:
    since_ns = int(since * 1e9)
    return Outage(kind=OutageKind.LINK, node=node, host=NODES[node], seconds=seconds, since_ns=since_ns, observer=by)


def test_who_hears_nobody_any_more_has_lost_its_own_link() -> None:
    found = attributed([outage(1, since=10.0), outage(2, since=10.4, seconds=6.0)], NODES)
    assert [(one.node, one.host, one.seconds) for one in found] == [(0, "n1", 6.0)]
    apart = attributed([outage(1, since=10.0), outage(2, since=20.0)], NODES)
    assert [one.node for one in apart] == [1, 2], "two links at different times are two"
    assert [one.node for one in attributed([outage(1, since=10.0)], NODES[:2])] == [1]


def test_what_slow_ranks_and_a_slow_run_cost(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "r", nodes=2).begin()
    slow = {"rank": 1, "node": 1, "host": "n2", "seconds": 0.03, "call": "gloo:all_reduce [[9]]", "calls": 40}
    slow |= {"share": 0.25, "step": 0.12, "since_ns": START_NS + 10**10}
    pace = {"step": 1.25, "best": 1.0, "since_ns": START_NS + 10**11}
    builder.event(0, "agent", 0, 40, "slow_rank_found", round=0, slow=slow)
    builder.event(0, "agent", 0, 80, "slow_rank_ended", round=0, slow=slow, seconds=40.0, recovered=True)
    builder.event(0, "agent", 0, 100, "run_slowed", round=0, pace=pace)
    builder.end(0, at=150, outcome="succeeded", code=0)
    text = " ".join(render_text(Document(collect_run(builder.root))).split())
    assert "slow rank : rank 1 on n2 enters each all_reduce 30 ms after the others (median of 40)" in text
    assert "on for 40.0 s, 10.0 s lost" in text
    assert "slow run : a step takes 1.25 s and took 1 s in the run's best hour: 20% of the time is lost; from" in text
    assert "on to the end" in text
    builder.event(0, "agent", 0, 140, "run_slow_ended", round=0, pace=pace, seconds=40.0)
    text = " ".join(render_text(Document(collect_run(builder.root))).split())
    assert "on for 40.0 s, 8.0 s lost" in text
