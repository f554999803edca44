"""Jobs of every shape on a real Slurm: arrays, steps and scripts of one's own, GPUs, runs side by side."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED, wait_until
from tests.rigs.slurm_runs import SHORT, Run, SlurmRuns

WAITS = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["HPC_ELASTIC_ATTEMPT"]
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "-")
print(f"rank {rank} of {os.environ['WORLD_SIZE']} gpus {gpus} round {os.environ['TORCHELASTIC_RESTART_COUNT']}"
      f" attempt {attempt} task {os.environ.get('SLURM_ARRAY_TASK_ID', '-')}", flush=True)
stop = sys.argv[1]
deadline = time.monotonic() + 300
while not os.path.exists(stop) and time.monotonic() < deadline:
    time.sleep(0.05)
"""
SAVES = """
import os, sys, time
import hpc_elastic
task = os.environ.get("SLURM_ARRAY_TASK_ID", "-")
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "-")
print(f"task {task} attempt {os.environ['HPC_ELASTIC_ATTEMPT']} rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
      f" gpus {gpus} round {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
for step in range(6000):
    time.sleep(0.05)
    if hpc_elastic.should_checkpoint(step):
        sys.exit(0)
"""


def task_of(run: Run, task: int) -> Run:
    return Run(run.runs, job=f"{run.job}_{task}", root=run.root / f"task-{task}", done=None)


def sbatch(runs: SlurmRuns, script: str, *options: str) -> str:
    path = runs.folder / "own.sh"
    path.write_text(script)
    argv = ["sbatch", "--parsable", "-o", "own.log", "--open-mode=append", "-t", "10", *options, str(path)]
    return runs.cluster.run(argv, cwd=runs.folder, check=True).stdout.strip()


def wait_file(path: Path, wanted: str, *, count: int = 1, timeout: float = 60 * CROWDED) -> str:
    deadline = time.monotonic() + timeout
    while True:
        text = path.read_text(errors="replace") if path.exists() else ""
        if len(re.findall(wanted, text)) >= count:
            return text
        assert time.monotonic() < deadline, f"no {count} times {wanted!r} in {path} after {timeout} s:\n{text}"
        time.sleep(0.05)


