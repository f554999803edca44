"""The run that a requeued job goes on with, whatever home its node has."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.launch.run_directory import create_run, earlier_run
from hpc_elastic.run import index
from hpc_elastic.run.spec import EntryKind, Entrypoint
from hpc_elastic.slurm.job_environment import JobEnvironment
from tests.rigs.specs import make_attempt, make_spec, store_result

SPEC = make_spec(
    run_id="20261121-a",
    name="train",
    created_ns=1,
    entrypoint=Entrypoint(kind=EntryKind.SCRIPT, target="train.py", args=("--epochs", "3")),
    cwd="/work",
)


def job(restarts: int, number: str = "7", **env: str) -> JobEnvironment:
    return JobEnvironment.from_env(
        {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(restarts), **env}
    )


def make(
    runs: Path, run_id: str, *, restarts: int = 0, code: int | None = 75, job_id: str = "7", **spec: object
) -> Path:
    paths = create_run(replace(SPEC, run_id=run_id, **spec), runs).paths  # type: ignore[arg-type]
    attempt = paths.attempt(0)
    attempt.root.mkdir()
    make_attempt(started_ns=1, job_id=job_id, restart_count=restarts).save(attempt.attempt_json)
    if code is not None:
        store_result(attempt, code)
    return paths.root


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "another-home")}


def test_it_is_found_in_the_runs_folder_from_another_home(tmp_path: Path, env: dict[str, str]) -> None:
    run = make(tmp_path / "runs", "20261121-b")
    assert earlier_run(job(1), SPEC, tmp_path / "runs", env) == run
    assert earlier_run(job(0), SPEC, tmp_path / "runs", env) is None, "a job that begins has none"


def test_it_is_found_by_the_index_wherever_it_lies(tmp_path: Path, env: dict[str, str]) -> None:
    run = make(tmp_path / "elsewhere", "20261121-b")
    assert index.record(cluster="", job_id="7", submitted_ns=1, run_dir=run, env=env) is None
    assert earlier_run(job(1), SPEC, tmp_path / "runs", env) == run


@pytest.mark.parametrize(
    "other",
    [
        {"job_id": "8"},
        {"job_id": "7_1"},
        {"restarts": 1},
        {"cwd": "/elsewhere"},
        {"entrypoint": replace(SPEC.entrypoint, args=("--epochs", "4"))},
    ],
)
def test_another_jobs_or_another_commands_is_none(
    tmp_path: Path, env: dict[str, str], other: dict[str, object]
) -> None:
    make(tmp_path / "runs", "20261121-b", **other)  # type: ignore[arg-type]
    assert earlier_run(job(1), SPEC, tmp_path / "runs", env) is None


def test_an_array_task_finds_its_own(tmp_path: Path, env: dict[str, str]) -> None:
    make(tmp_path / "runs", "20261121-b", job_id="70_1")
    own = make(tmp_path / "runs", "20261121-a", job_id="70_2")
    task = job(1, number="72", SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="2")
    assert earlier_run(task, SPEC, tmp_path / "runs", env) == own


def test_of_two_with_the_same_command_the_one_that_has_not_ended(tmp_path: Path, env: dict[str, str]) -> None:
    runs = tmp_path / "runs"
    requeued = make(runs, "20261121-a")
    ended = make(runs, "20261121-b", code=0)
    assert earlier_run(job(1), SPEC, runs, env) == requeued
    killed = make(runs, "20261121-c", code=None)
    assert earlier_run(job(1), SPEC, runs, env) == killed
    for run in (requeued, killed):
        (run / "run.json").unlink()
    assert earlier_run(job(1), SPEC, runs, env) == ended
