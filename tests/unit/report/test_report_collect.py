from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import EvidenceSource
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.history import WorkerEnd
from hpc_elastic.report.root_cause import verdict_of
from hpc_elastic.report.verdict import Confidence
from hpc_elastic.report.wording import describe_fresh_starts
from tests.rigs.run_builder import GLOO, START_NS, RunBuilder, make_failure


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run-1")


def two_rounds(builder: RunBuilder) -> None:
    builder.begin()
    builder.fail(make_failure(2, at=30, exception="ValueError: bad"))
    builder.fail(make_failure(0, at=30.1, exception=f"RuntimeError: {GLOO.format(rank=0)}"))
    builder.stopped(0, 0, at=31)
    builder.round(0, 1, at=32, reason="restart 1 of 3 (2 left) after: ValueError: bad")
    builder.succeeded(0, 1, at=132)
    builder.end(0, at=140, outcome="succeeded", code=0, decision="end: the run succeeded")


def test_a_whole_run(builder: RunBuilder) -> None:
    two_rounds(builder)
    for node in range(4):  # agents that end with their run are no losses
        builder.event(0, "supervisor", node, 141, "agent_ended", name=f"n{node + 1}", code=1)
    history = collect_run(builder.root)
    assert (history.run_id, history.name, history.max_requeues, history.problems) == ("run-1", "train.py", 3, ())
    (attempt,) = history.attempts
    assert (attempt.number, attempt.job_id, attempt.nodes, attempt.problems) == (
        0,
        "4242",
        ("n1", "n2", "n3", "n4"),
        (),
    )
    assert (attempt.outcome, attempt.exit_code, attempt.decision) == ("succeeded", 0, "end: the run succeeded")
    assert (attempt.started_ns, attempt.ended_ns) == (START_NS, START_NS + 140 * 10**9)
    first = attempt.rounds[0]
    assert [(node.host, node.ranks) for node in first.nodes] == [(f"n{rank + 1}", (rank,)) for rank in range(4)]
    raised = make_failure(2, at=30, exception="ValueError: bad")
    path = builder.paths.attempt(0).rank(0, 2).error_file
    assert first.failures[1] == replace(raised, error_file=str(path), traceback=raised.traceback.rstrip("\n"))
    assert [(part.seconds, part.broken, part.succeeded, part.lost_nodes) for part in attempt.rounds] == [
        (30.0, True, False, ()),
        (100.0, False, True, ()),
    ]
    assert first.decision is not None
    assert (first.decision.action, first.decision.restarts_used, first.decision.max_restarts) == ("restart", 1, 3)
    assert first.decision.reason == "restart 1 of 3 (2 left) after: ValueError: bad"
    assert (first.world_size, first.stopping_reasons) == (4, ("a peer failed",))


def test_a_closed_run_is_the_decision_about_its_last_round(builder: RunBuilder) -> None:
    builder.begin()
    builder.fail(make_failure(2, at=30, exitcode=3))
    builder.event(0, "agent", 0, 31, "round_opened", round=1, reason="worker failure on node 2", restarts_used=0)
    builder.event(0, "agent", 0, 32, "closed", round=1, outcome="failed", reason="restarts exhausted (0 of 0)")
    (attempt,) = collect_run(builder.root).attempts
    assert attempt.outcome == "failed"
    (part,) = attempt.rounds  # a round that never began is none
    assert part.decision is not None
    assert (part.decision.action, part.decision.reason) == ("close", "restarts exhausted (0 of 0)")


@pytest.mark.parametrize(("event", "fields"), [("round_frozen", {}), ("closed", {"outcome": "too_few_nodes"})])
def test_failures_that_a_lost_node_explains_are_its_consequences(
    builder: RunBuilder, event: str, fields: dict[str, str]
) -> None:
    """As the coordinator found when it knew who was left: one loss, in the round in which it happened."""
    builder.begin()
    builder.fail(make_failure(0, at=30, exception="ConnectionError: peer closed the connection"))
    builder.fail(make_failure(1, at=30, exitcode=3))
    builder.event(0, "agent", 0, 31, "round_opened", round=1, reason="rank 0 ended with exit code 1", restarts_used=0)
    builder.event(0, "agent", 0, 37, event, round=1, explained=(0,), **fields)
    builder.event(0, "agent", 0, 37, "node_lost", round=0, node=2, host="n3", age=7.0)
    (part,) = collect_run(builder.root).attempts[0].rounds
    classes = [failure.failure_class for failure in part.failures]
    assert classes == [FailureClass.SYMPTOM, FailureClass.ROOT]
    alone = replace(part, failures=part.failures[:1])
    verdict = verdict_of(alone)
    assert verdict.lost_node is not None
    assert (verdict.lost_node.host, verdict.confidence) == ("n3", Confidence.HIGH)
    assert verdict.evidence == "no heartbeat for 7.0 s; 1 failure elsewhere is its consequence"


