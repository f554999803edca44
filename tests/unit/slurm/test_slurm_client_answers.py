"""What the contract does not say: silence, unreadable answers, other clusters; the site as four versions print it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from hpc_elastic.slurm.client import CommandResult, SlurmClient, SlurmConfig, parse_show_config, parse_sinfo_nodes
from hpc_elastic.slurm.commands import JobId, SlurmError, SlurmMissingError, SlurmUnavailableError
from tests.rigs.captures import VERSIONS, captured
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeSlurm

JOB = JobId("7")
CALLS: list[Callable[[SlurmClient], object]] = [
    lambda client: client.submit("/tmp/job.sh"),
    lambda client: client.job_state(JOB),
    lambda client: client.queue_states([JOB]),
    lambda client: client.config(),
    lambda client: client.requeue(JOB),
    lambda client: client.allow_requeue(JOB),
    lambda client: client.start_now(JOB),
    lambda client: client.exclude_nodes(JOB, ["n1"]),
    lambda client: client.set_num_nodes(JOB, 1, 2),
    lambda client: client.cancel(JOB),
    lambda client: client.partitions(),
]


def client_of(fake: FakeSlurm) -> SlurmClient:
    return SlurmClient(fake, FakeClock())


def answering(stdout: str, rc: int = 0, stderr: str = "") -> SlurmClient:
    def run(argv: Sequence[str], *, timeout: float) -> CommandResult:
        return CommandResult(rc=rc, stdout=stdout, stderr=stderr)

    return SlurmClient(run, FakeClock())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("call", CALLS)
def test_no_controller_is_told_from_every_other_failure(version: str, call: Callable[[SlurmClient], object]) -> None:
    fake = FakeSlurm(version)
    fake.reachable = False
    with pytest.raises(SlurmUnavailableError) as caught:
        call(client_of(fake))
    assert caught.value.rc != 0
    assert "(after " in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_a_command_that_never_ends_is_unavailable(call: Callable[[SlurmClient], object]) -> None:
    fake = FakeSlurm()
    fake.hangs = True
    with pytest.raises(SlurmUnavailableError, match="did not answer"):
        call(client_of(fake))


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_command_is_named(call: Callable[[SlurmClient], object]) -> None:
    fake = FakeSlurm()
    fake.missing = {"sbatch", "scontrol", "squeue", "scancel", "sinfo"}
    with pytest.raises(SlurmMissingError) as caught:
        call(client_of(fake))
    assert fake.calls[-1][0] in str(caught.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_cluster_comes_back_with_the_id(version: str) -> None:
    answer = captured(version, "sbatch-parsable-cluster")[1]
    job = answering(answer).submit("/tmp/job.sh")
    assert job == JobId(answer.partition(";")[0], "rig")


def test_a_sites_greeting_before_the_id_is_passed_over() -> None:
    assert answering("Welcome!\n12\n").submit("/tmp/job.sh") == JobId("12")


@pytest.mark.parametrize("answer", ["", "12a", "٣"])
def test_an_answer_that_is_no_id_is_an_error(answer: str) -> None:
    with pytest.raises(SlurmError, match="instead of a job id"):
        answering(answer).submit("/tmp/job.sh")


def test_an_empty_answer_about_a_job_is_not_taken_for_no_job() -> None:
    with pytest.raises(SlurmError):
        answering("").job_state(JOB)


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", SlurmUnavailableError),
        ("squeue: error: something of a plugin's", SlurmUnavailableError),
        ("slurm_load_jobs error: Invalid job id specified", None),
        ("squeue: a note of the site's", None),
    ],
)
def test_an_error_with_exit_code_0_is_no_answer(stderr: str, error: type[Exception] | None) -> None:
    """So squeue ends where another cluster's controller is down."""
    client = answering("CLUSTER: beta\n", stderr=f"{stderr}\n")
    if error is None:
        assert client.queue_states([JOB]) == ()
    else:
        with pytest.raises(error):
            client.queue_states([JOB])


def test_a_failure_that_says_nothing() -> None:
    with pytest.raises(SlurmError, match="scontrol exited with 3 and printed nothing"):
        answering("", rc=3).requeue(JOB)


