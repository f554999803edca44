"""When a job is taken to be over: by its run's files, and by Slurm where those have nothing to say any more."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.launch.result import StoredResult
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import EntryKind, Entrypoint, RunSpec
from hpc_elastic.submission import job as job_module
from hpc_elastic.submission.job import ElasticJob
from hpc_elastic.submission.job_states import FORGOTTEN


class Slurm:
    """Stands for the watcher: what Slurm said when it was asked last, and what it would say now."""

    def __init__(self) -> None:
        self.last = self.now = "PENDING"
        self.asked = 0

    def register_job(self, job_id: str) -> None: ...

    def look_again_at(self, job_id: str) -> None: ...

    def has_asked_about(self, job_id: str) -> bool:
        return self.asked > 0

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        if mode == "force":
            self.last, self.asked = self.now, self.asked + 1
        return self.last


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    found = Slurm()
    monkeypatch.setattr(ElasticJob, "watcher", found)
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(job_module, "_REPORT_SECONDS", 0.0)
    return found


@pytest.fixture
def job(tmp_path: Path, slurm: Slurm) -> ElasticJob[Any]:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    entry = Entrypoint(kind=EntryKind.MODULE, target="x")
    RunSpec(
        run_id="run", uid="0", name="f", created_ns=1, entrypoint=entry, cwd="/", max_nodes=2, nproc_per_node="3"
    ).save(paths.run_json)
    return ElasticJob(tmp_path / "jobs" / "%j", "70", run_dir=paths.root)


def attempt(job: ElasticJob[Any], number: int, *, action: str | None = None, outcome: str = "preempted") -> None:
    folder = RunPaths(job.run_dir).attempt(number)
    folder.root.mkdir(exist_ok=True)
    if action is not None:
        stored = StoredResult(outcome=outcome, reason="r", exit_code=75, action=action, decision="d")
        stored.save(folder.result_json)


def test_the_files_have_the_first_word(job: ElasticJob[Any], slurm: Slurm) -> None:
    attempt(job, 0, action="end", outcome="succeeded")
    slurm.last = slurm.now = "RUNNING"
    assert job.done()
    assert job.state == "COMPLETED"


def test_a_job_that_is_requeued_is_not_over(job: ElasticJob[Any], slurm: Slurm) -> None:
    """What Slurm said a while ago is asked for anew before anything is concluded from it."""
    attempt(job, 0, action="requeue")
    slurm.last, slurm.now = "COMPLETED", "PENDING"
    assert not job.done()
    assert slurm.asked == 1
    attempt(job, 1)
    assert not job.done()


@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL", "TIMEOUT"])
def test_what_slurm_ended_is_over_though_the_files_say_nothing(job: ElasticJob[Any], slurm: Slurm, state: str) -> None:
    attempt(job, 0, action="requeue")
    slurm.last = slurm.now = state
    assert job.done()
    assert job.state == state
    assert "has no result: it ended as" in str(job.exception())


def test_what_never_began_is_over_with_slurms_word(job: ElasticJob[Any], slurm: Slurm) -> None:
    assert not job.done()
    slurm.last = "CANCELLED"
    assert job.done()


def test_a_job_that_slurm_does_not_know_any_more(
    job: ElasticJob[Any], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.last = slurm.now = FORGOTTEN
    assert not job.done(), "it may just not have been asked"
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 60.0)
    assert not job.done(force_check=True), "one answer without the job in it is none"
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 0.0)
    assert job.done()


def test_a_job_pickles_and_knows_how_many_ranks_there_will_be(job: ElasticJob[Any]) -> None:
    again = pickle.loads(pickle.dumps(job))
    assert (again.job_id, again.run_dir, again.num_tasks) == ("70", job.run_dir, 6)
    assert again.task(5).task_id == 5
    with pytest.raises(ValueError, match="between 0 and 5"):
        again.task(6)
