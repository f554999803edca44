"""What the batch side asks of Slurm, and how it takes the answers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.batch import CONTROLLER_PATIENCE, SlurmSite, run_of_this_job
from hpc_elastic.launch.run_directory import create_run
from hpc_elastic.launch.signal_table import SlurmWord
from hpc_elastic.run_spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.slurm.errors import SlurmError, SlurmPermissionError, SlurmUnavailableError
from hpc_elastic.slurm.job_state import JobState
from tests.rigs.fake_clock import FakeClock

ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "n1",
    "SLURM_RESTART_COUNT": "1",
}
UNAVAILABLE = SlurmUnavailableError(what="requeueing job 7", why="Unable to contact slurm controller")


class Client:
    """Answers `requeue` and `job_state` with what a test put there: a value, or an error to raise."""

    def __init__(self, *answers: Any, state: Any = None) -> None:
        self.answers = list(answers)
        self.state = state
        self.requeues = 0

    def requeue(self, job: object) -> None:
        self.requeues += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer

    def job_state(self, job: object) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def site() -> Callable[[Client], tuple[SlurmSite, FakeClock]]:
    def build(client: Client) -> tuple[SlurmSite, FakeClock]:
        clock = FakeClock()
        return SlurmSite(ENV, client=client, hurried=client, clock=clock, umask=0o22), clock  # type: ignore[arg-type]

    return build


def test_a_requeue_ignores_the_sigterm_that_it_brings(site: Callable[..., Any]) -> None:
    slurm, _ = site(Client(None))
    assert slurm.requeue() == "job 7 is requeued"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_controller_that_comes_back_in_time_gets_the_requeue(site: Callable[..., Any]) -> None:
    client = Client(UNAVAILABLE, UNAVAILABLE, None)
    slurm, clock = site(client)
    slurm.requeue()
    assert client.requeues == 3
    assert clock.now > 1010


def test_one_that_never_comes_back_is_given_up(site: Callable[..., Any]) -> None:
    slurm, clock = site(Client(UNAVAILABLE))
    with pytest.raises(SlurmUnavailableError):
        slurm.requeue()
    assert CONTROLLER_PATIENCE <= clock.now - 1000 < CONTROLLER_PATIENCE + 60


@pytest.mark.parametrize(("restarts", "held"), [(2, True), (1, False)])
def test_a_requeue_that_looked_like_a_failure_is_looked_up(site: Callable[..., Any], restarts: int, held: bool) -> None:
    """scontrol dies of the very SIGTERM that the requeue brings: whether it held is Slurm's to say."""
    died = SlurmError(what="requeueing job 7", why="it was killed", rc=-15)
    slurm, _ = site(Client(died, state=SimpleNamespace(restarts=restarts)))
    if held:
        slurm.requeue()
    else:
        with pytest.raises(SlurmError, match="it was killed"):
            slurm.requeue()


def test_a_refusal_is_no_reason_to_wait(site: Callable[..., Any]) -> None:
    refused = SlurmPermissionError(what="requeueing job 7", why="Access/permission denied")
    client = Client(refused, state=UNAVAILABLE)
    slurm, clock = site(client)
    with pytest.raises(SlurmPermissionError):
        slurm.requeue()
    assert (client.requeues, clock.now) == (1, 1000)


def test_what_slurm_says_is_asked_in_a_hurry(site: Callable[..., Any]) -> None:
    slurm, _ = site(Client(None, state=JobState(job_id="7", state="COMPLETING", reason="TimeLimit", restarts=1)))
    assert slurm.ask(near=0.0).word is SlurmWord.TIME_LIMIT
    slurm, _ = site(Client(None, state=JobState(job_id="7", state="COMPLETING", reason="", restarts=2)))
    assert slurm.ask(near=0.0).word is SlurmWord.REQUEUED, "this attempt began after one restart"
    slurm, _ = site(Client(None, state=UNAVAILABLE))
    assert slurm.ask(near=0.0).word is SlurmWord.SILENT


@pytest.mark.parametrize(
    ("is_batch", "requeue", "said"),
    [
        (False, True, "Slurm requeues batch jobs only"),
        (True, False, "--no-requeue"),
        (True, True, ""),
    ],
)
def test_an_allocation_of_sallocs_is_not_armed(
    site: Callable[..., Any], is_batch: bool, requeue: bool, said: str
) -> None:
    slurm, _ = site(Client(state=SimpleNamespace(is_batch=is_batch, requeue=requeue)))
    armed, reason = slurm._armed(SimpleNamespace(requeue=True, max_requeues=3))
    assert armed is (not said)
    assert said in reason


def test_a_run_and_its_job_must_both_be_an_array_or_neither(tmp_path: Path) -> None:
    entry = Entrypoint(kind=EntryKind.SCRIPT, target="train.py")
    spec = RunSpec(run_id="r", uid="0" * 32, name="r", created_ns=1, entrypoint=entry, cwd="/")
    one, array = (
        create_run(replace(spec, run_id=name, array=text), tmp_path).paths for name, text in (("a", ""), ("b", "0-3"))
    )
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert run_of_this_job(one.root, {}) == one.root
    assert run_of_this_job(array.root, task) == array.root / "task-3"
    with pytest.raises(UsageError, match="is an array of runs"):
        run_of_this_job(array.root, {})
    with pytest.raises(UsageError, match="this job is task 3 of an array: all tasks would write to it"):
        run_of_this_job(one.root, task)
