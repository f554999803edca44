"""What an attempt tells against nodes, and what it does not."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.write import node_evidence, render_json
from hpc_elastic.run.node_score import Evidence, EvidenceKind, NodeRecord, save_record
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure

LOST, UNHEALTHY, HARDWARE = EvidenceKind.LOST, EvidenceKind.UNHEALTHY, EvidenceKind.HARDWARE
FIRST, EXCEPTION = EvidenceKind.FIRST_FAILURE, EvidenceKind.FIRST_EXCEPTION


def found(builder: RunBuilder) -> list[tuple[str, EvidenceKind]]:
    items = node_evidence(collect_run(builder.root), attempt=0)
    assert all(item.why and item.at_ns >= START_NS for item in items)
    return sorted((item.node, item.kind) for item in items)


def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run").begin()


SIGKILLED = {"name": "n3", "code": 137, "detail": "SIGKILL", "started": True}
RELAUNCHED = {"name": "n3", "reason": "it ended"}
GIVEN_UP = {"name": "n4", "cause": "died", "reason": "SIGKILL"}
UNFIT = {"round": 0, "checks": ["tmp"], "reason": "health check failed: /tmp"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [("agent", 2, "node_lost", {"round": 0, "age": 8.0, "by": 0, "reason": "silent for 8 s"})],
            [("n3", LOST)],
            id="a node that was lost",
        ),
        pytest.param(
            [("supervisor", 2, "agent_ended", SIGKILLED), ("supervisor", 2, "agent_relaunched", RELAUNCHED)],
            [],
            id="an agent that was killed and started again",
        ),
        pytest.param([("supervisor", 3, "node_given_up", GIVEN_UP)], [], id="a node whose agents took part and died"),
        pytest.param([("agent", 1, "health_check_failed", UNFIT)], [("n2", UNHEALTHY)], id="a failed health check"),
    ],
)
def test_what_events_tell_against_a_node(
    tmp_path: Path, events: list[tuple[str, int, str, dict[str, object]]], expected: list[tuple[str, EvidenceKind]]
) -> None:
    builder = run(tmp_path)
    for at, (role, node, name, fields) in enumerate(events):
        builder.event(0, role, node, 60 + at, name, **fields)
    builder.round(0, 1, at=65)
    assert found(builder) == expected


@pytest.mark.parametrize(("ends", "bad"), [([], True), ([False], True), ([True], False)])
def test_a_node_with_a_rank_that_was_slow_to_the_end(tmp_path: Path, ends: list[bool], bad: bool) -> None:
    builder = run(tmp_path)
    slow = {"rank": 1, "node": 1, "host": "n2", "seconds": 0.03, "call": "c", "calls": 9, "share": 0.3}
    slow["since_ns"] = START_NS + 10**9
    builder.event(0, "agent", 0, 50, "slow_rank_found", round=0, slow=slow)
    for recovered in ends:
        builder.event(0, "agent", 0, 60, "slow_rank_ended", round=0, slow=slow, seconds=9.0, recovered=recovered)
    assert found(builder) == ([("n2", EvidenceKind.SLOW)] if bad else [])


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
    for rank in (0, 1, 3):
        builder.fail(replace(broken, global_rank=rank, node=rank, host=builder.names[rank], node_suspect=True))
    assert HARDWARE not in {kind for _, kind in found(builder)}, "on all of them: then it is no node that is broken"


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


@pytest.mark.parametrize(
    "failures",
    [
        pytest.param(
            [make_failure(rank, at=60, exception="ValueError: odd") for rank in (1, 2)], id="on several nodes"
        ),
        pytest.param([make_failure(2, at=60, exitcode=93)], id="the user's own code"),
        pytest.param([make_failure(1, at=60, exitcode=-9, oom_kills=1)], id="memory that ran out"),
    ],
)
def test_what_speaks_against_no_node(tmp_path: Path, failures: list[WorkerFailure]) -> None:
    builder = run(tmp_path)
    for failure in failures:
        builder.fail(failure)
    assert found(builder) == []


def test_bad_nodes_stand_in_every_form_of_the_report(tmp_path: Path) -> None:
    builder = run(tmp_path)
    builder.end(0, at=90, outcome="failed", code=75)
    lost = Evidence(node="n3", kind=LOST, at_ns=START_NS, why="node n3 was <lost>", attempt=0, round=0)
    unfit = Evidence(node="n2", kind=UNHEALTHY, at_ns=START_NS - 5, why="/tmp is full")
    record = NodeRecord(evidence=(lost, unfit), excluded=("n3",), saved_ns=START_NS + 10)
    save_record(builder.paths.nodes_json, record)
    history = collect_run(builder.root)
    text = render_text(Document(history))
    assert "Bad nodes: n3 (node n3 was <lost>): left out of later attempts" in text
    assert "           n2 (/tmp is full)\n" in text
    page = render_html(Document(history))
    assert "Bad nodes" in page
    assert "node n3 was &lt;lost&gt;" in page
    first, second = render_json(Document(history))["bad_nodes"]
    assert (first["node"], first["excluded"], first["score"]) == ("n3", True, 1.0)
    assert first["evidence"] == [
        {"kind": "lost", "why": "node n3 was <lost>", "at_ns": START_NS, "attempt": 0, "round": 0}
    ]
    assert (second["node"], second["excluded"]) == ("n2", False)


# -- nodes that can't run the agent

COULD_NOT = "exit code 127: /usr/bin/env: 'python': No such file or directory"


def too_few(tmp_path: Path, *unable: int, nodes: int = 4, seconds: float = 3.0) -> RunBuilder:
    """An attempt that some nodes could not run the agent of, and that had too few without them."""
    tmp_path.mkdir(exist_ok=True)
    builder = RunBuilder(tmp_path / "run", nodes=nodes)
    builder.attempt(0)
    for node in range(nodes):
        name = f"n{node + 1}"
        if node in unable:
            builder.event(0, "supervisor", node, 1, "agent_ended", name=name, code=127, detail="Exited", started=True)
            given_up = {"name": name, "cause": "could_not_run", "reason": COULD_NOT}
            builder.event(0, "supervisor", node, 2, "node_given_up", **given_up)
        else:
            builder.event(0, "agent", node, 1, "agent_started", pid=1, version="1")
    builder.event(0, "supervisor", -1, seconds, "verdict", outcome="too_few_nodes", reason="too few are left")
    builder.event(0, "supervisor", -1, seconds, "attempt_ended", outcome="too_few_nodes", exit_code=75)
    return builder


def test_a_node_that_could_not_run_the_agent_is_the_cause_and_is_bad(tmp_path: Path) -> None:
    builder = too_few(tmp_path, 2)
    assert found(builder) == [("n3", LOST)]
    history = collect_run(builder.root)
    said = f"node n3 could not run the agent: {COULD_NOT}"
    text = render_text(Document(history))
    assert said in text
    assert "\n  n3 (node 2)\n" in text
    assert "incomplete" not in text, "it has no events that could be missing"
    assert "none of the workers" not in text
    assert "could not run the agent: exit code 127" in render_html(Document(history))
    verdict = render_json(Document(history))["verdict"]
    assert (verdict["cause"], verdict["summary"], verdict["retryable"]) == ("node", said, True)
    assert (verdict["lost_node"]["host"], verdict["lost_node"]["round"]) == ("n3", None)
    assert verdict["lost_node"]["unable"] == f"could not run the agent: {COULD_NOT}"
    (given_up,) = render_json(Document(history))["attempts"][0]["nodes_given_up"]
    assert (given_up["name"], given_up["cause"], given_up["reason"]) == ("n3", "could_not_run", COULD_NOT)


def test_of_several_all_are_named(tmp_path: Path) -> None:
    builder = too_few(tmp_path, 1, 2)
    assert found(builder) == [("n2", LOST), ("n3", LOST)]
    text = render_text(Document(collect_run(builder.root)))
    assert "node n2 could not run the agent" in text
    assert "2 other nodes could; node n3 could not run the agent" in " ".join(text.split())


def test_where_all_nodes_fail_alike_none_is_blamed(tmp_path: Path) -> None:
    builder = too_few(tmp_path, 0, 1, 2, 3)
    assert found(builder) == []
    history = collect_run(builder.root)
    text = " ".join(render_text(Document(history), max_lines=None).split())
    assert f"no agent ran on any node: node n1 could not run the agent: {COULD_NOT}" in text
    assert "so it is no single node: look at what they share" in text
    assert "so it is no single node" in render_html(Document(history))
    verdict = render_json(Document(history))["verdict"]
    assert (verdict["cause"], verdict["category"]) == ("none", "input")
    assert verdict["summary"].startswith("no agent ran on any node")
    # Of three nodes the other two than the batch host may both be bad; of four it is what they share.
    builder = too_few(tmp_path / "four", 1, 2, 3)
    assert found(builder) == []
    assert "all 4 nodes but the batch host failed" in " ".join(render_text(Document(collect_run(builder.root))).split())
    assert found(too_few(tmp_path / "three", 1, 2, nodes=3)) == [("n2", LOST), ("n3", LOST)]
    assert found(too_few(tmp_path / "one", 0, nodes=1)) == [("n1", LOST)], "another node may do better"


def test_a_range_that_went_on_without_a_node_tells_it_all_the_same(tmp_path: Path) -> None:
    builder = run(tmp_path)
    given_up = {"name": "n4", "cause": "could_not_run", "reason": COULD_NOT}
    builder.event(0, "supervisor", 3, 2, "node_given_up", **given_up)
    builder.event(0, "supervisor", -1, 60, "attempt_ended", outcome="succeeded", exit_code=0)
    assert found(builder) == [("n4", LOST)]
    history = collect_run(builder.root)
    text = render_text(Document(history))
    assert "No failures." in text
    assert f"did without  : node n4 could not run the agent: {COULD_NOT}" in text
    assert "node n4 could not run the agent" in render_html(Document(history))


def test_a_node_that_never_joined_counts_where_the_others_had_waited(tmp_path: Path) -> None:
    """As one whose Python hangs at its imports; a short attempt, or one that nobody waited in, tells nothing."""
    builder = too_few(tmp_path, seconds=20)
    assert found(builder) == []
    builder.event(0, "agent", 0, 19, "node_missing", round=0, node=3, host="", reason="it has not joined")
    assert found(builder) == [], "it had said that it is there"
    silent = RunBuilder(tmp_path / "silent", nodes=2)
    silent.attempt(0)
    silent.event(0, "agent", 0, 1, "agent_started", pid=1, version="1")
    silent.event(0, "agent", 0, 8, "node_missing", round=0, node=1, host="", reason="it has not joined")
    silent.event(0, "supervisor", -1, 9, "attempt_ended", outcome="too_few_nodes", exit_code=1)
    assert found(silent) == []
    silent.event(0, "supervisor", -1, 20, "attempt_ended", outcome="too_few_nodes", exit_code=1)
    assert found(silent) == [("n2", LOST)]
    assert "node n2 never joined the run" in render_text(Document(collect_run(silent.root)))


def test_of_a_node_that_was_lost_and_then_could_not_run_the_agent_both_are_told(tmp_path: Path) -> None:
    """As one whose mounts went away in mid-run: the loss came first, and why nothing came after it is the cause."""
    builder = run(tmp_path)
    builder.event(0, "supervisor", 2, 9, "agent_ended", name="n3", code=-9, detail="Killed", started=True)
    builder.event(0, "agent", 0, 12, "node_lost", round=0, node=2, host="n3", age=2.0)
    builder.event(0, "supervisor", 2, 11, "node_given_up", name="n3", cause="died", reason=COULD_NOT)
    builder.round(0, 1, at=13, without=(2,))
    (loss,) = collect_run(builder.root).attempts[0].rounds[0].lost_nodes
    assert loss.detail == f"its agent was ended by SIGKILL; given up after that: {COULD_NOT}"


def _lacks(rank: int) -> WorkerFailure:
    failure = make_failure(rank, at=5 + rank / 100, exception="ModuleNotFoundError: No module named 'x'", per_node=2)
    return replace(failure, waited=1.0)


def test_a_node_whose_workers_alone_lack_something_is_bad(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=3, per_node=2).begin()
    for rank in (2, 3):
        builder.fail(_lacks(rank))
    assert found(builder) == [("n2", EvidenceKind.APART)]
    history = collect_run(builder.root)
    verdict = render_json(Document(history))["verdict"]
    assert (verdict["nodes_apart"], verdict["retryable"], verdict["category"]) == (["n2"], True, "infrastructure")
    text = render_text(Document(history))
    assert "; n2 is suspect\n" in text
    assert "the same failure on all 2 ranks of n2, and on none elsewhere" in text
    assert "not retryable" not in text


@pytest.mark.parametrize(("ranks", "category"), [((2, 3), "infrastructure"), ((0, 1, 2, 3), "input")])
def test_a_read_only_filesystem_is_a_fault_where_one_node_alone_has_it(
    tmp_path: Path, ranks: tuple[int, ...], category: str
) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=3, per_node=2).begin()
    for rank in ranks:
        text = "OSError: [Errno 30] Read-only file system: '/results.txt'"
        failure = make_failure(rank, at=5 + rank / 100, exception=text, per_node=2)
        as_judged = replace(failure, failure_class=FailureClass.INFRASTRUCTURE, category=Category.INFRASTRUCTURE)
        builder.fail(replace(as_judged, waited=1.0, reason="a filesystem failed"))
    history = collect_run(builder.root)
    assert render_json(Document(history))["verdict"]["category"] == category
    kind = "it wrote to a path whose filesystem is read-only" if category == "input" else "a filesystem failed"
    assert f"{kind} ({category}" in render_text(Document(history))


def test_what_all_nodes_lack_speaks_against_none(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=2, per_node=2).begin()
    for rank in range(4):
        builder.fail(_lacks(rank))
    assert found(builder) == []
    assert "not retryable" in render_text(Document(collect_run(builder.root)))


def test_what_every_agent_refuses_is_the_cause_and_speaks_against_no_node(tmp_path: Path) -> None:
    why = "--health-check: cannot start 'check.sh': no such command in PATH"
    for nodes in (1, 3):
        builder = RunBuilder(tmp_path / f"run-{nodes}", nodes=nodes)
        builder.attempt(0)
        for node in range(nodes):
            builder.event(0, "agent", node, 1, "agent_started", pid=1, version="1")
            builder.event(0, "agent", node, 1, "start_refused", reason=why)
            given_up = {"name": f"n{node + 1}", "cause": "could_not_run", "reason": "exit code 2"}
            builder.event(0, "supervisor", node, 2, "node_given_up", **given_up)
        builder.event(0, "supervisor", -1, 3, "verdict", outcome="failed", reason="every agent refused")
        builder.event(0, "supervisor", -1, 3, "attempt_ended", outcome="failed", exit_code=93)
        assert found(builder) == []
        history = collect_run(builder.root)
        for text in (render_text(Document(history)), unescape(render_html(Document(history)))):
            assert why in text
            assert "no worker failed" not in text
            assert "could not run the agent" not in text
        verdict = render_json(Document(history))["verdict"]
        assert (verdict["summary"], verdict["category"], verdict["retryable"]) == (why, "input", False)
        assert verdict["lost_node"] is None


def test_a_node_that_alone_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    builder = too_few(tmp_path, 2)
    builder.event(0, "agent", 2, 1, "start_refused", reason="--nproc-per-node gpu: no NVIDIA GPU was found")
    assert found(builder) == [("n3", LOST)]
    text = render_text(Document(collect_run(builder.root)))
    assert "node n3 refused to start: --nproc-per-node gpu: no NVIDIA GPU was found" in text
