"""Every recorded `scontrol show job` and `squeue` of four versions."""

from __future__ import annotations

import pytest

from hpc_elastic.slurm.job_state import (
    JobPhase,
    JobState,
    parse_dependents,
    parse_records,
    parse_sacct,
    parse_show_job,
    parse_squeue,
)
from tests.rigs.captures import DATA, VERSIONS, captured, exists, names

SHOWN = [(version, name) for version in VERSIONS for name in names(version, "scontrol-show-job-*")]
QUEUED = [(version, name) for version in VERSIONS for name in names(version, "squeue-*")]


def shown(version: str, name: str) -> JobState:
    return parse_show_job(captured(version, f"scontrol-show-job-{name}")[1])[0]


@pytest.mark.parametrize(("version", "name"), SHOWN)
def test_every_recorded_job_is_read(version: str, name: str) -> None:
    text = captured(version, name)[1]
    states = parse_show_job(text)
    assert len(states) == sum(line.startswith("JobId=") for line in text.splitlines()) >= 1
    for state in states:
        assert state.phase is not JobPhase.UNKNOWN
        assert state.partition
        assert state.requeue is ("Requeue=1" in text) or "Requeue=0" in text
        if state.phase is JobPhase.RUNNING:
            assert state.nodes
            assert state.min_nodes == len(state.nodes)
        if state.phase is JobPhase.PENDING:
            assert state.nodes == ()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "state", "phase", "reason"),
    [
        ("running", "RUNNING", JobPhase.RUNNING, ""),
        ("suspended", "SUSPENDED", JobPhase.RUNNING, ""),
        ("completing", "COMPLETING", JobPhase.COMPLETING, ""),
        ("completed", "COMPLETED", JobPhase.FINISHED, ""),
        ("failed", "FAILED", JobPhase.FINISHED, "NonZeroExitCode"),
        ("timeout", "TIMEOUT", JobPhase.FINISHED, "TimeLimit"),
        ("cancelled", "CANCELLED", JobPhase.FINISHED, ""),
        ("pending-begin", "PENDING", JobPhase.PENDING, "BeginTime"),
        ("pending-held", "PENDING", JobPhase.PENDING, "JobHeldUser"),
        ("requeuehold", "PENDING", JobPhase.PENDING, "job requeued in held state"),
        ("special-exit", "SPECIAL_EXIT", JobPhase.PENDING, "job requeued in held state"),
        ("requeued-begintime", "PENDING", JobPhase.PENDING, "BeginTime"),
    ],
)
def test_states(version: str, name: str, state: str, phase: JobPhase, reason: str) -> None:
    job = shown(version, name)
    assert (job.state, job.phase, job.reason) == (state, phase, reason)
    assert job.held is (name in ("pending-held", "requeuehold", "special-exit"))


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("launch_failed_requeued_held", "held: scontrol release 7 lets it go on"),
        ("JobHoldMaxRequeue", "held: scontrol release 7 lets it go on"),
        ("JobHeldUser", "held: scontrol release 7 lets it go on"),
        ("JobHeldAdmin", "held: only the site's support lets it go on"),
        ("BeginTime", ""),
        ("Resources", ""),
    ],
)
def test_who_lets_a_held_job_go_on(reason: str, way_out: str) -> None:
    """The first as scontrol of 22.05 printed it where a prolog had failed."""
    (job,) = parse_show_job(f"JobId=7 JobName=train\n   JobState=PENDING Reason={reason} Dependency=(null)\n")
    assert (job.held, job.way_out) == (bool(way_out), way_out)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_requeued_job_says(version: str) -> None:
    job = shown(version, "requeued-begintime")
    assert job.restarts == 1
    assert job.requeue
    assert job.nodes == ()
    assert job.min_nodes == 2
    assert job.time_limit == 300
    assert job.start_time is not None
    restarted = shown(version, "restarted-with-excnodelist")
    # 20.11 and 22.05 ask for the number that was left, 24.11 and 26.05 for the whole range
    assert restarted.nodes == (("n2", "n3") if version < "24" else ("n2", "n3", "n4"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lost_node_and_the_dead_batch_host(version: str) -> None:
    assert shown(version, "crash-A").nodes == ("n1", "n2", "n4")
    after = shown(version, "crash-C")  # the batch host's death: RUNNING on the rest, BatchHost still the dead one
    assert after.phase is JobPhase.RUNNING
    assert after.nodes == ("n9", "n10")


@pytest.mark.parametrize("version", VERSIONS)
def test_arrays_and_het_jobs(version: str) -> None:
    task = shown(version, "array-task2")
    assert task.array_task_id == "2"
    assert task.array_job_id is not None
    assert task.job_id != task.array_job_id
    rest = shown(version, "pending-array-all")
    assert rest.array_task_id == "0-7,10,20-21%3"
    leader, second = parse_show_job(captured(version, "scontrol-show-job-running-het")[1])
    assert leader.job_id != second.job_id
    assert leader.nodes + second.nodes == ("n1", "n2", "n3")


@pytest.mark.parametrize("version", VERSIONS)
def test_exit_codes(version: str) -> None:
    assert (shown(version, "failed").exit_code, shown(version, "failed").exit_signal) == (3, 0)
    assert shown(version, "failed-signal").exit_signal == 11
    assert shown(version, "cancelled").exit_signal in (0, 15)


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != "22.05.8"])
def test_the_one_line_form_says_the_same(version: str) -> None:
    states = parse_show_job(captured(version, "scontrol-show-job-all-oneline")[1])
    assert len(states) > 20
    assert {state.phase for state in states} >= {JobPhase.PENDING, JobPhase.RUNNING, JobPhase.FINISHED}


