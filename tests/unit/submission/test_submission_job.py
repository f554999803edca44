"""When a job is taken to be over: by its run's files, and by Slurm where those have nothing to say any more."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.run.paths import RankPaths, RunPaths
from hpc_elastic.run.spec import EntryKind, Entrypoint
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.submission import job as job_module
from hpc_elastic.submission.call import write_object
from hpc_elastic.submission.environment import ElasticJobFailedError, ElasticJobUncompletedError
from hpc_elastic.submission.job import FORGOTTEN, ElasticJob
from tests.rigs.specs import make_attempt, make_spec, store_result


class Slurm:
    """Stands for the watcher: what Slurm said when it was asked last, and what it would say now."""

    def __init__(self) -> None:
        self.last = self.now = "PENDING"
        self.asked = 0
        self.answers = True
        self.others: dict[str, str] = {}
        """Of other jobs than the first."""

    def register_job(self, job_id: str) -> None: ...

    def look_again_at(self, job_id: str) -> None: ...

    def answers_about(self, job_id: str) -> int:
        return self.asked

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        if mode == "force" and self.answers:
            self.last, self.asked = self.now, self.asked + 1
        return self.others.get(job_id, self.last)


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
    make_spec(uid="0", name="f", created_ns=1, entrypoint=entry, max_nodes=2, nproc_per_node="3").save(paths.run_json)
    return ElasticJob(tmp_path / "jobs" / "%j", "70", run_dir=paths.root)


def attempt(
    job: ElasticJob[Any], number: int, *, action: str | None = None, outcome: str = "preempted", next_job: str = ""
) -> None:
    folder = RunPaths(job.run_dir).attempt(number)
    folder.root.mkdir(exist_ok=True)
    if action is not None:
        store_result(folder, 75, outcome=outcome, action=action, next_job=next_job)


def test_the_files_have_the_first_word(job: ElasticJob[Any], slurm: Slurm) -> None:
    attempt(job, 0, action="end", outcome="succeeded")
    slurm.last = slurm.now = "RUNNING"
    assert job.done()
    assert job.state == "COMPLETED"


def test_only_an_answer_confirms_that_it_is_over(job: ElasticJob[Any], slurm: Slurm) -> None:
    """A controller that does not answer leaves what it said before, such as at the moment of a requeue."""
    attempt(job, 0, action="requeue")
    slurm.last, slurm.now, slurm.answers = "COMPLETED", "PENDING", False
    assert not job.done()
    slurm.answers = True
    assert not job.done()
    slurm.last = slurm.now = "COMPLETED"
    assert job.done()


def test_a_run_that_goes_on_in_a_follow_on_job_is_not_over(job: ElasticJob[Any], slurm: Slurm) -> None:
    attempt(job, 0, action="requeue", next_job="71")
    slurm.last = slurm.now = "COMPLETED"
    slurm.others["71"] = "PENDING"
    assert not job.done()
    assert job.state == "PENDING"
    attempt(job, 1)
    slurm.others["71"] = "RUNNING"
    assert not job.done()
    assert job.state == "RUNNING"
    slurm.others["71"] = "CANCELLED"
    assert job.done()
    assert job.state == "CANCELLED"


def test_a_follow_on_job_is_known_by_its_attempt_where_the_word_of_it_was_lost(
    job: ElasticJob[Any], slurm: Slurm
) -> None:
    attempt(job, 0, action="requeue")
    attempt(job, 1)
    make_attempt(number=1, started_ns=1, job_id="71").save(RunPaths(job.run_dir).attempt(1).attempt_json)
    slurm.last = slurm.now = "TIMEOUT"
    slurm.others["71"] = "RUNNING"
    assert not job.done()


def test_what_is_cancelled_is_the_job_that_has_the_run_now(
    job: ElasticJob[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []

    class Client:
        def job_state(self, job: JobId) -> None:
            return None

        def cancel(self, job: JobId) -> None:
            told.append(("cancel", str(job)))

        def notify(self, job: JobId) -> None:
            told.append(("notify", str(job)))

    monkeypatch.setattr(job_module, "slurm_client", Client)
    attempt(job, 0, action="requeue", next_job="71")
    job._interrupt()
    job.cancel()
    assert told == [("notify", "71"), ("cancel", "71")]


def ranks_return(job: ElasticJob[Any], *values: Any, world_size: int) -> None:
    for rank, value in enumerate(values):
        folder = RunPaths(job.run_dir).attempt(0).rank(0, rank).root
        folder.mkdir(parents=True)
        write_object(RankPaths(folder).result_pickle, {"rank": rank, "world_size": world_size}, value)


def test_a_result_that_is_seen_later_than_the_end_is_waited_for(
    job: ElasticJob[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks returned something, and this mount shows one of them yet."""
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 60.0)
    attempt(job, 0, action="end", outcome="succeeded")
    ranks_return(job, "a", world_size=2)

    def later(seconds: float) -> None:
        folder = RunPaths(job.run_dir).attempt(0).rank(0, 1).root
        folder.mkdir(parents=True)
        write_object(RankPaths(folder).result_pickle, {"rank": 1, "world_size": 2}, "b")

    monkeypatch.setattr(job_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=later))
    assert job.results() == ["a", "b"]


