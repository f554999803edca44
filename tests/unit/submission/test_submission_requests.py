"""What the executor's jobs become on a stand-in for Slurm: all that the command line's do."""

from __future__ import annotations

import json
import operator
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import Submission
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import SubmissionRefusedError, UnknownJobError
from hpc_elastic.submission import ElasticExecutor
from hpc_elastic.submission import executor as module
from hpc_elastic.submission import job as job_module
from hpc_elastic.submission.call import read_terms
from tests.rigs.fake_slurm import FakeJob, FakeSlurm

TEMPLATE = "#!/bin/bash\n#SBATCH --qos=mine --time=40\n@SBATCH_LINES@\ntrap '' USR2\nexec @COMMAND@\n"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    """Nodes n1..n4."""
    found = FakeSlurm()

    def client(submission: Submission, env: object, clock: SystemClock, log: object) -> SlurmClient:
        return SlurmClient(found, clock)

    monkeypatch.setattr(module, "submission_client", client)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SITE", "USER", "PROJECT"):
        monkeypatch.setenv(f"HPC_ELASTIC_{name}_CONFIG", "")
    for name in ("SLURM_CLUSTER_NAME", "SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SBATCH_PARTITION", "SBATCH_EXCLUDE"):
        monkeypatch.delenv(name, raising=False)
    return found


def executor(folder: Path, **parameters: Any) -> ElasticExecutor:
    found = ElasticExecutor(folder / "jobs", cluster="slurm")
    found.update_parameters(allow_local_runs_dir=True, **parameters)
    return found


def test_a_job_on_another_cluster_is_asked_and_ended_there(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same home, seen from a host of the cluster ``alpha``, which has other jobs of these numbers."""
    job = executor(tmp_path, nodes=2).submit(operator.add, 1, 2)
    alpha = FakeSlurm()
    alpha.name, alpha.jobs[job.job_id] = "alpha", FakeJob(job.job_id, "cancelled")
    monkeypatch.setattr(job_module, "slurm_client", lambda: SlurmClient(alpha, SystemClock()))
    monkeypatch.setattr(job_module, "_SETTLE_SECONDS", 0.0)
    job = pickle.loads(pickle.dumps(job))
    assert not job.done(force_check=True), "its cluster can't be asked"
    alpha.clusters["rig"] = slurm
    slurm.jobs[job.job_id].fields["Comment"] = "hpc-elastic another"
    with pytest.raises(UnknownJobError, match="that number is now of another job"):
        job.cancel()
    slurm.jobs[job.job_id].fields["Comment"] = f"hpc-elastic {job.run_dir}"
    assert not job.done(force_check=True)
    assert job.get_info()["State"] == "RUNNING"
    job.cancel()
    assert alpha.calls[-1] == ["scancel", "-M", "rig", job.job_id]
    assert job.done(force_check=True)


def test_each_task_of_an_array_has_its_place(slurm: FakeSlurm, tmp_path: Path) -> None:
    jobs = executor(tmp_path, array_parallelism=2).map_array(operator.neg, [1, 2, 3])
    assert [job.job_id for job in jobs] == [f"1000_{task}" for task in range(3)]
    script = (jobs[0].run_dir.parent / "job.sbatch").read_text()
    assert "#SBATCH --array=0-2%2\n" in script
    for task, job in enumerate(jobs):
        assert job.run_dir.name == f"task-{task}"
        assert job.submission().args == (task + 1,)


def test_what_slurm_refuses_leaves_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    with pytest.raises(SubmissionRefusedError, match="nosuch"):
        executor(tmp_path, partition="nosuch").submit(operator.add, 1, 2)
    slurm.missing = {"sbatch"}
    with pytest.raises(UsageError, match="run on this machine with cluster='local'"):
        executor(tmp_path).submit(operator.add, 1, 2)
    assert list(tmp_path.glob("jobs/*")) == []


def test_the_way_out_is_named_in_the_executors_words(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"hpc-elastic-{os.getpid()}-{tmp_path.name}"
    found = ElasticExecutor(folder, cluster="slurm")
    with pytest.raises(UsageError, match=r"the nodes can't see .*; give the executor a shared one \(or allow_local"):
        found.submit(operator.add, 1, 2)
    assert not folder.exists()


def test_options_of_the_command_line_hold_here_too(slurm: FakeSlurm, tmp_path: Path) -> None:
    """A template was once taken, and had no effect."""
    (tmp_path / "own.sbatch").write_text(TEMPLATE)
    found = executor(tmp_path, nodes=1, template=str(tmp_path / "own.sbatch"))
    job = found.submit(operator.add, 1, 2)
    script = (job.run_dir / "job.sbatch").read_text()
    assert "#SBATCH --qos=mine --time=40" in script
    assert read_terms(RunPaths(job.run_dir).call_pickle).timeout_min == 40, "of its own lines"


def test_what_a_run_holds(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = executor(tmp_path, name="mine", timeout_min=60, signal_delay_s=30).submit(operator.add, 1, 2)
    spec = json.loads((job.run_dir / "run.json").read_text())
    assert spec["name"] == "mine"
    assert spec["signal_grace"] == 30
    assert spec["preemption_signal"] == "SIGUSR2"
    assert "--signal=B:USR2@30" in spec["sbatch_args"]
    assert spec["entrypoint"]["target"] == "/bin/sh"
    assert read_terms(RunPaths(job.run_dir).call_pickle).name == "add"


def test_the_removed_launch_names_the_executor() -> None:
    import hpc_elastic

    with pytest.raises(TypeError, match=r"use ElasticExecutor\(folder, cluster='local'\)"):
        hpc_elastic.launch(print, nproc_per_node=2)
    with pytest.raises(ImportError, match="see ElasticExecutor"):
        from hpc_elastic import LaunchConfig  # noqa: F401