def test_each_task_of_an_array_is_a_run_of_its_own(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--array", "0-2%2", "-w", "n1", *SHORT, runs.script(SAVES))
    first, second, third = (task_of(run, task) for task in range(3))
    for task in (first, second):
        task.wait_log(lambda log: "attempt 0 rank 0" in log, timeout=60)
    # Slurm gives the reason at its next look for jobs to start.
    waits = re.compile(r"submitted .*_2  \[PENDING: JobArrayTaskLimit\]")
    wait_until(
        lambda: waits.search(runs.hpc_elastic("status", run.job).stdout) is not None,
        timeout=60,
        what="why task 2 waits",
    )
    status = runs.hpc_elastic("status", run.job).stdout
    assert f"job {run.job}: 3 runs: " in status.splitlines()[0]
    assert "as in" in runs.hpc_elastic("report", run.job).stderr
    # While it can't begin: the requeue gives it a place.
    assert "cancelled" in runs.hpc_elastic("cancel", third.job).stdout
    # Two runs on one node, one of them requeued: the other does not notice.
    assert "asked to save" in runs.hpc_elastic("requeue", second.job).stdout
    second.wait_log(lambda log: f"job {second.job} is requeued" in log)
    second.wait_log(lambda log: "task 1 attempt 1 rank 0" in log, timeout=90)
    assert first.log.count("rank 0") == 1
    assert sorted(path.name for path in second.root.glob("attempt-*")) == ["attempt-000", "attempt-001"]
    assert runs.hpc_elastic("status", second.job).stdout.startswith(f"run {run.root.name}_1: ")
    assert "SIGTERM" in runs.hpc_elastic("cancel", first.job).stdout
    assert cluster.wait_job(first.job) == "CANCELLED"
    assert first.report()["outcome"] == "cancelled"
    assert cluster.job_state(second.job) == "RUNNING"
    assert "none of its 3 runs" in runs.hpc_elastic("cancel", run.job).stdout
    assert cluster.wait_job(second.job) == "CANCELLED"
    assert not list(third.root.glob("attempt-*"))
    _, *listed = runs.hpc_elastic("list").stdout.splitlines()
    assert [line.split()[5] for line in listed] == [f"{run.root.name}_{task}" for task in range(3)]


def test_agents_in_a_step_of_ones_own_resume_after_a_requeue(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    text = """
import os, signal
print("attempt", os.environ["HPC_ELASTIC_ATTEMPT"], "rank", os.environ["RANK"], flush=True)
if os.environ["HPC_ELASTIC_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = f"""#!/bin/bash
export HOME=/tmp/home-$SLURM_RESTART_COUNT
srun -n2 --ntasks-per-node=1 hpc-elastic agent --max-restarts 0 --nproc-per-node 1 {runs.script(text)}; echo "first: $?"
srun -n4 --ntasks-per-node=2 hpc-elastic agent train.py; echo "second: $?"
srun -n2 --ntasks-per-node=1 hpc-elastic run train.py; echo "third: $?"
"""
    job = sbatch(runs, script, "-N2", "-n4", "--ntasks-per-node=2", "--requeue")
    assert cluster.wait_job(job, {"COMPLETED"}, timeout=120) == "COMPLETED"
    log = (runs.folder / "own.log").read_text()
    assert log.count("requeue enabled: yes") == 2, log
    assert log.count("attempt 1 rank") == 2, log
    assert "first: 0" in log
    assert log.count("srun started 2 tasks on a node") == 1, "said by the first task alone"
    assert "second: 2" in log
    assert log.count("run was started by srun on 2 tasks") == 1
    (run,) = (path for path in (runs.folder / "runs").iterdir() if not path.name.startswith("."))
    assert sorted(path.name for path in run.glob("attempt-*")) == ["attempt-000", "attempt-001"]
    assert json.loads((run / "attempt-001" / "report.json").read_text())["outcome"] == "succeeded"
    # Its home was another: nothing here remembers the job, but its files do.
    assert "SUCCEEDED" in runs.hpc_elastic("report", str(run)).stdout


def test_a_total_of_gpus_is_shared_out_also_to_an_agent_that_is_started_again(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    stop = runs.folder / "stop"
    script = f"#!/bin/bash\nexec hpc-elastic run {runs.script(WAITS)} {stop}\n"
    job = sbatch(runs, script, "-N2", "--gpus=4")
    own = runs.folder / "own.log"
    log = wait_file(own, r"of 4 gpus 0,1 round 0", count=4)
    run = runs.newest()
    assert run.job == job
    run.kill_agent(json.loads((run.root / "attempt-000" / "attempt.json").read_text())["nodes"][1])
    log = wait_file(own, r"of 4 gpus 0,1 round 1", count=4)
    assert "giving the node up" not in log
    stop.touch()
    assert cluster.wait_job(job) == "COMPLETED"


def test_runs_side_by_side_in_an_allocation_stay_apart(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    stop = runs.folder / "stop"
    run = "hpc-elastic run --nproc-per-node 1 --rdzv-conf last_call_timeout=300"
    script = f"""#!/bin/bash
{run} -N 1 {runs.script(WAITS)} {stop} & first=$!
{run} -w n[3-4] train.py {stop} & second=$!
until [ "$(grep -o 'rank . of . gpus' own.log | sort -u | wc -l)" = 3 ]; do sleep 0.1; done
{run} train.py; echo "third: $?"
{run} -w n3,n9 train.py; echo "fourth: $?"
{run} -w n3 train.py; echo "fifth: $?"
touch {stop}
wait $first; echo "first: $?"
wait $second; echo "second: $?"
"""
    job = sbatch(runs, script, "-N4", "--exclusive")
    assert cluster.wait_job(job, timeout=90) == "COMPLETED", (runs.folder / "own.log").read_text()
    log = (runs.folder / "own.log").read_text()
    for name in ("first: 0", "second: 0", "third: 2", "fourth: 2", "fifth: 2"):
        assert name in log.splitlines(), log
    assert "n9 not in this allocation, which has n[1-4]" in log
    assert re.search(r"--nodelist: n3 of this allocation in use by run \S+", log)
    assert "give --nodelist n2 for the others" in log
    attempts = (runs.folder / "runs").glob("*/attempt-000/attempt.json")
    assert sorted(json.loads(path.read_text())["nodes"] for path in attempts) == [["n1"], ["n3", "n4"]]


def test_a_template_and_a_submission_from_a_compute_node(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    stop = runs.folder / "stop"
    lines = "@SBATCH_LINES@\ntrap '' USR2\necho prepared\nexec @COMMAND@\n"
    template = f"#!/bin/bash\n#SBATCH --nodes=2 --comment=mine -t 10\n{lines}"
    (runs.folder / "mine.sh").write_text(template)
    argv = ["hpc-elastic", "submit", "--template", "mine.sh", "--nproc-per-node", "1", runs.script(WAITS), str(stop)]
    inside = ["srun", "-N1", "-n1", "-c2", "--gres=gpu:1", *argv]
    done = cluster.run(inside, cwd=runs.folder)
    assert done.returncode == 0, done.stderr
    run = runs._run_of(done)
    log = run.wait_log(lambda log: log.count("of 2 gpus - ") == 2, timeout=60)
    assert "prepared\n" in log
    info = cluster.job_info(run.job)
    assert (info["NumNodes"], info["Comment"], info["TimeLimit"]) == ("2", "mine", "00:10:00")
    # From another home the job's log says whose run it is.
    seen = runs.hpc_elastic("status", run.job, env={"HOME": "/tmp", "XDG_STATE_HOME": ""})
    assert seen.stdout.startswith(f"run {run.root.name}: up"), seen.stderr
    stop.touch()
    assert run.wait_end() == "COMPLETED"
    broken = runs.folder / "broken.sh"
    broken.write_text(template.replace("trap '' USR2\n", "").replace("exec ", ""))
    refused = runs.hpc_elastic("submit", "--template", "broken.sh", "train.py")
    assert refused.returncode == 2
    assert "trap '' USR2 is missing" in refused.stderr
    assert "exec @COMMAND@" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_jobs_that_are_no_runs_of_this_accounts(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    script = runs.folder / "sleep.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    own, theirs = (
        cluster.run(
            ["sbatch", "--parsable", "-o", "/dev/null", str(script)], user=user, cwd="/", check=True
        ).stdout.strip()
        for user in ("alice", "mallory")
    )
    expected = {
        "999999": "job 999999: no such run (searched",
        own: f"job {own} (sleep.sh): no such run (not submitted by hpc-elastic",
        theirs: f"job {theirs} (sleep.sh, of mallory): no such run (not submitted by hpc-elastic",
        "12_x": "12_x: no such run (searched",
    }
    for job, said in expected.items():
        for subcommand in ("status", "cancel") if job in (own, theirs) else ("requeue", "report"):
            done = runs.hpc_elastic(subcommand, job)
            assert done.returncode == 2, (subcommand, job, done.stdout)
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert said in done.stderr, (subcommand, done.stderr)
    assert cluster.job_state(own) in ("RUNNING", "PENDING")
    cluster.run(["scancel", own])
    cluster.run(["scancel", theirs], user="mallory")


def test_a_job_that_a_worker_submits_outlives_its_run(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """On the same node, with all of the run's tags in its environment: sbatch hands them on."""
    stop, other = runs.folder / "stop", runs.folder / "other.sh"
    other.write_text("#!/bin/bash\nenv > other.env\nsleep 600 & echo $! > other.pid\nwait\n")
    text = f"""
import subprocess
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    argv = ["sbatch", "--parsable", "-w", "n1", "-t", "10", "-o", "/dev/null", {str(other)!r}]
    print("submitted", subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout, flush=True)
"""
    script = runs.script(WAITS.replace("stop = sys.argv[1]", text + "stop = sys.argv[1]"))
    run = runs.submit("-w", "n1", *SHORT, script, str(stop))
    wait_file(runs.folder / "other.pid", r"\d+\n")
    inherited = (runs.folder / "other.env").read_text()
    assert f"HPC_ELASTIC_TAG={run.uid()}:host:" in inherited
    found = re.search(r"submitted (\d+)", run.wait_log(lambda log: "submitted" in log))
    assert found is not None

    def sleeping() -> list[int]:
        return [pid for pid, command in cluster.node_pids("n1", user="alice") if command == "sleep 600"]

    wait_until(lambda: bool(sleeping()), timeout=60, what="the job that was submitted runs")
    (before,) = sleeping()
    run.kill_agent("n1")  # its guardian ends what carries its tag; so does the next agent
    run.wait_log(lambda log: "rank 0 of 1 gpus - round 1" in log, timeout=60)
    stop.touch()
    assert run.wait_end() == "COMPLETED"
    assert cluster.job_state(found[1]) == "RUNNING"
    assert sleeping() == [before]
    cluster.run(["scancel", found[1]])
