"""The job is to make room, or its time is over: each row of the signals' table that a real Slurm brings about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import wait_until
from tests.rigs.slurm_runs import Run, SlurmRuns

SAVES_WHEN_TOLD = """
import os, pathlib, sys, time
import hpc_elastic
rank, attempt = os.environ["RANK"], os.environ["HPC_ELASTIC_ATTEMPT"]
saved = pathlib.Path("step-" + os.environ["SLURM_JOB_ID"] + ".txt")
begin = int(saved.read_text()) + 1 if saved.exists() else 0
print("rank", rank, "begins at step", begin, "in attempt", attempt)
if begin:
    sys.exit(0)
for step in range(100000):
    time.sleep(0.05)
    if step == 20:
        print("trains")
    if hpc_elastic.should_checkpoint(step):
        if rank == "0":
            saved.write_text(str(step))
        print("saved after step", step)
        sys.exit(0)
"""
NEVER_REACTS = """
import os, signal, sys, time
import hpc_elastic
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begins in attempt", os.environ["HPC_ELASTIC_ATTEMPT"])
if os.environ["HPC_ELASTIC_ATTEMPT"] != "0":
    sys.exit(0)
for step in range(100000):
    time.sleep(0.05)
    if step == 20:
        print("trains")
    hpc_elastic.should_checkpoint(step)
"""
SHORT = ("-t", "10", "--nproc-per-node", "1")


@pytest.fixture(scope="module")
def preempting_cluster(slurm_can_run: None) -> Iterator[SlurmCluster]:
    """Four nodes of a site that preempts.

    With proctrack/cgroup, as most sites: there Slurm signals an agent and not its workers. (proctrack/linuxproc signals
    every process of a step.)
    """
    with SlurmCluster(4, accounting=False, cgroups=True, cred_expire=5, preemption=True) as started:
        yield started


@pytest.fixture
def cluster(preempting_cluster: SlurmCluster) -> SlurmCluster:
    return preempting_cluster


@pytest.fixture
def runs(cluster: SlurmCluster) -> SlurmRuns:
    return SlurmRuns(cluster)


def on_nodes(runs: SlurmRuns, partition: str, nodes: str, *arguments: str, script: str) -> Run:
    """A run on two nodes of a partition, the whole of them."""
    name = runs.script(script, name=f"{partition}.py")
    return runs.submit("--nodes", "2", "-p", partition, "-w", nodes, "--exclusive", *SHORT, *arguments, name)


def take_nodes(cluster: SlurmCluster, folder: Path) -> None:
    """A job of the higher partition wants all nodes for a second."""
    argv = ["sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "-t", "5", "-o", "/dev/null"]
    done = cluster.run([*argv, "--wrap", "sleep 1"], cwd=folder)
    assert done.returncode == 0, done.stderr


def decided(run: Run, attempt: int = 0) -> list[dict[str, object]]:
    return [event for event in run.events(attempt) if event["event"] == "signal_decided"]


def test_a_preemption_with_a_grace_time_saves_first_and_the_job_comes_back(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    """The agents alone hear of it; where Slurm would cancel the job, it is back in the queue first."""
    pair = [
        on_nodes(runs, "requeued", "n[1-2]", script=SAVES_WHEN_TOLD),
        on_nodes(runs, "cancelled", "n[3-4]", script=SAVES_WHEN_TOLD),
    ]
    for run in pair:
        run.wait_log(lambda log: log.count("trains") == 2)
    take_nodes(cluster, runs.folder)
    for run in pair:
        log = run.wait_log(lambda log: "is requeued" in log)
        steps = set(re.findall(r"saved after step (\d+)", log))
        assert len(steps) == 1, log
        assert re.search(rf"notice SIGTERM on n\d \(preemption\); saved in \d of \d s \(step {steps.pop()}\)", log), log
        (told,) = decided(run)
        assert told["heard_by"] == "agents alone"
        assert told["slurm"] == "is preempted, its grace time runs"
        assert run.result()["outcome"] == "preempted"
        report = (run.root / "attempt-000" / "report.txt").read_text()
        assert re.search(r"saved in \d of \d s", report), report
    for run in pair:
        assert run.wait_end(timeout=90) == "COMPLETED"
        assert run.log.count("in attempt 1") == 2
        assert "begins at step 0 in attempt 1" not in run.log
        assert cluster.job_info(run.job)["Restarts"] == "1"
        assert run.result(1)["outcome"] == "succeeded"


def test_a_preemption_without_a_grace_time_ends_at_once_and_the_job_comes_back(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    pair = [
        on_nodes(runs, "requeued-at-once", "n[1-2]", script=SAVES_WHEN_TOLD),
        on_nodes(runs, "cancelled-at-once", "n[3-4]", script=SAVES_WHEN_TOLD),
    ]
    for run in pair:
        run.wait_log(lambda log: log.count("trains") == 2)
    take_nodes(cluster, runs.folder)
    for run, meaning in zip(pair, ("requeue", "preemption"), strict=True):
        run.wait_log(lambda log: "exit code 75" in log)
        assert run.result()["outcome"] == "preempted"
        assert [told["meaning"] for told in decided(run)] == [meaning]
        assert "saved after" not in run.log
    assert "Slurm itself has put the job back" in pair[0].log
    for run in pair:
        wait_until(lambda run=run: "in attempt 1" in run.log, timeout=60, what="the next attempt")  # type: ignore[misc]
        assert cluster.job_info(run.job)["Restarts"] == "1"


def test_workers_that_never_react_do_not_keep_the_job_from_coming_back(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """Their SIGKILL, the report and the requeue come before the end of the grace: there Slurm would cancel the job."""
    run = on_nodes(runs, "cancelled", "n[1-2]", script=NEVER_REACTS)
    run.wait_log(lambda log: log.count("trains") == 2)
    take_nodes(cluster, runs.folder)
    log = run.wait_log(lambda log: "is requeued" in log)
    assert re.search(r"notice SIGTERM on n\d \(preemption\); n1, n2 had not saved after \d s", log)
    assert len(decided(run)) == 1, "Slurm has not come to its own end of it"
    assert run.wait_end(timeout=90) == "COMPLETED"
    assert run.log.count("begins in attempt 1") == 2


def test_a_job_requeued_from_outside_is_no_failure(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "2", *SHORT, runs.script(SAVES_WHEN_TOLD))
    run.wait_log(lambda log: log.count("trains") == 2)
    assert cluster.run(["scontrol", "requeue", run.job]).returncode == 0
    run.wait_log(lambda log: "Slurm itself has put the job back into the queue" in log)
    assert run.result()["outcome"] == "preempted"
    assert [told["meaning"] for told in decided(run)] == ["requeue"]
    run.wait_log(lambda log: log.count("in attempt 1") == 2, timeout=60)
    assert cluster.job_info(run.job)["Restarts"] == "1", "and nobody has requeued it once more"