def test_a_command_has_the_name_of_the_script_that_it_runs(builder: RunBuilder) -> None:
    builder.attempt(0)
    spec = json.loads(builder.paths.run_json.read_text())
    entry = {"kind": "command", "target": "/usr/bin/bash", "args": ["-c", "python pretrain.py"]}
    builder.paths.run_json.write_text(json.dumps({**spec, "name": "pretrain", "entrypoint": entry}))
    assert collect_run(builder.root).name == "pretrain"


def test_a_lost_node_is_named_and_its_agents_end_told(builder: RunBuilder) -> None:
    builder.begin()
    builder.event(0, "supervisor", -1, 30, "agent_ended", node=2, name="n3", code=137)
    builder.event(0, "agent", 0, 33, "node_lost", round=0, node=2, host="", age=3.5)
    builder.event(0, "agent", 1, 33, "platform_failure", round=0, reason="the workers' TCPStore is gone: killed")
    (part,) = collect_run(builder.root).attempts[0].rounds
    assert [(own.node, own.host, own.broke) for own in part.own_failures] == [
        (1, "n2", "the workers' TCPStore is gone: killed")
    ]
    (loss,) = part.lost_nodes
    assert (loss.node, loss.host, loss.age) == (2, "n3", 3.5)
    assert (loss.detail, loss.gone_ns) == ("its agent was ended by SIGKILL", START_NS + int(29.5 * 10**9))


@pytest.mark.parametrize("lost_its_events", [False, True])
def test_an_agent_that_died_and_was_started_again(builder: RunBuilder, lost_its_events: bool) -> None:
    builder.attempt(0)
    builder.event(0, "agent", 0, 0.9, "round_frozen", round=0, reason="start", restarts_used=0, nodes=[0, 1, 2, 3])
    builder.round(0, 0, at=1, without=(2,) if lost_its_events else ())
    builder.event(0, "supervisor", 2, 30, "agent_ended", name="n3", code=-9)
    builder.event(0, "supervisor", 2, 30.2, "agent_relaunched", name="n3")
    for node in (0, 1, 3):
        builder.event(0, "agent", node, 30.3, "workers_stopped", round=0, seconds=0.1)
    builder.round(0, 1, at=30.5, reason="n3 has a new agent")
    builder.succeeded(0, 1, at=60)
    for node in range(4):
        builder.event(0, "supervisor", node, 61, "agent_ended", name=f"n{node + 1}", code=0)
    assert collect_run(builder.root).attempts[0].relaunched == (), "it was tried, and nothing is known to have run"
    for at in (0.5, 30.4):
        builder.event(0, "agent", 2, at, "agent_started")
    (attempt,) = collect_run(builder.root).attempts
    assert attempt.relaunched == ("n3",)
    first, second = attempt.rounds
    (loss,) = first.lost_nodes
    assert (loss.node, loss.host, loss.agent_only, loss.detail) == (2, "n3", True, "its agent was ended by SIGKILL")
    assert second.lost_nodes == ()
    assert first.decision is not None
    assert first.decision.action == "continue"


def test_agents_whose_srun_was_killed_are_told_and_take_no_later_death_for_theirs(builder: RunBuilder) -> None:
    builder.begin()
    for node in range(4):
        ended = {"name": f"n{node + 1}", "code": None, "detail": "its step ended, srun: SIGKILL"}
        builder.event(0, "supervisor", node, 30, "agent_ended", **ended)
        builder.event(0, "supervisor", node, 30.2, "agent_relaunched", name=f"n{node + 1}")
    builder.round(0, 1, at=31, reason="n1 has a new agent")
    builder.event(0, "supervisor", 2, 50, "agent_ended", name="n3", code=-9, detail="Killed")
    builder.event(0, "supervisor", 2, 50.2, "agent_relaunched", name="n3")
    for node in (0, 1, 3):
        builder.event(0, "agent", node, 50.3, "workers_stopped", round=1, seconds=0.1)
    builder.round(0, 2, at=51, reason="n3 has a new agent")
    builder.event(0, "agent", 0, 70, "node_lost", round=2, node=2, host="n3", age=3.5)
    for node in (0, 1, 3):
        builder.event(0, "agent", node, 70.3, "workers_stopped", round=2, seconds=0.1)
    # It never got there, and took part in nothing.
    builder.event(0, "supervisor", 3, 71, "agent_ended", name="n4", code=None, detail="Task launch failed")
    told = [
        [(loss.host, loss.agent_only, loss.detail) for loss in part.lost_nodes]
        for part in collect_run(builder.root).attempts[0].rounds
    ]
    assert told == [
        [(f"n{node}", True, "its step ended, srun: SIGKILL") for node in (1, 2, 3, 4)],
        [("n3", True, "its agent was ended by SIGKILL")],
        [("n3", False, "")],
    ]