def test_what_a_rank_left_without_returning_is_missing_in_the_end(job: ElasticJob[Any]) -> None:
    attempt(job, 0, action="end", outcome="succeeded")
    ranks_return(job, "a", world_size=2)
    assert job.result() == "a"
    with pytest.raises(ElasticJobUncompletedError, match="rank 1 ended without returning anything"):
        job.results()


def test_a_failure_without_a_report_tells_what_was_raised(job: ElasticJob[Any]) -> None:
    attempt(job, 0, action="end", outcome="failed")
    folder = RunPaths(job.run_dir).attempt(0).rank(0, 0).root
    folder.mkdir(parents=True)
    head = {"type": "ValueError", "message": "no", "traceback": "Traceback …\nValueError: no\n"}
    write_object(RankPaths(folder).exception_pickle, head, ValueError("no"))
    error = job.exception()
    assert isinstance(error, ElasticJobFailedError)
    assert "ValueError: no" in str(error)


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
def test_a_job_whose_files_are_not_seen_yet_is_waited_for(
    job: ElasticJob[Any], slurm: Slurm, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 60.0)
    slurm.last = slurm.now = state
    assert not job.done()
    attempt(job, 0, action="end", outcome="succeeded")
    assert job.done()
    assert job.state == "COMPLETED"


@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL", "TIMEOUT"])
def test_what_slurm_ended_is_over_though_the_files_say_nothing(job: ElasticJob[Any], slurm: Slurm, state: str) -> None:
    assert not job.done(), "it never began"
    attempt(job, 0, action="requeue")
    slurm.last = slurm.now = state
    assert job.done()
    assert job.state == state
    assert "has no result: it ended as" in str(job.exception())


def test_a_job_that_slurm_does_not_know_any_more(
    job: ElasticJob[Any], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.last = slurm.now = FORGOTTEN
    assert not job.done(), "it may just not have been asked"
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 60.0)
    assert not job.done(force_check=True), "one answer without the job in it is none"
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 0.0)
    assert not job.done(), "Slurm may have it all the same, while its files are new"
    monkeypatch.setattr(job_module, "FORGOTTEN_SECONDS", 0.0)
    assert job.done()


def test_a_job_pickles_and_knows_how_many_ranks_there_will_be(job: ElasticJob[Any]) -> None:
    again = pickle.loads(pickle.dumps(job))
    assert (again.job_id, again.run_dir, again.num_tasks) == ("70", job.run_dir, 6)
    assert again.task(5).task_id == 5
    with pytest.raises(ValueError, match="between 0 and 5"):
        again.task(6)


def test_what_no_rank_wrote_is_no_empty_line(job: ElasticJob[Any]) -> None:
    folder = RunPaths(job.run_dir).attempt(0)
    for rank in range(6):
        for stream in ("stdout", "stderr"):
            path = getattr(folder.rank(0, rank), stream)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"rank {rank}\n" if stream == "stdout" and rank in (1, 4) else "")
    assert job.stderr() == ""
    assert job.stdout() == "rank 1\n\nrank 4\n"
