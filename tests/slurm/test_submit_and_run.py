"""Submissions on a real Slurm: odd paths, sbatch's variables, Ctrl-C in --follow, and a batch script of one's own."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED
from tests.rigs.slurm_runs import SHORT, SlurmRuns

HELLO = "import os, sys\nprint('hello from', os.environ['RANK'], os.getcwd(), sys.argv[1:])\n"
WAITS = "import time\nprint('waiting', flush=True)\ntime.sleep(600)\n"


def test_a_path_that_needs_every_kind_of_quoting(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    odd = runs.folder / 'it\'s 50%j "of" $HOME `id` #1 \\ é'
    assert cluster.run(["mkdir", str(odd)]).returncode == 0
    (odd / "train.py").write_text(HELLO)
    done = cluster.run(["hpc-elastic", "submit", "--follow", *SHORT, "train.py", "a b"], cwd=odd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"hello from 0 {odd} ['a b']" in done.stdout
    (run,) = (odd / "runs").iterdir()
    assert "hello from 0" in (run / "job.log").read_text()
    assert stat.S_IMODE((run / "job.log").stat().st_mode) == 0o600


def test_given_options_win_over_sbatchs_variables(runs: SlurmRuns) -> None:
    env = {"SBATCH_TIMELIMIT": "3", "SBATCH_JOB_NAME": "by-variable", "SBATCH_REQUEUE": "1", "SLURM_NTASKS": "7"}
    done = runs.hpc_elastic("submit", "--begin=now+1hour", "-t", "7", "--no-requeue", runs.script(HELLO), env=env)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1]
    info = runs.cluster.job_info(job)
    runs.cluster.run(["scancel", job])
    assert (info["TimeLimit"], info["JobName"], info["Requeue"]) == ("00:07:00", "by-variable", "0")
    assert info["NumTasks"] in ("1", "0", "N/A")
    assert str(runs.folder / "runs") in info["Comment"]


def test_workers_have_of_the_users_environment_what_slurm_says_that_export_means(runs: SlurmRuns) -> None:
    """`ALL,NAME=VALUE`, names alone, `NONE`, and SBATCH_EXPORT: on every node, as Slurm means them."""
    script = runs.script(
        "import os\nprint('saw', *(os.environ.get(n) for n in ('KEPT', 'OTHER', 'GIVEN')), flush=True)\n"
    )
    env = {"KEPT": "kept", "OTHER": "other"}
    options = ("--nodes", "2", "--max-restarts", "0", *SHORT)
    wanted = {
        (): "kept other None",
        ("--export", "ALL,GIVEN=a b"): "kept other a b",
        ("--export", "PATH,KEPT,GIVEN=g"): "kept None g",
        ("--export", "NONE"): "None None None",
    }
    for export, seen in wanted.items():
        done = runs.hpc_elastic("submit", "--follow", *options, *export, script, env=env)
        assert done.stdout.count(f"] saw {seen}\n") == 2, (export, done.stdout, done.stderr)
    by_variable = runs.hpc_elastic("submit", "--follow", *options, script, env={**env, "SBATCH_EXPORT": "NONE"})
    assert by_variable.stdout.count("] saw None None None\n") == 2, by_variable.stdout


def test_more_nodes_than_there_are(runs: SlurmRuns) -> None:
    done = runs.hpc_elastic("submit", "--nodes", "5", runs.script(HELLO))
    assert done.returncode == 2
    assert "has 4 nodes; the job would never start" in done.stderr
    assert not (runs.folder / "runs").exists()


def test_ctrl_c_ends_the_following_and_not_the_job(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    argv = ["hpc-elastic", "submit", "--follow", *SHORT, runs.script(WAITS)]
    with cluster.popen(argv, cwd=runs.folder) as follower:
        assert follower.stdout is not None
        job = follower.stdout.readline().split()[1]
        for line in follower.stdout:
            if "waiting" in line:
                break
        cluster.kill_process("login", r"bin/hpc-elastic submit", signal.SIGINT)
        _, err = follower.communicate(timeout=90 * CROWDED)
    assert follower.returncode == 130
    assert f"job {job} continues; to end it: scancel {job}" in err
    assert cluster.job_state(job) == "RUNNING"
    cluster.run(["scancel", job])
    cluster.wait_job(job)


def test_waiting_for_an_array_and_for_a_job_that_never_starts(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    script = runs.script("import os, sys\nsys.exit(int(os.environ['SLURM_ARRAY_TASK_ID']) % 2)\n")
    once = ("--max-restarts", "0", "--no-requeue", *SHORT)
    array = runs.hpc_elastic("submit", "--wait", "--array", "0-1", *once, script)
    job = array.stdout.split()[1]
    assert array.returncode == 1
    assert array.stderr.endswith(f"reports: hpc-elastic report {job}_1; all its runs: hpc-elastic status {job}\n")
    assert "FAILED" in runs.hpc_elastic("report", f"{job}_1").stdout
    never = runs.hpc_elastic("submit", "--wait", "-d", f"afterok:{job}", *SHORT, script)
    waiting = never.stdout.split()[1]
    assert never.returncode == 1
    assert never.stderr.endswith(f"scancel {waiting} takes it out of the queue\n")
    assert "DependencyNeverSatisfied" in runs.hpc_elastic("status", waiting).stdout
    cluster.run(["scancel", waiting])


def test_runs_whose_end_slurm_alone_knows(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """Batch scripts that were killed, with time for an agent to write the verdict and without; a job that never ran."""
    script = runs.script(WAITS)
    told, killed = (runs.submit("-w", node, *SHORT, script) for node in ("n1", "n2"))
    queued = runs.submit("--begin", "now+1hour", *SHORT, script)
    for run in (told, killed):
        run.wait_log(lambda log: "waiting" in log, timeout=60)
    for run in (told, killed):
        assert cluster.run(["scancel", "--batch", run.job]).returncode == 0
    assert cluster.run(["scancel", queued.job]).returncode == 0
    cluster.kill_process("n2", r"hpc_elastic.* agent ", signal.SIGKILL)
    assert (told.wait_end(), killed.wait_end(), queued.wait_end()) == ("FAILED", "FAILED", "CANCELLED")
    assert told.result()["outcome"] == "cancelled"
    assert "batch script killed (Slurm: JobLaunchFailure)" in told.result()["reason"]
    listed = runs.hpc_elastic("list", "--state", "ended").stdout
    how = "ended without a verdict: batch script killed (Slurm: FAILED, JobLaunchFailure)"
    assert listed.count("\n") == 4
    (line,) = (line for line in listed.splitlines() if f" {killed.job} " in line)
    assert line.startswith("failed ")
    assert line.endswith(how)
    assert f"failed (exit code 1): {how}" in runs.hpc_elastic("status", "--watch", killed.job).stdout
    assert how in " ".join(runs.hpc_elastic("report", killed.job).stdout.split())
    never = runs.hpc_elastic("status", queued.job).stdout
    assert "cancelled (exit code 143): cancelled while it waited in the queue" in never
    followed = runs.hpc_elastic("report", "--follow", queued.job)
    assert followed.returncode == 143, followed.stderr


def test_a_batch_script_of_ones_own_resumes_its_run_after_a_requeue(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """On a site whose jobs are not requeued unless somebody says so: the run says so for its own job."""
    cluster.reconfigure({"JobRequeue": 0})
    text = """
