"""The first lines of a report: what happened, to which rank, where; or what ended a run in which nothing failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document, with_end
from hpc_elastic.report.history import RunHistory, StackGroup
from hpc_elastic.report.render_html import render_html
from hpc_elastic.report.render_text import render_text
from hpc_elastic.report.wording import describe_class, without_failure
from hpc_elastic.run.paths import UNHEALTHY_CODE, WITHOUT_VERDICT
from tests.rigs.run_builder import GLOO, RunBuilder, make_failure


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path / "run", nodes=2).begin()


def section(history: RunHistory) -> list[str]:
    """The lines of the root cause, up to the next heading."""
    lines = render_text(Document(history)).splitlines()
    lines = lines[lines.index("-" * 60) + 1 :]
    return [lines[0], *lines[1 : next(n for n, line in enumerate(lines) if n and not line.startswith(" "))]]


def test_the_cause_that_is_not_known_names_a_suspect_and_no_victim(builder: RunBuilder) -> None:
    """Rank 1 ended with 0, and rank 0 lost its connection by that."""
    builder.event(0, "agent", 1, 4.0, "workers_succeeded", round=0)
    builder.fail(make_failure(0, at=5, exception=f"RuntimeError: {GLOO.format(rank=1)}"))
    history = collect_run(builder.root)
    lines = section(history)
    assert lines[0].startswith("Root cause: not known. Look at rank 1 (n2): ")
    assert "RuntimeError" not in "\n".join(lines)
    text = render_text(Document(history))
    assert "Failures in that round: 1\n" in text
    assert "What rank 0 on n1 printed, the first of them:\n" in text
    assert "Other failures" not in text


AGAIN, REQUEUED = "requeue: requeue 1 of 3", "REQUEUED as attempt 1"
NEAR_LIMIT, NO_END = "notice U (time limit); saved", "ended, and its end was not recorded"


@pytest.mark.parametrize(
    ("outcome", "code", "reason", "decision", "title", "status"),
    [
        ("cancelled", 130, "SIGINT on vm", "end: the run was cancelled", "Cancelled by Ctrl-C.", "CANCELLED"),
        ("cancelled", 143, "SIGTERM on vm", "end: it was cancelled", "Cancelled: SIGTERM on vm.", "CANCELLED"),
        ("preempted", 75, "notice SIGUSR2", AGAIN, "Preempted: requeued as attempt 1.", REQUEUED),
        ("preempted", 143, "notice T (preemption)", "end: 0 of 0 requeues used", "Preempted.", "PREEMPTED"),
        ("preempted", 143, "notice U (requeue); saved", "end: 0 of 0", "Asked to requeue.", "ASKED TO REQUEUE"),
        ("preempted", 75, NEAR_LIMIT, AGAIN, "Near time limit: requeued as attempt 1.", REQUEUED),
        ("timed_out", 75, "time", AGAIN, "Time limit reached: requeued as attempt 1.", REQUEUED),
    ],
)
def test_a_run_that_was_ended_names_what_ended_it(
    builder: RunBuilder, outcome: str, code: int, reason: str, decision: str, title: str, status: str
) -> None:
    builder.stopped(0, 0, at=8)
    builder.event(0, "supervisor", -1, 8, "agent_ended", node=1, name="n2", code=1)
    builder.end(0, at=9, outcome=outcome, code=code, reason=reason, decision=decision)
    history = collect_run(builder.root)
    lines = render_text(Document(history)).splitlines()
    assert title in lines
    assert lines[1].startswith(f"train.py {status} (exit code {code})")
    assert not [line for line in lines if "Root" in line or "the agent on" in line]
    assert title in render_html(Document(history))


@pytest.mark.parametrize(
    ("outcome", "reason", "title", "end"),
    [
        ("", "", f"No failure is recorded, but attempt 0 {NO_END}.", f": {NO_END}"),
        ("too_few_nodes", "2 of 4 nodes", "No failure is recorded, but attempt 0 too few nodes.", ": 2 of 4 nodes"),
        ("preempted", NEAR_LIMIT, "No failures.", "near time limit, exit code 75: notice U (time"),
        ("preempted", "notice T (preemption); saved", "No failures.", "preempted, exit code 75: notice T (pre"),
    ],
)
def test_a_run_that_went_on_says_why_each_attempt_ended(
    builder: RunBuilder, outcome: str, reason: str, title: str, end: str
) -> None:
    if outcome:
        builder.end(0, at=9, outcome=outcome, code=75, reason=reason, decision="requeue: requeue 1 of 3")
    builder.attempt(1, at=20)
    builder.round(1, 0, at=21)
    builder.succeeded(1, 0, at=30)
    builder.end(1, at=31, outcome="succeeded", code=0)
    lines = render_text(Document(collect_run(builder.root))).splitlines()
    assert title in lines
    (line,) = (line for line in lines if line.startswith("  attempt 0 "))
    assert end in line


@pytest.mark.parametrize(("exitcode", "is_slurms"), [(-15, True), (-11, False)])
def test_a_killed_batch_script_is_the_cause_not_the_signal_by_which_slurm_cleaned_up(
    builder: RunBuilder, exitcode: int, is_slurms: bool
) -> None:
    builder.fail(make_failure(1, at=5, exitcode=exitcode))
    end = "batch script ended by signal 9 (Slurm: FAILED, JobLaunchFailure)"
    history = with_end(
        collect_run(builder.root), attempt=0, outcome="failed", exit_code=137, decision=f"end: {WITHOUT_VERDICT}{end}"
    )
    lines = section(history)
    assert (lines[0], lines[1].strip() == end) == ("Root Cause (first observed failure):", is_slurms)


def test_restarts_within_the_processes_are_no_lack_of_failures(builder: RunBuilder) -> None:
    interruptions = [{"rank": 1, "interruption": "TERMINATED"}]
    builder.event(
        0, "agent", 0, 5, "ring_restarted", round=0, iteration=1, seconds=7.0, world_size=2, active_world_size=1,
        interruptions=interruptions, joined=[], reason="",
    )  # fmt: skip
    builder.succeeded(0, 0, at=20)
    builder.end(0, at=21, outcome="succeeded", code=0)
    history = collect_run(builder.root)
    assert section(history)[0] == "No failure ended a round: 1 restart within the processes, 7.0 s in all."


def test_the_reason_of_a_decision_leaves_out_what_another_rank_raised(builder: RunBuilder) -> None:
    """The coordinator has no times: it may quote another rank than the report's."""
    builder.fail(make_failure(1, at=5, exception="ValueError: bad batch"))
    builder.fail(make_failure(0, at=6, exception="KeyError: 'x'"))
    reason = "restarts exhausted (0 of 0 restarts used): rank 0: KeyError: 'x'"
    builder.event(0, "agent", 0, 7, "closed", round=1, outcome="failed", reason=reason)
    assert Document(collect_run(builder.root)).done == ("given up: restarts exhausted (0 of 0 restarts used)",)


