"""The one way to a Slurm job, on a stand-in for Slurm: what is made, what Slurm is told, and what is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hpc_elastic
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import Submission, submit_job
from hpc_elastic.options.job_options import OPTIONS
from hpc_elastic.options.run_request import slurm_job
from hpc_elastic.options.sbatch import ScriptLines
from hpc_elastic.options.table import parse
from hpc_elastic.run import index
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.client import CommandResult, SlurmClient
from hpc_elastic.slurm.commands import MaybeSubmittedError
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeSlurm


class Site:
    """A login node of a Slurm with nodes n1..n4."""

    def __init__(self, root: Path) -> None:
        self.slurm = FakeSlurm()
        self.clock = FakeClock()
        self.env = {"XDG_STATE_HOME": str(root / "state"), "PWD": os.getcwd()}
        self.runs = root / "runs"
        self.told: list[str] = []

    def submission(self, *argv: str, shared: bool = True, array: str | None = None) -> Submission:
        given = [*argv, *(["--allow-local-runs-dir"] if shared else []), "/bin/true"]
        parsed = parse(given, OPTIONS, refused={})
        return Submission(
            job=slurm_job(parsed, self.env, array=array),
            runs_dir=self.runs,
            lines=ScriptLines(setup=("module load x",)),
        )

    def submit(self, submission: Submission, **more: Any) -> str:
        client = SlurmClient(self.slurm, self.clock, log=self.told.append)
        return submit_job(submission, client, clock=self.clock, env=self.env, log=self.told.append, **more).number

    @property
    def sbatch(self) -> list[str]:
        """Its arguments, of the one job."""
        (found,) = (call for call in self.slurm.calls if call[:2] == ["sbatch", "--parsable"])
        return found[2:]

    def commands(self) -> list[str]:
        return [call[0] for call in self.slurm.calls]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_each_task_of_an_array_has_a_place(site: Site) -> None:
    submission = site.submission("--nodes=2", "--exclude=n4", array="0-2%2")
    filled: list[list[bool]] = []
    site.submit(submission, fill=lambda: filled.append([place.run_json.is_file() for place in submission.places]))
    assert filled == [[True, True, True]]
    assert [place.root.name for place in submission.places] == ["task-0", "task-1", "task-2"]
    assert all(place.job_log.is_file() for place in submission.places)
    assert "#SBATCH --array=0-2%2" in submission.script
    assert load_run_spec(submission.paths.run_json).array == "0-2%2"
    assert not submission.paths.job_log.exists()
    assert (site.sbatch, site.commands().count("sinfo")) == ([str(submission.paths.script)], 1)


def test_sbatchs_own_variable_makes_an_array_only_where_it_may(site: Site) -> None:
    site.env["SBATCH_ARRAY_INX"] = "1-2"
    assert site.submission().job.tasks == (1, 2)
    assert site.submission(array="").job.tasks == ()
    assert site.submission(array="").job.options.array is None


def test_what_the_site_says_of_a_job_that_it_takes_reaches_the_user(site: Site) -> None:
    """By a job_submit plugin, say: sbatch prints it, and takes the job all the same."""
    site.slurm.note = "sbatch: 17 core-hours are left to you.\nsbatch: See https://hpc.example\n"
    site.submit(site.submission())
    assert site.told == ["sbatch: 17 core-hours are left to you; See https://hpc.example"]


@pytest.mark.parametrize("squeue", ["shows no such job", "does not answer"])
def test_a_job_that_may_be_queued_keeps_its_directory(site: Site, squeue: str) -> None:
    """A controller that is too busy to answer sbatch may queue the job when nobody looks any more."""

    def runner(argv: Sequence[str], *, timeout: float) -> CommandResult:
        if argv[0] == "sbatch" or (argv[0] == "squeue" and squeue == "does not answer"):
            site.slurm.calls.append(list(argv))
            return CommandResult(rc=1, stderr=f"{argv[0]}: error: Socket timed out on send/recv operation\n")
        return site.slurm(argv, timeout=timeout)

    submission = site.submission("--sbatch-arg=--clusters=rig")
    client = SlurmClient(runner, site.clock)
    began = site.clock.monotonic()
    with pytest.raises(MaybeSubmittedError) as raised:
        submit_job(submission, client, clock=site.clock, env=site.env, log=site.told.append)
    root = submission.paths.root
    assert f"the job may be queued: squeue --me -M rig -o '%i %k' | grep {root} shows it" in str(raised.value)
    assert (site.clock.monotonic() - began, root.is_dir()) == (9.0 if "shows" in squeue else 0.0, True)


def test_what_can_not_be_written_leaves_nothing(site: Site) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match=r"can't write .*: No space left on device"):
        site.submit(site.submission(), fill=full)
    with pytest.raises(ZeroDivisionError):
        site.submit(site.submission(), fill=lambda: print(1 // 0))
    assert "sbatch" not in site.commands()
    assert not site.runs.exists()


def test_the_cluster_is_remembered_though_sbatch_does_not_name_it(site: Site) -> None:
    job = site.submit(site.submission("--nodes=2"))
    assert [entry.cluster for entry in index.entries(job, env=site.env)] == ["rig"]


def test_another_thread_may_submit(site: Site) -> None:
    """As a program does that serves a notebook: handlers can be set in the main thread alone."""
    jobs: list[str] = []
    thread = threading.Thread(target=lambda: jobs.append(site.submit(site.submission())))
    thread.start()
    thread.join()
    assert jobs == ["1000"]


def test_a_job_that_can_not_be_remembered_is_told_of(site: Site) -> None:
    site.env.pop("XDG_STATE_HOME")
    submission = site.submission()
    site.submit(submission)
    assert RunPaths(submission.paths.root).script.is_file()
    assert site.told == [
        "the run can't be found by its job id later, only by its directory: neither XDG_STATE_HOME nor HOME is set"
    ]


def test_a_batch_script_is_made_in_one_module_alone() -> None:
    """The command line and the executor must not each have a way of their own to a job."""
    package = Path(hpc_elastic.__file__).parent
    names = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "render_script" in path.read_text()
    }
    assert names == {"launch/submit_job.py"}
