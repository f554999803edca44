"""From what an attempt saw to the next one's list of excluded nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.launch.conclude import checked, keep_evidence, next_nodes, nodes_needed
from hpc_elastic.launch.requeue import EligibleNodes
from hpc_elastic.run.node_score import Evidence, EvidenceKind, NodeRecord, load_record, save_record
from hpc_elastic.run.option_values import parse_bad_nodes
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import RunSpec
from tests.rigs.specs import make_spec

NOW = 1_800_000_000 * 10**9
HOUR = 3600 * 10**9
NAMES = frozenset({"n1", "n2", "n3", "n4", "n5", "n6"})
SPEC = make_spec(run_id="r", min_nodes=3, max_nodes=4)
ELIGIBLE = EligibleNodes(known=NAMES, usable=NAMES)


def lost(node: str, *, ago: float = 1.0) -> Evidence:
    return Evidence(node=node, kind=EvidenceKind.LOST, at_ns=NOW - int(ago * HOUR), why=f"node {node} was lost")


def excluded(
    *evidence: Evidence, ours: tuple[str, ...] = (), spec: RunSpec = SPEC, **facts: Any
) -> tuple[str, ...] | None:
    record = NodeRecord(evidence=evidence, excluded=ours)
    return next_nodes(record, spec, replace(ELIGIBLE, **facts), now_ns=NOW).excluded


def test_the_jobs_list_is_changed_where_it_has_to_be() -> None:
    assert excluded() is None
    assert excluded(lost("n3")) == ("n3",)
    assert excluded(lost("n3"), excluded=("n3",), ours=("n3",)) is None, "it stands there already"
    assert excluded(lost("n3", ago=25), excluded=("n3",), ours=("n3",)) == (), "it has expired"
    assert excluded(lost("n4"), lost("n3", ago=25), excluded=("n3",), ours=("n3",)) == ("n4",)


def test_the_users_own_list_stays() -> None:
    assert excluded(lost("n3"), excluded=("n6",)) == ("n3", "n6")
    assert excluded(lost("n3", ago=25), excluded=("n3", "n6"), ours=("n3",)) == ("n6",)
    assert excluded(excluded=("n6",)) is None
    assert excluded(lost("n2"), excluded=("n3", "n4", "n6")) is None, "with theirs, fewer than MIN would be left"


def test_it_can_be_turned_off() -> None:
    spec = replace(SPEC, bad_nodes=parse_bad_nodes("off"))
    assert excluded(lost("n3"), spec=spec) is None
    assert next_nodes(NodeRecord(evidence=(lost("n3"),)), spec, ELIGIBLE, now_ns=NOW).bad == ()


def test_nothing_is_changed_where_the_nodes_are_not_known() -> None:
    record = NodeRecord(evidence=(lost("n3"),))
    for eligible in (None, EligibleNodes(known=frozenset(), usable=frozenset())):
        found = next_nodes(record, SPEC, eligible, now_ns=NOW)
        assert (found.excluded, [score.node for score in found.bad]) == (None, ["n3"])


def test_the_options_limits_hold() -> None:
    both = (lost("n3"), lost("n4", ago=2))
    assert excluded(*both) == ("n3", "n4")
    assert excluded(*both, spec=replace(SPEC, bad_nodes=parse_bad_nodes("run,share=0.2"))) == ("n3",)
    assert excluded(*both, spec=replace(SPEC, bad_nodes=parse_bad_nodes("run,hours=1.5"))) == ("n3",)
    assert excluded(*both, spec=replace(SPEC, min_nodes=5, max_nodes=5)) == ("n3",)


def test_how_many_nodes_slurm_must_have() -> None:
    assert nodes_needed(SPEC) == 3
    assert nodes_needed(replace(SPEC, spares=2)) == 3
    assert nodes_needed(replace(SPEC, min_nodes=4, spares=2)) == 6, "a fixed number has its spares for certain"


@pytest.mark.parametrize("why", [None, "Requested node configuration is not available"])
def test_what_slurm_says_of_it_counts(why: str | None) -> None:
    asked: list[tuple[str, ...]] = []
    site: Any = SimpleNamespace(why_not_without=lambda paths, nodes: asked.append(tuple(nodes)) or why)
    eligible = replace(ELIGIBLE, excluded=("n6",))
    nodes = next_nodes(NodeRecord(evidence=(lost("n3"),)), SPEC, eligible, now_ns=NOW)
    found = checked(nodes, site, RunPaths(Path("/r")), eligible)
    assert asked == [("n3", "n6")]
    if why is None:
        assert found == nodes
    else:
        assert (found.excluded, found.exclusion.nodes) == (None, ())
        assert found.exclusion.spared == (("n3", f"Slurm would have no nodes for the job: {why}"),)


def keep(tmp_path: Path, *seen: Evidence) -> NodeRecord:
    return keep_evidence(RunPaths(tmp_path), seen, now_ns=NOW)


def test_evidence_adds_up_over_attempts(tmp_path: Path) -> None:
    keep(tmp_path, lost("n3"))
    save_record(RunPaths(tmp_path).nodes_json, replace(load_record(RunPaths(tmp_path).nodes_json), excluded=("n3",)))
    record = keep(tmp_path, lost("n4"), lost("n3"))
    assert (set(record.evidence), record.excluded) == ({lost("n3"), lost("n4")}, ("n3",))
    assert keep(tmp_path).evidence == record.evidence


def test_a_record_that_is_torn_costs_what_it_held_and_no_more(tmp_path: Path) -> None:
    RunPaths(tmp_path).nodes_json.write_text("{")
    assert keep(tmp_path, lost("n4")).evidence == (lost("n4"),)
    assert load_record(RunPaths(tmp_path).nodes_json).evidence == (lost("n4"),)


def _apart(node: str, *, ago: float = 1.0, attempt: int = 0, fingerprint: str = "ImportError:1") -> Evidence:
    return Evidence(
        node=node, kind=EvidenceKind.APART, at_ns=NOW - int(ago * HOUR), why="all its workers failed alike",
        fingerprint=fingerprint, attempt=attempt, round=0,
    )  # fmt: skip


def test_a_node_that_lacks_something_is_left_out_of_the_next_attempt() -> None:
    assert excluded(_apart("n3")) == ("n3",)
    assert excluded(_apart("n3"), _apart("n5")) == ("n3", "n5"), "two nodes of one round may lack the same"
    assert excluded(_apart("n3", ago=2), _apart("n3", attempt=1)) == ("n3",)


def test_what_another_node_lacks_in_the_next_attempt_moves_with_the_code() -> None:
    assert excluded(_apart("n3", ago=2), _apart("n5", attempt=1)) is None
    assert excluded(_apart("n3", ago=2), _apart("n5", attempt=1, fingerprint="other")) == ("n3", "n5")