def test_only_the_verdict_says_which_failures_are_the_same(builder: RunBuilder) -> None:
    """One that this job ended has the same exit code; the verdict does not count it, and nor does its line."""
    builder.fail(make_failure(0, at=5, exitcode=1))
    builder.fail(make_failure(1, at=6, exitcode=-15, stopped_by_agent=True))
    text = render_text(Document(collect_run(builder.root)))
    assert "[the same failure]" not in text
    assert "[ended by this job]" in text


@pytest.mark.parametrize(
    ("per_node", "after", "evidence"),
    [
        (1, 0.004, "first of 2; the other was stopped within 4 ms"),
        (8, 0.004, "first of 16; the others were stopped within 4 ms"),
        (8, None, "first of 16; the others were stopped before they could fail"),
    ],
)
def test_of_ranks_that_were_stopped_nobody_knows_whether_they_would_have_failed(
    tmp_path: Path, per_node: int, after: float | None, evidence: str
) -> None:
    builder = RunBuilder(tmp_path / "other", nodes=2, per_node=per_node).begin()
    builder.fail(make_failure(1, at=5, exception="ValueError: bad batch", per_node=per_node))
    if after is not None:
        builder.event(0, "agent", 1 // per_node, 5 + after, "workers_stopping", round=0, reason="rank 1 failed")
    assert Document(collect_run(builder.root)).subject.verdict.evidence == evidence


def test_a_rank_without_a_stack_and_without_a_place_in_the_kernel_has_no_line(builder: RunBuilder) -> None:
    builder.fail(make_failure(1, at=5, exception="ValueError: bad batch"))
    history = collect_run(builder.root)
    (attempt,) = history.attempts
    groups = (
        StackGroup(ranks=(0,), stack=(), state="R (running)"),
        StackGroup(ranks=(1,), stack=(), state="D (disk sleep) in rpc_wait_bit_killable"),
        StackGroup(ranks=(2,), stack=()),
    )
    part = replace(attempt.rounds[0], stacks=groups)
    text = render_text(Document(replace(history, attempts=(replace(attempt, rounds=(part,)),))))
    assert "rank 1: no Python stack; D (disk sleep)" in text
    assert "rank 0: no Python stack" not in text
    assert "rank 2: no Python stack" not in text


def test_a_reason_without_a_cause_is_shown_without_the_victim_that_it_quotes() -> None:
    lost = make_failure(1, at=1.0, exception="RuntimeError: Connection closed by peer")
    line = "given up: restarts exhausted (0 of 0 restarts used): cause not known, first seen: rank 1: RuntimeError: Co"
    assert without_failure(line, [lost], lost) == (
        "given up: restarts exhausted (0 of 0 restarts used): cause not known"
    )


@pytest.mark.parametrize("suspect", [True, False])
def test_a_node_whose_hardware_spoke_is_called_suspect(suspect: bool) -> None:
    failure = make_failure(6, at=1, exception="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    text = describe_class(replace(failure, node_suspect=suspect))
    assert text.endswith("; n7 is suspect") is suspect
    assert "(ECC) error" in text


# -- a node that failed a health check: told once, with its own reason, whoever's word of it is there

WHY = "health check failed: GPU 2 has 3 uncorrectable ECC errors"


def tell(root: Path, *, own: bool, coordinator: bool) -> RunBuilder:
    """Node n3 leaves after round 0, in which rank 0 failed; round 1 goes on without it."""
    builder = RunBuilder(root / "of-4").begin()
    builder.fail(make_failure(0, at=30, exception="ValueError: bad"))
    builder.stopped(0, 0, at=31)
    if own:
        builder.event(0, "agent", 2, 31.5, "health_check_failed", round=0, checks=["gpu"], reason=WHY)
    if coordinator:
        builder.event(0, "agent", 0, 32, "node_left", round=1, node=2, host="n3", reason=WHY)
    builder.event(0, "supervisor", -1, 32, "agent_ended", node=2, name="n3", code=UNHEALTHY_CODE)
    return builder


@pytest.mark.parametrize(("own", "coordinator", "where"), [(True, True, 0), (True, False, 0), (False, True, 1)])
def test_it_is_told_once(tmp_path: Path, own: bool, coordinator: bool, where: int) -> None:
    builder = tell(tmp_path, own=own, coordinator=coordinator)
    (attempt,) = collect_run(builder.root).attempts
    losses = [loss for part in attempt.rounds for loss in part.lost_nodes]
    assert [(loss.round, loss.node, loss.summary) for loss in losses] == [(where, 2, f"n3 left: {WHY}")]


def test_a_node_whose_words_did_not_get_through_is_lost_with_its_agent_s_code(tmp_path: Path) -> None:
    builder = tell(tmp_path, own=False, coordinator=False)
    builder.event(0, "agent", 0, 32, "node_lost", round=0, node=2, host="n3", age=None)
    (attempt,) = collect_run(builder.root).attempts
    (loss,) = attempt.rounds[0].lost_nodes
    assert loss.detail == "its agent took it out: a health check failed"


def test_rounds_that_lost_different_nodes_are_not_told_as_the_same(tmp_path: Path) -> None:
    """With spares the rounds look alike but for that."""
    builder = RunBuilder(tmp_path / "of-4")
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
