"""The doctor's own run as the options ask for it, and the bounds of its probes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from hpc_elastic.base import codec
from hpc_elastic.cli.preflight import DOCTOR_TAKEN, ProbeJob, plan_job
from hpc_elastic.doctor import node_job
from hpc_elastic.doctor.host import ProbeSettings
from hpc_elastic.doctor.node_job import ProbedNode, collect, open_site, probe_node
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import parse
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import Runtime


def plan(folder: Path, *argv: str, cluster: str = "slurm", env: dict[str, str] | None = None) -> ProbeJob:
    options = [option for option in ALL_OPTIONS if option.dest in DOCTOR_TAKEN | {"nodes"}]
    parsed = parse([*argv, f"--chdir={folder}"], options, refused={})
    return plan_job(parsed, cluster=cluster, env=env or {})


def test_all_options_that_it_takes_are_options_of_submit() -> None:
    assert {option.dest for option in ALL_OPTIONS} >= DOCTOR_TAKEN


def test_it_is_a_short_run_of_one_probe_on_each_node_that_is_never_repeated(tmp_path: Path) -> None:
    job = plan(
        tmp_path, "--nodes=4", "-p", "gpu", "--gpus-per-node=8", "--setup=module load cuda", "--python=/opt/python"
    )
    assert job.slurm is not None
    spec, options = job.spec, job.slurm.options
    assert (options.nodes, options.partition, options.gpus_per_node, options.time) == ("4", "gpu", "8", "20")
    assert (spec.min_nodes, spec.max_nodes, spec.nproc_per_node, spec.spares) == (1, 4, "1", 0)
    assert (spec.max_restarts, spec.max_requeues, spec.requeue, spec.health_checks) == (0, 0, False, {})
    assert spec.setup == "module load cuda"
    assert job.settings.python == "/opt/python"
    assert sys.executable in spec.entrypoint.argv()
    assert spec.entrypoint.argv()[-2:] == [str(job.paths.root / "doctor"), codec.dumps(job.settings)]
    assert job.runs_dir == tmp_path / "runs" / "doctor"
    assert job.slurm.spec == spec


def test_a_time_limit_of_the_users_own_holds(tmp_path: Path) -> None:
    asked = plan(tmp_path, "--nodes=2", "-t", "5").slurm
    by_site = plan(tmp_path, "--nodes=2", env={"SBATCH_TIMELIMIT": "3"}).slurm
    assert asked is not None
    assert by_site is not None
    assert (asked.options.time, by_site.options.time) == ("5", None)


def test_probes_run_on_the_host_and_know_the_workers_container(tmp_path: Path) -> None:
    job = plan(tmp_path, "--nodes=2", "--container-image=podman:torch", "--container-env=TOKEN")
    assert job.spec.container is None
    assert job.settings.container is not None
    assert (job.settings.container.image.runtime, job.settings.container.env) == (Runtime.PODMAN, ("TOKEN",))


def test_a_job_that_has_not_begun_has_no_nodes(tmp_path: Path) -> None:
    assert collect(RunPaths(tmp_path)) == ((), {}, "")
    (tmp_path / "attempt-000").mkdir()
    assert "attempt.json" in collect(RunPaths(tmp_path))[2]


def test_a_probe_that_fails_or_hangs_is_a_fact_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "HPC_ELASTIC_ATTEMPT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    released = threading.Event()

    def fail(site: object) -> None:
        raise OSError(5, "Input/output error")

    parts = {"files": (fail, 10.0), "memory": (lambda site: released.wait(), 0.05), "notice": (lambda site: None, 10.0)}
    monkeypatch.setattr(node_job, "PARTS", parts)
    try:
        facts = probe_node(open_site(tmp_path / "doctor", codec.dumps(ProbeSettings(python="python3")), env))
    finally:
        released.set()
    assert facts.failed == {"files": "OSError: [Errno 5] Input/output error", "memory": "no end after 0.05 s"}
    assert facts.unfinished == ""
    assert codec.load(tmp_path / "doctor" / "node0.node.json", ProbedNode) == facts