def test_a_text_of_the_users_is_no_field() -> None:
    text = (
        "JobId=7 JobName=x JobState=FAILED NodeList=n9\n   JobState=RUNNING Reason=None Dependency=(null)\n"
        "   NodeList=n1\n   Comment=JobState=TIMEOUT Restarts=9 \n   Restarts=1\n"
    )
    (job,) = parse_show_job(text)
    assert (job.name, job.state, job.nodes, job.restarts) == ("x JobState=FAILED NodeList=n9", "RUNNING", ("n1",), 1)
    assert job.comment == "JobState=TIMEOUT Restarts=9"


def test_torn_and_foreign_text_is_read_as_far_as_it_goes() -> None:
    assert parse_show_job("") == ()
    assert parse_show_job("No jobs in the system\n") == ()
    (job,) = parse_show_job(
        "JobId=7 JobName=x\n   JobState=DREAMING NodeList=n[1-\n   NumNodes=many ExitCode=x:y TimeLi"
    )
    assert job.phase is JobPhase.UNKNOWN
    assert (job.nodes, job.min_nodes, job.exit_code, job.time_limit) == ((), 0, 0, None)
    assert parse_records("  JobState=RUNNING\n") == []


@pytest.mark.parametrize(("version", "name"), QUEUED)
def test_every_recorded_queue_line_is_read(version: str, name: str) -> None:
    text = captured(version, name)[1]
    lines = [line for line in text.splitlines() if line.count("|") == 11 and not name.startswith("squeue-Format")]
    lines = [] if name == "squeue-format-A-F-K" else lines
    states = parse_squeue("\n".join(lines))
    assert len(states) == len(lines)
    for line, state in zip(lines, states, strict=True):
        assert line.startswith(state.job_id + "|" + state.state)
        assert state.phase is not JobPhase.UNKNOWN
        assert bool(state.nodes) is (state.phase is not JobPhase.PENDING)


@pytest.mark.parametrize("version", VERSIONS)
def test_queue_and_job_agree(version: str) -> None:
    compared = 0
    for path in sorted((DATA / version).glob("squeue-*.txt")):
        other = "scontrol-show-job-" + path.stem.removeprefix("squeue-")
        queued = parse_squeue(path.read_text()) if exists(version, other) else ()
        for state in queued if len(queued) == 1 else ():
            job = parse_show_job(captured(version, other)[1])[0]
            assert (job.state, job.held, job.time_limit) == (state.state, state.held, state.time_limit)
            compared += 1
    assert compared >= 15


@pytest.mark.parametrize(
    ("dependency", "number", "waits"),
    [
        ("afterany:12(unfulfilled)", "12", True),
        ("afterany:12", "12", True),
        ("afterok:9(unfulfilled),afterany:12(unfulfilled)", "12", True),
        ("afterany:9:12", "12", True),
        ("afterany:70_1(unfulfilled)", "70_1", True),
        ("afterany:70_*(unfulfilled)", "70", True),
        ("afterany:123(unfulfilled)", "12", False),
        ("afterany:112(unfulfilled)", "12", False),
        ("afterany:70_11(unfulfilled)", "70_1", False),
        ("afterany:70_1(unfulfilled)", "70", False),
        ("afterok:12(unfulfilled)", "12", False),
        ("(null)", "12", False),
        ("", "12", False),
    ],
)
def test_who_waits_for_whose_end(dependency: str, number: str, waits: bool) -> None:
    assert parse_dependents(f"CLUSTER: c\n13|{dependency}\n", number) == (("13",) if waits else ())


def test_a_task_that_waits_is_named_by_its_array() -> None:
    assert parse_dependents("5_[1]|afterany:3_1(unfulfilled)\n", "3_1") == ("5",)


def test_the_accounting_of_ended_jobs() -> None:
    text = "47|CANCELLED by 1001|0:15\n47.batch|CANCELLED|0:15\n48_3|FAILED|1:0\n49+1|TIMEOUT|0:0\nsacct: x\n"
    task, failed, component = parse_sacct(text)
    assert (task.job_id, task.state, task.exit_signal, task.code) == ("47", "CANCELLED", 15, 143)
    assert (failed.array_job_id, failed.array_task_id, failed.code) == ("48", "3", 1)
    assert (component.job_id, component.state) == ("49+1", "TIMEOUT")
    assert failed.how_it_ended == "its batch script failed (Slurm: FAILED)"
