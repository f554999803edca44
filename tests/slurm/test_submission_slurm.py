"""ElasticExecutor on a real Slurm, beside submitit's own executor."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import SlurmRuns

EXAMPLES = Path(__file__).resolve().parents[1] / "rigs" / "submitit_examples.py"
PATIENCE = 480


def told_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as problem:
        pytest.fail(f"it does not end; so far: {problem.stdout!r} {problem.stderr!r}")
    assert process.returncode == 0, out + err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_submitits_examples_come_out_the_same_with_either_executor(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    name = runs.script(EXAMPLES.read_text(), "submitit_examples.py")
    processes = [
        cluster.popen(["python", name, executor, str(runs.folder / executor)], cwd=runs.folder)
        for executor in ("slurm", "elastic")
    ]
    theirs, ours = map(told_by, processes)
    assert ours == theirs
    assert ours["checkpoint"] == [6, 2], "it went on where it was, once"
    assert ours["array ids"] == ["0", "1", "2"]
    assert ours["failure"] == ["FailedJobError", True, True]


ONLY_HERE = """
import json, os, signal, sys, time, submitit

def where():
    env = submitit.JobEnvironment()
    if os.environ.get("FAIL") == str(env.global_rank):
        raise LookupError("of rank 1")
    return [env.global_rank, env.node, env.hostnames, os.environ["FROM_SETUP"]]

def killed_once():
    attempt = int(os.environ["HPC_ELASTIC_ATTEMPT"])
    if attempt == 0 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return [attempt, submitit.JobEnvironment().hostnames]

os.environ["XDG_STATE_HOME"] = sys.argv[1] + "-state"
executor = submitit.AutoExecutor(sys.argv[1], cluster="elastic")
executor.update_parameters(nodes=2, timeout_min=10, slurm_setup=["export FROM_SETUP=yes"], elastic_max_restarts=0)
wide = executor.submit(where)
executor.update_parameters(slurm_setup=["export FROM_SETUP=yes FAIL=1"], slurm_teardown=["echo torn down"])
failing = executor.submit(where)
executor.update_parameters(elastic_begin="now+1hour")
waiting = executor.submit(where)
pending = waiting.state
began = time.monotonic()
waiting.cancel()
cancelled = waiting.exception()
took = time.monotonic() - began
parameters = {"elastic_begin": "now", "slurm_teardown": [], "nodes": 3, "slurm_exclude": "n2"}
executor.update_parameters(**parameters, slurm_additional_parameters={"no-requeue": True})
careful = executor.submit(killed_once)
refused = []
for parameters in ({"nodes": 5}, {"slurm_exclude": "n[1,3]", "nodes": 3}, {"slurm_partition": "moon", "nodes": 1}):
    executor.update_parameters(**parameters)
    try:
        executor.submit(where)
    except Exception as error:
        refused.append(str(error))
error = failing.exception()
print(json.dumps({
    "wide": wide.results(), "state": wide.state, "nodes": wide.get_info()["NodeList"],
    "error": [type(error).__name__, repr(error.__cause__), failing.report() in str(error)],
    "state of failed": failing.state, "log": failing.log(), "exit": failing.report().splitlines()[1],
    "pending": pending, "cancelled": [type(cancelled).__name__, waiting.state, took],
    "refused": refused, "left": sorted(os.listdir(sys.argv[1])),
    "runs": [job.run_dir.name for job in (wide, failing, waiting, careful)],
    "careful": careful.results(), "state of careful": careful.state,
}))
"""


def test_nodes_failures_and_what_slurm_refuses(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    folder = str(runs.folder / "jobs")
    name = runs.script(ONLY_HERE, "only_here.py")
    said = told_by(cluster.popen(["python", name, folder], cwd=runs.folder))
    hosts = said["wide"][0][2]
    assert len(set(hosts)) == 2
    assert [(rank, node, setup) for rank, node, _, setup in said["wide"]] == [(0, 0, "yes"), (1, 1, "yes")]
    assert said["state"] == "COMPLETED"
    assert set(said["nodes"].split(",")) <= set(cluster.node_names) | {""}
    assert said["error"] == ["ElasticJobFailedError", "LookupError('of rank 1')", True]
    assert said["state of failed"] == "FAILED"
    assert said["exit"].startswith("where FAILED")
    assert "torn down" in said["log"]
    assert said["pending"] == "PENDING"
    assert said["cancelled"][:2] == ["ElasticJobUncompletedError", "CANCELLED"]
    too_many, too_few_left, no_partition = said["refused"]
    assert too_many == "nodes = 5: partition main has 4 nodes, 1 of them excluded; the job would never start"
    assert too_few_left == "nodes = 3: partition main has 4 nodes, 2 of them excluded; the job would never start"
    assert "artition" in no_partition
    assert [entry for entry in said["left"] if not entry.endswith("_run")] == sorted(said["runs"]), (
        "nothing of it is left"
    )
    check_careful(cluster, runs.folder / "jobs" / said["runs"][-1], said)


def check_careful(cluster: SlurmCluster, run: Path, said: dict[str, Any]) -> None:
    """A job that may not be requeued, and does without a node that its user excludes."""
    assert said["state of careful"] == "COMPLETED"
    assert [attempt for attempt, _ in said["careful"]] == [1, 1, 1], "it was killed in its first attempt, and went on"
    attempts = [json.loads((run / f"attempt-00{number}" / "attempt.json").read_text()) for number in (0, 1)]
    assert [sorted(attempt["nodes"]) for attempt in attempts] == [["n1", "n3", "n4"]] * 2
    first, following = (attempt["job_id"] for attempt in attempts)
    assert first != following
    assert [cluster.job_info(job)["ExcNodeList"] for job in (first, following)] == ["n2", "n2"]
    assert f"job {following} goes on when job {first} has ended, without n2" in (run / "job.log").read_text()