def test_a_question_that_slurms_own_signal_ends_is_asked_again() -> None:
    """A cancel signals all processes of the batch script, the command that asks what the signal means among them."""
    text = captured("22.05.8", "scontrol-show-job-running-array")[1]
    answers = [CommandResult(rc=-15, stdout="", stderr=""), CommandResult(rc=0, stdout=text, stderr="")]
    client = SlurmClient(lambda argv, *, timeout: answers.pop(0), FakeClock())
    assert len(client.job_states(JOB)) == 3
    with pytest.raises(SlurmError, match="scontrol exited with -15"):
        answering("", rc=-15).job_state(JOB)


def test_what_changes_something_is_not_done_again_for_that() -> None:
    answers = [CommandResult(rc=-15, stdout="", stderr="")]
    with pytest.raises(SlurmError):
        SlurmClient(lambda argv, *, timeout: answers.pop(0), FakeClock()).requeue(JOB)


@pytest.mark.parametrize("version", VERSIONS)
def test_of_an_array_the_task_that_was_asked_for(version: str) -> None:
    text = captured(version, "scontrol-show-job-running-array")[1]
    client = answering(text)
    states = client.job_states(JOB)
    assert len(states) == 3
    for state in states:
        assert client.job_state(JobId(state.job_id)) == state
    assert client.job_state(JobId("nonesuch")) == states[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_config(version: str) -> None:
    config = parse_show_config(captured(version, "scontrol-show-config")[1])
    assert config == SlurmConfig(
        version=tuple(int(part) for part in version.split(".")),
        kill_wait=5,
        slurmd_timeout=20,
        job_requeue=True,
        cluster="rig",
        now=config.now,
    )
    assert config.now is not None
    assert time.strftime("%Y-%m-%dT%H", time.localtime(config.now)) in ("2026-11-21T01", "2026-11-21T02")
    assert config.version_text == version


def test_what_is_missing_or_unreadable_takes_slurms_default() -> None:
    config = parse_show_config("KillWait = soon\nJobRequeue = 0\nSlurmdTimeout = 0 sec\n")
    assert (config.kill_wait, config.job_requeue, config.slurmd_timeout) == (30, False, 0)
    assert (config.version, config.version_text) == ((), "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "usable"), [("idle", 4), ("drained", 3)])
def test_nodes_of_partitions(version: str, name: str, usable: int) -> None:
    partitions = parse_sinfo_nodes(captured(version, f"sinfo-N-o-{name}")[1])
    assert {partition.name for partition in partitions} == {"main", "short", "lowr", "lowc", "high"}
    assert [partition.name for partition in partitions if partition.default] == ["main"]
    assert {(len(partition.names), len(partition.usable_names)) for partition in partitions} == {(4, usable)}


@pytest.mark.parametrize(
    ("version", "total", "usable"), [("20.11.4", 19, 13), ("24.11.5", 17, 12), ("26.05.5", 19, 13)]
)
def test_crashed_nodes_are_not_usable(version: str, total: int, usable: int) -> None:
    partitions = parse_sinfo_nodes(captured(version, "sinfo-N-o-crashed")[1])
    main = next(partition for partition in partitions if partition.default)
    assert (len(main.names), len(main.usable_names)) == (total, usable)
    (found,) = [part for part in partitions if part.name == "pA"]
    assert not found.default
    assert (len(found.names), len(found.usable_names)) == (4, 3)
    assert found.usable_names < found.names


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("idle", 1), ("mixed", 1), ("allocated", 1), ("planned", 1), ("idle~", 1), ("mixed-", 1), ("completing", 1),
        ("idle*", 0), ("down", 0), ("down*", 0), ("drained", 0), ("draining", 0), ("failing", 0), ("maint", 0),
    ],
)  # fmt: skip
def test_node_states(state: str, usable: int) -> None:
    (partition,) = parse_sinfo_nodes(f"n1|p|{state}|x|a reason | with bars\n")
    assert len(partition.usable_names) == usable


def test_foreign_lines_are_left_out() -> None:
    assert parse_sinfo_nodes("CLUSTER: a\n\n|||\nPARTITION AVAIL\n") == ()