def test_an_end_with_0_is_a_fact_of_a_round_that_broke(builder: RunBuilder) -> None:
    builder.begin()
    builder.fail(make_failure(2, at=30, exitcode=3))
    own = [{"rank": 1, "exitcode": 0, "ended_ns": 7, "ended_uptime_ns": 27, "stopped": False}, {"rank": "x"}, 7]
    builder.event(0, "agent", 1, 31, "workers_stopped", round=0, seconds=0.1, ends=own)
    builder.event(0, "agent", 2, 31, "workers_stopped", round=0, seconds=0.1, ends="none")
    builder.round(0, 1, at=40)
    whole = [{"rank": 3, "exitcode": 0, "ended_ns": 9, "ended_uptime_ns": 50, "stopped": False}]
    builder.event(0, "agent", 3, 50, "workers_succeeded", round=1)
    builder.event(0, "agent", 3, 50, "workers_stopped", round=1, seconds=0.1, ends=whole)
    broken, fine = collect_run(builder.root).attempts[0].rounds
    assert broken.ends == (WorkerEnd(rank=1, node=1, exitcode=0, ended_ns=7, ended_uptime_ns=27),)
    assert fine.ends == ()


def test_an_event_without_an_error_file_counts(builder: RunBuilder) -> None:
    builder.begin()
    builder.fail(make_failure(2, at=30, exitcode=-11), error_file=False)
    (failure,) = collect_run(builder.root).attempts[0].rounds[0].failures
    assert (failure.global_rank, failure.signal, failure.host) == (2, "SIGSEGV", "n3")
    assert failure.source is EvidenceSource.EVENT
    assert "error.json is missing" in failure.problem


def test_an_error_file_that_no_agent_completed_counts(builder: RunBuilder) -> None:
    builder.begin()
    builder.fail(make_failure(0, at=30, exitcode=3))
    folder = builder.paths.attempt(0).rank(0, 2).root
    folder.mkdir(mode=0o700)
    inner = {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1795000030"}}
    (folder / "error.json").write_text(json.dumps({"message": inner}))
    other = folder.with_name("rank-00007")
    other.mkdir(mode=0o700)
    (other / "error.json").write_text(json.dumps({"message": inner, "hpc_elastic": {"version": 1, "global_rank": 1}}))
    failures = collect_run(builder.root).attempts[0].rounds[0].failures
    assert [failure.global_rank for failure in failures] == [0, 2, 7], "where a file lies is the truth about its place"
    assert (failures[1].message, failures[1].host, failures[1].node) == ("ValueError: x", "n3", 2)


def test_half_of_the_files_missing_or_torn(builder: RunBuilder) -> None:
    two_rounds(builder)
    builder.paths.run_json.write_text("{")
    attempt = builder.paths.attempt(0)
    attempt.attempt_json.unlink()
    for name in os.listdir(attempt.events):
        path = attempt.events / name
        if name.startswith("supervisor"):
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-20] + b"\n\xff{]\n[1]\n")
    attempt.rank(0, 2).error_file.write_text('{"message": {"message": "ValueErr')
    history = collect_run(builder.root)
    assert history.name == "run-1"
    assert history.problems[0].startswith("run.json: unreadable")
    assert history.attempts[0].problems == ("attempt.json: missing", "the supervisor's events are missing")
    assert history.attempts[0].outcome == ""
    failure = history.attempts[0].rounds[0].failures[1]
    assert failure.message == "ValueErr"
    assert failure.problem.startswith("torn")


def test_attempts_beyond_999_and_other_names(builder: RunBuilder) -> None:
    builder.attempt(0)
    for name in ("attempt-1000", "attempt-1", "attempt-x", "other"):
        (builder.root / name).mkdir()
    (builder.root / "latest").symlink_to("attempt-1000")
    assert [attempt.number for attempt in collect_run(builder.root).attempts] == [0, 1000]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        collect_run(tmp_path / "none")


def test_workers_that_were_to_be_forks_and_are_not_are_reported_with_the_reason(builder: RunBuilder) -> None:
    builder.begin()
    why = "the fork server ended with SIGABRT while it imported mine"
    for node, started_fresh in ((0, why), (1, why), (2, "")):
        builder.event(0, "agent", node, 5, "workers_started", round=0, pids=[1], started_fresh=started_fresh)
    history = collect_run(builder.root)
    (part,) = history.attempts[0].rounds
    assert part.fresh_starts == (("n1", why), ("n2", why))
    assert describe_fresh_starts(part.fresh_starts) == [f"workers started fresh on n1, n2: {why}"]


@pytest.mark.parametrize(
    "name", ["round_final", "worker_failed", "node_lost", "round_opened", "workers_stopped", "new"]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"round": "x"},
        {"round": -1},
        {"round": 0, "rank": 5, "exitcode": "no", "message": {"a": 1}, "failure_class": 7, "pid": None},
        {"round": 0, "ranks": [None, "a", 3]},
        {"round": 0, "node": "n3", "age": "long"},
    ],
)
def test_events_of_any_shape_raise_nothing(builder: RunBuilder, name: str, fields: dict[str, object]) -> None:
    builder.attempt(0)
    builder.event(0, "agent", 0, 5, name, **fields)
    builder.event(0, "supervisor", -1, 5, "agent_ended", **fields)
    builder.event(0, "supervisor", -1, 6, "attempt_ended", outcome=3, exit_code="x")
    assert collect_run(builder.root).attempts[0].exit_code is None