import os, pathlib, signal
print("attempt", os.environ["HPC_ELASTIC_ATTEMPT"])
if os.environ["HPC_ELASTIC_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    own = runs.folder / "own.sh"
    own.write_text(
        "#!/bin/bash\n#SBATCH -N2 -t 10 --open-mode=append --no-kill -o own.log\ntrap '' USR2\n"
        f"exec hpc-elastic run --nproc-per-node 1 --max-restarts 0 {runs.script(text)}\n"
    )
    job = cluster.run(["sbatch", "--parsable", str(own)], cwd=runs.folder, check=True).stdout.strip()
    assert cluster.wait_job(job, {"COMPLETED"}, timeout=60) == "COMPLETED"
    log = (runs.folder / "own.log").read_text()
    (run,) = (runs.folder / "runs").iterdir()
    attempts = sorted(path.name for path in run.iterdir() if re.match(r"attempt-\d", path.name))
    assert attempts == ["attempt-000", "attempt-001"], log
    assert "requeue enabled: yes, the site has JobRequeue=0; it was set for this job" in log
    again = runs.hpc_elastic("report", job)
    assert again.returncode == 0, again.stderr
    assert str(run) in again.stdout


def test_another_users_folder_is_refused_as_that_user_sees_it(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    planted = Path(cluster.shared) / f"{runs.folder.name}-theirs"
    assert cluster.run(["mkdir", "-m", "0777", str(planted)], user="mallory").returncode == 0
    assert cluster.run(["ln", "-s", str(runs.folder), f"{planted}.link"], user="mallory").returncode == 0
    for path, why in (
        (str(planted), "who could replace what is in it"),
        (f"{planted}.link", "is a symbolic link of uid"),
    ):
        done = runs.hpc_elastic("submit", "--runs-dir", path, runs.script(HELLO))
        assert done.returncode == 2
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert os.listdir(planted) == []
