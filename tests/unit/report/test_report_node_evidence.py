"""What an attempt tells against nodes, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpc_elastic.node_records import NodeRecord, save_record
from hpc_elastic.node_score import Evidence, EvidenceKind
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.node_evidence import node_evidence
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_json import render_json
from hpc_elastic.report.render_text import render_text
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure

LOST, UNHEALTHY, HARDWARE = EvidenceKind.LOST, EvidenceKind.UNHEALTHY, EvidenceKind.HARDWARE
FIRST, EXCEPTION = EvidenceKind.FIRST_FAILURE, EvidenceKind.FIRST_EXCEPTION


def found(builder: RunBuilder) -> list[tuple[str, EvidenceKind]]:
    items = node_evidence(collect_run(builder.root), attempt=0)
    assert all(item.why and item.code == "train.py" and item.at_ns >= START_NS for item in items)
    return sorted((item.node, item.kind) for item in items)


def run(tmp_path: Path) -> RunBuilder:
    builder = RunBuilder(tmp_path / "run")
    builder.attempt(0)
    builder.round(0, 0, at=1)
    return builder


def test_a_lost_node(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.event(0, "agent", 2, 60, "node_lost", round=0, age=8.0, by=0, reason="silent for 8 s")
    assert found(builder) == [("n3", LOST)]


def test_an_agent_that_was_killed_and_started_again_is_no_node_that_was_lost(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.event(0, "supervisor", 2, 60, "agent_ended", name="n3", code=137, detail="SIGKILL", started=True)
    builder.event(0, "supervisor", 2, 60, "agent_relaunched", name="n3", reason="it ended")
    builder.round(0, 1, at=62)
    assert found(builder) == []


def test_a_node_that_failed_a_health_check(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.event(0, "agent", 1, 50, "health_check_failed", round=0, checks=["tmp"], reason="health check failed: /tmp")
    assert found(builder) == [("n2", UNHEALTHY)]


def test_a_node_where_no_agent_could_be_started(tmp_path: Path) -> None:
    builder = run(tmp_path)
    facts = {"code": None, "detail": "Communication connection failure", "started": False}
    builder.event(0, "supervisor", 3, 2, "agent_ended", name="n4", **facts)
    assert found(builder) == [("n4", LOST)]
    for node, name in enumerate(builder.names):
        builder.event(0, "supervisor", node, 2, "agent_ended", name=name, **facts)
    assert found(builder) == [], "on none of them: then it is no node that is broken"


def test_words_of_broken_hardware_first_or_not(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.fail(make_failure(0, at=60, exitcode=-11))
    broken = make_failure(2, at=61, exception="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    builder.fail(replace(broken, node_suspect=True))
    assert ("n3", HARDWARE) in found(builder)


def test_where_a_round_began_to_fail(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.fail(make_failure(1, at=60, exitcode=-11))
    builder.fail(make_failure(3, at=60.5, exitcode=-15, stopped_by_agent=True))
    builder.round(0, 1, at=70)
    builder.fail(make_failure(2, at=80, exception="ValueError: odd", round_index=1))
    assert found(builder) == [("n2", FIRST), ("n3", EXCEPTION)]
    (first, second) = sorted(node_evidence(collect_run(builder.root), attempt=0), key=lambda item: item.round)
    assert first.fingerprint == "signal:SIGSEGV"
    assert second.fingerprint.startswith("ValueError:")
    assert node_evidence(collect_run(builder.root), attempt=1) == ()


def test_what_fails_on_several_nodes_at_once_or_is_the_users_own(tmp_path: Path) -> None:
    builder = run(tmp_path)
    for rank in (1, 2):
        builder.fail(make_failure(rank, at=60 + rank / 1000, exception="ValueError: odd"))
    builder.round(0, 1, at=70)
    builder.fail(make_failure(2, at=80, exitcode=93, round_index=1))
    assert found(builder) == []


def test_memory_that_ran_out_speaks_against_the_script(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.fail(make_failure(1, at=60, exitcode=-9, oom_kills=1))
    assert found(builder) == []


def test_bad_nodes_stand_in_every_form_of_the_report(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.end(0, at=90, outcome="failed", code=75)
    lost = Evidence(node="n3", kind=LOST, at_ns=START_NS, why="node n3 was <lost>", run_id="run", attempt=0, round=0)
    unfit = Evidence(node="n2", kind=UNHEALTHY, at_ns=START_NS - 5, why="/tmp is full")
    record = NodeRecord(evidence=(lost, unfit), excluded=("n3",), saved_ns=START_NS + 10)
    save_record(builder.paths.nodes_json, record)
    history = collect_run(builder.root)
    text = render_text(history)
    assert "Bad nodes: n3 (node n3 was <lost>): left out of later attempts" in text
    assert "           n2 (/tmp is full)\n" in text
    page = render_html(history)
    assert "Bad nodes" in page
    assert "node n3 was &lt;lost&gt;" in page
    first, second = render_json(history)["bad_nodes"]
    assert (first["node"], first["excluded"], first["score"]) == ("n3", True, 1.0)
    assert first["evidence"] == [
        {"kind": "lost", "why": "node n3 was <lost>", "at_ns": START_NS, "run_id": "run", "attempt": 0, "round": 0}
    ]
    assert (second["node"], second["excluded"]) == ("n2", False)
