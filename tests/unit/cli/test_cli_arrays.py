"""Arrays of runs: found, shown, listed, cancelled and requeued by task; and jobs of Slurm's that are no runs here."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from hpc_elastic.cli import follow, list_runs, run_job, status
from hpc_elastic.cli.run_argument import asked_run, find_run_dir
from hpc_elastic.cli.run_job import run_of_job
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run, create_tasks
from hpc_elastic.options.table import read_arguments
from hpc_elastic.run.index import UnknownRunError, find, record
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.client import SlurmClient, query_job_states, states_by_task
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.job_state import JobState, parse_squeue
from tests.rigs.captures import VERSIONS, captured
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeSlurm
from tests.rigs.specs import make_attempt, make_spec, store_result

SPEC = make_spec(run_id="20261121-1200-train-ab12", name="train", created_ns=1, array="1-5%2")
TASKS = (1, 2, 3, 4, 5)


@pytest.fixture
def array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Job 48: task 1 runs, task 2 was requeued, the others wait."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths = create_run(SPEC, tmp_path / "runs").paths
    create_tasks(paths, SPEC, TASKS)
    record(cluster="", job_id="48", submitted_ns=1, run_dir=paths.root)
    for task, code in ((1, None), (2, 75)):
        begin(paths.task(task), task, code)
    return paths


def begin(paths: RunPaths, task: int, code: int | None, *, attempt: int = 0) -> None:
    folder = paths.attempt(attempt)
    folder.events.mkdir(parents=True)
    make_attempt(number=attempt, started_ns=1, job_id=f"48_{task}").save(folder.attempt_json)
    if code is not None:
        store_result(folder, code)


class Asked:
    """A Slurm that answers squeue with a recording."""

    def __init__(self, text: str = "") -> None:
        self.states = parse_squeue(text)
        self.calls: list[tuple[str, str]] = []

    def queue_states(self, jobs: list[JobId]) -> object:
        self.calls += [("squeue", str(job)) for job in jobs]
        return self.states

    def job_state(self, job: JobId) -> JobState:
        return JobState(job_id=str(job), state="RUNNING", reason="", comment=f"hpc-elastic /moved/{SPEC.run_id}")

    def elsewhere(self, job: JobId) -> None:
        return None

    def accounted(self, jobs: list[JobId]) -> tuple[JobState, ...]:
        return ()

    def __getattr__(self, name: str) -> Callable[[JobId], None]:
        return lambda job: self.calls.append((name, str(job)))


def parsed(module: ModuleType, *argv: str) -> SimpleNamespace:
    found = read_arguments("hpc-elastic", "", module.PARAMETERS, argv)
    assert found is not None
    return found


def args(run: str) -> SimpleNamespace:
    return SimpleNamespace(run=run, runs_dir=None, attempt=None)


def test_each_task_is_a_run_of_its_own(array: RunPaths) -> None:
    specs = [load_run_spec(array.task(task).run_json) for task in TASKS]
    assert [spec.run_id for spec in specs] == [f"{SPEC.run_id}_{task}" for task in TASKS]
    assert len({spec.uid for spec in specs} | {SPEC.uid}) == 6, "no task takes another's processes for its own"
    assert {spec.array for spec in specs} == {""}
    assert len({array.task(task).secret.read_text() for task in TASKS}) == 5
    for task in TASKS:
        assert array.task(task).run_id == f"{SPEC.run_id}_{task}"
        assert oct(array.task(task).job_log.stat().st_mode)[-3:] == "600"


def test_a_task_is_found_by_job_run_and_path(array: RunPaths) -> None:
    third = array.task(3)
    for text in ("48_3", f"{SPEC.run_id}_3", f"{SPEC.run_id[:12]}_3", str(third.root), str(third.run_json)):
        assert find(text) == third.root, text
    for text in ("48", SPEC.run_id, str(array.root)):
        assert find(text) == array.root
    with pytest.raises(UsageError, match="job 48 has no task 9: hpc-elastic status 48 shows"):
        find("48_9")
    with pytest.raises(UnknownRunError):
        find(f"{SPEC.run_id}_9")
    record(cluster="", job_id="81_3", submitted_ns=2, run_dir=array.root)
    assert find("81_3") == third.root, "a follow-on job of one task is that task's"
    for text, arrays in (("81_3", False), ("48_4", False), ("48", True)):
        assert run_job.find_run_job(args(text), arrays=arrays).job.number == text


def test_what_wants_one_run_says_how_to_name_one(array: RunPaths) -> None:
    for ask in (asked_run, run_job.find_run_job):
        with pytest.raises(
            UsageError, match=rf"is an array of 5 runs; name one of them, as in 48_1 or {SPEC.run_id}_1"
        ):
            ask(args("48"))
    assert asked_run(args("48_2")).paths == array.task(2)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_status_of_all_with_one_question(
    array: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    text = captured(version, "squeue-running-array")[1]
    number = text.partition("_")[0]
    slurm = Asked(re.sub(rf"^{number}_", "48_", text, flags=re.MULTILINE))
    monkeypatch.setattr(run_job, "slurm_client", lambda timeout: slurm)
    assert status.run(parsed(status, "48")) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"array {SPEC.run_id}, job 48: 5 runs: 3 submitted, 1 meeting, 1 requeued"
    assert "[RUNNING]" in lines[0]
    assert " 48_1  " in lines[0]
    for line in lines[2:5]:
        assert line.endswith("[PENDING: JobArrayTaskLimit]")
    assert slurm.calls == [("squeue", "48")]


def test_the_status_of_one_and_as_json(
    array: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = Asked(captured("22.05.8", "squeue-array-task2")[1])
    monkeypatch.setattr(run_job, "slurm_client", lambda timeout: slurm)
    status.run(parsed(status, "48_3"))
    assert f"run {SPEC.run_id}_3: submitted, job 48_2" in capsys.readouterr().out
    assert slurm.calls == [("squeue", "48_3")], "one that waits has no attempt that names its job"
    status.run(parsed(status, "48", "--json"))
    value = json.loads(capsys.readouterr().out)
    assert set(value["tasks"]) == {"1", "2", "3", "4", "5"}
    assert value["tasks"]["2"]["state"] == "requeued"


def test_a_list_that_squeue_cut_short_is_no_error() -> None:
    states = parse_squeue(
        "48_[0-2,4%2]|PENDING|None|0:00|5:00|1||(None)|N/A|N/A|1|N/A\n48_[7,...]|PENDING|||||||||| \n"
    )
    assert sorted(states_by_task(states)) == [0, 1, 2, 4]


def test_the_list_has_a_line_for_each(array: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    list_runs.run(parsed(list_runs))
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[5] for line in lines] == [f"{SPEC.run_id}_{task}" for task in TASKS]
    list_runs.run(parsed(list_runs, "--state", "requeued"))
    assert capsys.readouterr().out.splitlines()[1].split()[5] == f"{SPEC.run_id}_2"


def test_a_task_is_cancelled_or_requeued_by_its_own_id(array: RunPaths) -> None:
    slurm = Asked()
    run_job.cancel(run_job.find_run_job(args("48_1"), arrays=True), slurm)  # type: ignore[arg-type]
    run_job.cancel(run_job.find_run_job(args("48_4"), arrays=True), slurm)  # type: ignore[arg-type]
    run_job.requeue(run_job.find_run_job(args("48_1")), slurm)  # type: ignore[arg-type]
    said = run_job.cancel(run_job.find_run_job(args("48"), arrays=True), slurm)  # type: ignore[arg-type]
    calls = [call for call in slurm.calls if call[0] != "squeue"]
    assert calls == [("cancel", "48_1"), ("cancel", "48_4"), ("notify", "48_1"), ("cancel", "48")]
    assert "none of its 5 runs begins any more" in said


def test_who_waits_for_an_array_gets_the_worst_code_of_all(array: RunPaths) -> None:
    assert follow.newest_result(array) is None
    for task, code in ((3, 0), (4, 93), (5, 1)):
        begin(array.task(task), task, code)
    assert follow.newest_result(array) is None, "one was requeued, one runs"
    for task in (1, 2):
        begin(array.task(task), task, 0, attempt=1)
    assert follow.newest_result(array) == 93


@pytest.mark.parametrize("version", VERSIONS)
def test_a_het_job_is_found_by_its_leaders_id(version: str) -> None:
    states = parse_squeue(captured(version, "squeue-running-het")[1])
    leader = states[0].job_id.partition("+")[0]
    client = SimpleNamespace(queue_states=lambda jobs: states, accounted=lambda jobs: ())
    found = query_job_states(cast(SlurmClient, client), [JobId(leader)], warn=pytest.fail)
    assert found[JobId(leader)] in states


# -- a job that only Slurm knows


@pytest.fixture(params=VERSIONS)
def slurm(request: pytest.FixtureRequest) -> tuple[FakeSlurm, SlurmClient]:
    fake = FakeSlurm(request.param)
    return fake, SlurmClient(fake, FakeClock())


def submitted(slurm: tuple[FakeSlurm, SlurmClient], tmp_path: Path, comment: str) -> str:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --job-name=other\n")
    fake, client = slurm
    job = client.submit(str(script))
    fake.jobs[job.number].fields["Comment"] = comment
    return job.number


def as_user(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: type(me)((name, *me[1:])))


@pytest.mark.parametrize(
    ("me", "comment", "says"),
    [
        pytest.param("alice", None, r"^job 99999: no such run ", id="an unknown job"),
        pytest.param(
            "alice", "(null)", r"^job 1000 \(other\): no such run \(not submitted by", id="one of another program"
        ),
        pytest.param(
            "bob", "hpc-elastic /home/alice/runs/r1", r"^job 1000 belongs to alice: ", id="one of another user"
        ),
    ],
)
def test_a_job_that_is_no_run_of_ours(
    slurm: tuple[FakeSlurm, SlurmClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    me: str,
    comment: str | None,
    says: str,
) -> None:
    as_user(monkeypatch, me)
    job = "99999" if comment is None else submitted(slurm, tmp_path, comment)
    with pytest.raises(UsageError, match=says):
        run_of_job(job, slurm[1])


def test_one_of_ours_that_another_home_remembers(
    slurm: tuple[FakeSlurm, SlurmClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: RunPaths
) -> None:
    as_user(monkeypatch, "alice")
    job = submitted(slurm, tmp_path, f"hpc-elastic {array.root}")
    assert run_of_job(job, slurm[1]) == array.root
    slurm[0].jobs[f"{job}_2"] = slurm[0].jobs[job]
    assert run_of_job(f"{job}_2", slurm[1]) == array.task(2).root
    monkeypatch.setattr(run_job, "slurm_client", lambda: slurm[1])
    assert find_run_dir(job, None) == array.root
    with pytest.raises(UnknownRunError):
        find_run_dir(job, None, ask_slurm=False)


def test_slurm_that_does_not_answer_is_named_and_where_there_is_none_that_is_no_news(
    slurm: tuple[FakeSlurm, SlurmClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm[0].reachable = False
    with pytest.raises(
        UsageError, match=r"^job 12: no such run \(searched this account's runs; Slurm does not answer: "
    ):
        run_of_job("12", slurm[1])
    slurm[0].missing = {"scontrol"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run_job, "slurm_client", lambda: slurm[1])
    with pytest.raises(UnknownRunError, match=r"job 12: no such run \(searched this account's runs"):
        find_run_dir("12", None)
