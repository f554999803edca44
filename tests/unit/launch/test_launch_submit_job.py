"""The one way to a Slurm job, on a stand-in for Slurm: what is made, what Slurm is told, and what is left behind."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import MessageHints, Submission, dry_run, submit_job
from hpc_elastic.options.job_options import OPTIONS
from hpc_elastic.options.run_request import slurm_job
from hpc_elastic.options.sbatch import ScriptLines
from hpc_elastic.options.table import parse
from hpc_elastic.run import index
from hpc_elastic.run.node_records import load_record, remember
from hpc_elastic.run.node_score import Evidence, EvidenceKind
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.client import CommandResult, CommandSlurmClient
from hpc_elastic.slurm.errors import SubmissionRefusedError
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeSlurm

HINTS = MessageHints(another_folder="give another", this_machine="cluster='local'")


class Site:
    """A login node of a Slurm with nodes n1..n4, of which earlier jobs have found n2 bad."""

    def __init__(self, root: Path) -> None:
        self.slurm = FakeSlurm()
        self.clock = FakeClock()
        self.env = {"XDG_STATE_HOME": str(root / "state"), "PWD": os.getcwd()}
        self.runs = root / "runs"
        self.told: list[str] = []
        seen = Evidence(node="n2", kind=EvidenceKind.LOST, at_ns=self.clock.time_ns(), why="node n2 was lost")
        assert remember([seen], cluster="", run_id="r", attempt=0, now_ns=self.clock.time_ns(), env=self.env) is None

    def submission(self, *argv: str, shared: bool = True, array: str | None = None) -> Submission:
        given = [*argv, *(["--allow-local-runs-dir"] if shared else []), "/bin/true"]
        parsed = parse(given, OPTIONS, refused={}, env={})
        return Submission(
            job=slurm_job(parsed, self.env, array=array),
            runs_dir=self.runs,
            lines=ScriptLines(setup=("module load x",)),
            hints=HINTS,
        )

    def submit(self, submission: Submission, **more: Any) -> str:
        client = CommandSlurmClient(self.slurm, self.clock, log=self.told.append)
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


def test_a_job(site: Site) -> None:
    submission = site.submission("--nodes=2", "--job-name=x")
    job = site.submit(submission)
    paths = submission.paths
    assert submission.places == (paths,)
    assert site.sbatch == [str(paths.script)]
    assert paths.script.read_text() == submission.script
    assert "module load x" in submission.script
    assert f'--comment="hpc-elastic {paths.root}"' in submission.script
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in paths.root.iterdir()} == {0o600}
    assert {path.name for path in paths.root.iterdir()} == {"run.json", "secret", "job.sbatch", "job.log"}
    assert index.find(job, env=site.env) == paths.root
    assert site.told == []


def test_bad_nodes_of_other_jobs_are_left_out(site: Site) -> None:
    submission = site.submission("--nodes=2", "--exclude=n4", "--bad-nodes=jobs,share=0.5")
    site.submit(submission)
    assert site.sbatch == ["--exclude=n[2,4]", str(submission.paths.script)]
    assert load_record(submission.paths.nodes_json).excluded == ("n2",), "n4 is the user's own"
    assert site.told == ["n2 is left out: node n2 was lost"]
    assert site.commands().count("sinfo") == 1


def test_each_task_of_an_array_knows_whom_it_does_without(site: Site) -> None:
    """Else a requeue would take the list for the user's own, and never let the node in again."""
    submission = site.submission("--nodes=2", "--bad-nodes=jobs,share=0.5", array="0-2%2")
    filled: list[list[bool]] = []
    site.submit(submission, fill=lambda: filled.append([place.run_json.is_file() for place in submission.places]))
    assert filled == [[True, True, True]]
    assert [place.root.name for place in submission.places] == ["task-0", "task-1", "task-2"]
    for place in submission.places:
        assert load_record(place.nodes_json).excluded == ("n2",)
        assert place.job_log.is_file()
    assert "#SBATCH --array=0-2%2" in submission.script
    assert load_run_spec(submission.paths.run_json).array == "0-2%2"
    assert not submission.paths.job_log.exists()


