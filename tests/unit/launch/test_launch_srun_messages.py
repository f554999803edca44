"""srun's and slurmstepd's messages of four versions."""

from __future__ import annotations

import pytest

from hpc_elastic.launch.slurm_launcher import SrunEvent, SrunEventKind, parse_srun_line
from tests.rigs.captures import DATA, VERSIONS, captured

Kind = SrunEventKind


def events(version: str, name: str) -> list[SrunEvent]:
    _, out, err = captured(version, name)
    return [event for line in (err or out).splitlines() if (event := parse_srun_line(line)) is not None]


def facts(event: SrunEvent) -> tuple[SrunEventKind, tuple[str, ...], int | None]:
    return event.kind, event.nodes, event.exit_code


REFUSED = {(Kind.STEP_REFUSED, (), None)}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("err-srun-exit-3", {(Kind.TASK_EXITED, ("n1",), 3), (Kind.TASK_EXITED, ("n2",), 3)}),
        ("err-srun-one-task-fails", {(Kind.TASK_EXITED, ("n2",), 7)}),
        ("err-srun-task-killed", {(Kind.TASK_KILLED, ("n1",), None), (Kind.TASK_KILLED, ("n2",), None)}),
        ("err-srun-kill-on-bad-exit", {(Kind.TASK_EXITED, ("n2",), 7), (Kind.TASK_KILLED, ("n1",), None)}),
        ("output-crash-A", {(Kind.NODE_FAILED, ("n3",), None)}),
        ("err-srun-bad-partition", REFUSED),
        ("err-srun-jobid-completed", REFUSED),
        ("err-srun-jobid-unknown", REFUSED),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_srun_prints_of_its_tasks(version: str, name: str, found: set[object]) -> None:
    said = events(version, name)
    cancels = name == "err-srun-kill-on-bad-exit" and version != "22.05.8"  # as captured
    assert {facts(event) for event in said} == found | ({(Kind.CANCELLED, (), None)} if cancels else set())
    assert all(event.detail == "Killed" for event in said if name == "err-srun-task-killed")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_command_that_is_not_there(version: str) -> None:
    (exited,) = events(version, "err-srun-no-such-command")
    assert (exited.kind, exited.exit_code) == (Kind.TASK_EXITED, 2)


@pytest.mark.parametrize("version", ["20.11.4", "26.05.5"])
def test_a_lost_node_that_ends_the_job(version: str) -> None:
    assert {event.kind for event in events(version, "output-crash-G")} == {Kind.NODE_FAILED, Kind.CANCELLED}


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            "srun: error: Task launch for StepId=5.0 failed on node n3: Communication connection failure",
            (Kind.LAUNCH_FAILED, ("n3",), None),
        ),
        ("srun: error: n[1-2,4]: tasks 0-1,3: Killed", (Kind.TASK_KILLED, ("n1", "n2", "n4"), None)),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", (Kind.TASK_KILLED, ("n1",), None)),
        ("srun: error: n3: tasks 2-3: Exited with exit code 9\n", (Kind.TASK_EXITED, ("n3",), 9)),
        ("srun: error: n1: task 0: Out Of Memory", (Kind.TASK_KILLED, ("n1",), None)),
        (
            "srun: error: Unable to create step for job 12: Requested nodes are busy",
            (Kind.STEP_REFUSED, (), None),
        ),
        ("srun: error: n[1-: task 0: Killed", (Kind.TASK_KILLED, (), None)),
    ],
)
def test_messages(line: str, event: tuple[object, ...]) -> None:
    found = parse_srun_line(line)
    assert found is not None
    assert facts(found) == event


@pytest.mark.parametrize(
    "line",
    [
        "",
        "n3: task 2: Killed",
        "loss 0.5 srun: error: n3: task 2: Killed",
        "srun: job 82 queued and waiting for resources",
        "srun: got SIGCONT",
        "[2026-11-21T02:10:03.041] error: something of the user's own",
        "[rank0]: Traceback (most recent call last):",
        "slurmstepd-n1: warning: nothing",
    ],
)
def test_other_lines_are_no_events(line: str) -> None:
    assert parse_srun_line(line) is None


def test_no_other_recorded_line_of_a_job_is_taken_for_an_event() -> None:
    for path in DATA.glob("*/output-*.txt"):
        for line in path.read_text().splitlines():
            if not line.startswith(("srun:", "slurmstepd", "[20")):
                assert parse_srun_line(line) is None
