"""A run whose job is on another cluster: commands go there, and what can't be asked has not ended."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.cli import run_job
from hpc_elastic.cli.main import main
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.run.index import entries, record
from hpc_elastic.run.paths import load_attempt
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from tests.rigs.fake_clock import FakeClock
from tests.rigs.fake_slurm import FakeJob, FakeSlurm
from tests.unit.launch.test_launch_run_status import RUN_ID, Run

OTHERS_COMMENT = "hpc-elastic /home/alice/runs/another"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """The cluster ``rig``, from which ``beta`` can be asked; both have a job 9 of this user's."""
    fake = FakeSlurm()
    fake.clusters["beta"] = FakeSlurm()
    for cluster, comment in ((fake, OTHERS_COMMENT), (fake.clusters["beta"], f"hpc-elastic {tmp_path / RUN_ID}")):
        cluster.jobs["9"] = FakeJob("9", "pending-held", fields={"Comment": comment})
    monkeypatch.setattr(run_job, "slurm_client", lambda timeout=0.0: SlurmClient(fake, FakeClock()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return fake


@pytest.fixture
def run(tmp_path: Path, here: FakeSlurm) -> Run:
    """One that waits, submitted to ``beta``."""
    found = Run(tmp_path)
    old = found.paths.run_json.stat().st_mtime - 4000
    os.utime(found.paths.run_json, (old, old))
    record(cluster="beta", job_id="9", submitted_ns=1, run_dir=found.paths.root)
    return found


def command(name: str, run: Run, *more: str) -> int:
    return main([name, *more, RUN_ID, "--runs-dir", str(run.paths.root.parent)])


def changes(slurm: FakeSlurm) -> list[str]:
    return [shlex.join(call) for call in slurm.calls if call[0] in ("scancel", "sbatch")]


def test_every_command_goes_to_the_jobs_cluster(run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("status", run) == 0
    out = capsys.readouterr().out
    assert f"run {RUN_ID}: submitted, job 9 on cluster beta" in out
    assert "held: scontrol -M beta release 9 lets it go on" in out
    assert command("clean", run, "--yes") == 0
    assert "may be running (submitted)" in capsys.readouterr().err
    assert command("cancel", run) == 0
    assert capsys.readouterr().out == "job 9 on cluster beta is cancelled; none of its workers was running\n"
    assert changes(here) == ["scancel -M beta 9"]
    assert here.jobs["9"].state == "pending-held", "this number is another job's here"


def test_the_job_log_is_where_slurm_says(run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """By a script of the user's own, or with ``%x`` of a job that an environment variable names."""
    spec = load_run_spec(run.paths.run_json)
    replace(spec, sbatch_args=("--output=/logs/%x-%j.out",)).save(run.paths.run_json)
    here.clusters["beta"].jobs["9"].fields["StdOut"] = "/logs/mine-9.out"
    assert command("status", run) == 0
    assert "log      : /logs/mine-9.out\n" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["unknown", "down"])
def test_what_can_not_be_asked_has_not_ended(
    run: Run, here: FakeSlurm, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No accounting that both share; or the other controller is down, of which squeue says so and exits with 0."""
    if how == "unknown":
        del here.clusters["beta"]
    else:
        here.clusters["beta"].reachable = False
    assert command("status", run) == 0
    out, err = capsys.readouterr()
    assert f"run {RUN_ID}: submitted" in out
    assert "on cluster beta, not asked here" in out
    assert "job 9 is on cluster beta, not asked here: " in err
    assert command("clean", run, "--yes") == 0
    assert run.paths.run_json.is_file()
    for name in ("cancel", "requeue"):
        assert command(name, run) == 2
        assert "job 9 is on cluster beta, which can't be asked here" in capsys.readouterr().err
    assert changes(here) == []


def test_a_job_that_its_cluster_does_not_know_is_not_cancelled(
    run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    del here.clusters["beta"].jobs["9"]
    assert command("cancel", run) == 2
    assert "job 9 on cluster beta is not known to Slurm; nothing is cancelled" in capsys.readouterr().err
    os.utime(run.paths.run_json)
    assert command("clean", run, "--yes") == 0
    assert "may be running (submitted)" in capsys.readouterr().err, "it was made just now"


@pytest.mark.parametrize("begun", [False, True])
def test_a_number_that_is_another_jobs_now(
    run: Run, here: FakeSlurm, begun: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    here.clusters["beta"].jobs["9"].fields["Comment"] = OTHERS_COMMENT if not begun else "(null)"
    if begun:  # from a batch script of the user's own, which has no mark: but it ran, and this one never did
        run.attempt(0)
        path = run.there.attempt_json
        replace(load_attempt(path), job_id="9", slurm_cluster="beta").save(path)
        assert job_now(run.paths) == JobId("9", "beta")
    for name in ("cancel", "requeue"):
        assert command(name, run) != 0
        assert "that number is now of another job" in capsys.readouterr().err
    assert changes(here) == []


def test_the_cluster_of_this_host_needs_no_name(run: Run, here: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    """-M takes an accounting that answers, and not every site has one."""
    here.jobs["8"] = FakeJob("8", "pending-held", fields={"Comment": f"hpc-elastic {run.paths.root}"})
    record(cluster="rig", job_id="8", submitted_ns=2, run_dir=run.paths.root)
    assert command("cancel", run) == 0
    assert changes(here) == ["scancel 8"]


def test_of_two_clusters_the_one_here_is_meant(run: Run, here: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Run(tmp_path / "b")
    here.jobs["9"].fields["Comment"] = f"hpc-elastic {other.paths.root}"
    record(cluster="rig", job_id="9", submitted_ns=0, run_dir=other.paths.root)
    assert [entry.cluster for entry in entries("9")] == ["beta", "rig"]
    assert main(["cancel", "9"]) == 0
    assert changes(here) == ["scancel 9"]


def test_of_a_run_that_is_gone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.paths.run_json.unlink()
    assert main(["status", "9"]) == 2
    assert "to end the job: scancel -M beta 9" in capsys.readouterr().err