def test_sbatchs_own_variable_makes_an_array_only_where_it_may(site: Site) -> None:
    site.env["SBATCH_ARRAY_INX"] = "1-2"
    assert site.submission().job.tasks == (1, 2)
    assert site.submission(array="").job.tasks == ()
    assert site.submission(array="").job.options.array is None


def test_more_nodes_than_there_are(site: Site) -> None:
    with pytest.raises(UsageError, match=r"--nodes 5: partition main has 4 nodes; the job would wait for ever"):
        site.submit(site.submission("--nodes=5"))
    with pytest.raises(UsageError, match=r"--nodes 4: partition main has 4 nodes, 1 of them excluded"):
        site.submit(site.submission("--nodes=4", "--exclude=n1"))
    assert "sbatch" not in site.commands()
    assert not site.runs.exists()


def test_nodes_that_are_down_are_told_of(site: Site) -> None:
    """One of the recording's four is drained."""
    site.submit(site.submission("--nodes=4"))
    assert site.told == ["only 3 of the 4 nodes of partition main are up now"]


def test_what_slurm_refuses_leaves_nothing(site: Site) -> None:
    with pytest.raises(SubmissionRefusedError, match="nosuch"):
        site.submit(site.submission("--partition=nosuch"))
    assert not site.runs.exists()
    site.slurm.missing = {"sbatch"}
    with pytest.raises(UsageError, match=r"sbatch is not on PATH: .*; run on this machine with cluster='local'"):
        site.submit(site.submission())
    assert not site.runs.exists()


def test_what_the_site_says_of_a_job_that_it_takes_reaches_the_user(site: Site) -> None:
    """By a job_submit plugin, say: sbatch prints it, and takes the job all the same."""
    site.slurm.note = "sbatch: 17 core-hours are left to you.\nsbatch: See https://hpc.example\n"
    site.submit(site.submission())
    assert site.told == ["sbatch: 17 core-hours are left to you; See https://hpc.example"]


def test_what_can_not_be_written_leaves_nothing(site: Site) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match=r"can't write .*: No space left on device"):
        site.submit(site.submission(), fill=full)
    with pytest.raises(ZeroDivisionError):
        site.submit(site.submission(), fill=lambda: print(1 // 0))
    assert "sbatch" not in site.commands()
    assert not site.runs.exists()


def test_a_folder_that_no_other_node_sees(site: Site) -> None:
    submission = Submission(job=site.submission(shared=False).job, runs_dir=Path("/dev/shm/r"), hints=HINTS)
    for attempt in (dry_run, site.submit):
        with pytest.raises(UsageError, match=r"the nodes can't see /dev/shm/r: /dev/shm .*; give another"):
            attempt(submission)
    assert site.slurm.calls == []


def test_a_dry_run_changes_nothing(site: Site) -> None:
    submission = site.submission()
    text = dry_run(submission)
    assert text == f"{submission.script}\n# sbatch --parsable {submission.paths.script}\n"
    assert site.slurm.calls == []
    assert not site.runs.exists()


class Interrupted:
    """A Slurm where somebody presses Ctrl-C while sbatch has the job and has not answered."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self._slurm = slurm

    def __call__(self, argv: Sequence[str], *, timeout: float) -> CommandResult:
        answer = self._slurm(argv, timeout=timeout)
        if argv[0] == "sbatch":
            os.kill(os.getpid(), signal.SIGINT)
        return answer


def test_a_ctrl_c_takes_effect_when_the_job_is_known(site: Site) -> None:
    submission = site.submission()
    client = CommandSlurmClient(Interrupted(site.slurm), site.clock)
    before, blocked = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt):
        submit_job(submission, client, clock=site.clock, env=site.env, log=site.told.append)
    (job,) = site.slurm.jobs
    assert index.find(job, env=site.env) == submission.paths.root
    assert submission.paths.script.is_file()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked


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
