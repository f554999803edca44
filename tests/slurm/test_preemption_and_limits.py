"""The job is to make room, or its time is over: the rows of the signals' table, brought about by a real Slurm.

Most of the time is waiting, for Slurm's looks (each 30 s) and for requeued jobs: so the cases run side by side, each on
nodes of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs import lockstep
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED, wait_until
from tests.rigs.slurm_runs import Run, SlurmRuns

SAVES_WHEN_TOLD = """
import os, pathlib, sys, time
import hpc_elastic
rank, attempt = os.environ["RANK"], os.environ["HPC_ELASTIC_ATTEMPT"]
saved = pathlib.Path("step-" + os.environ["SLURM_JOB_ID"] + ".txt")
begin = int(saved.read_text()) + 1 if saved.exists() else 0
print("rank", rank, "begins at step", begin, "in attempt", attempt)
if attempt != "0":
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
SAVES_ON_SIGTERM = (
    'import os, sys\nsys.argv += ["--save-every", "1000000", "--save-on-sigterm", "--checkpoints", "saved-" +'
    ' os.environ["SLURM_JOB_ID"]]\nos.makedirs(sys.argv[-1], exist_ok=True)\n' + Path(lockstep.__file__).read_text()
)
"""The lock-step trainer, whose first checkpoint is the one that it writes on SIGTERM."""
COUNTS = """
import json, os, sys, time
import submitit
from hpc_elastic.submission import ElasticExecutor

class Count(submitit.helpers.Checkpointable):
    def __init__(self):
        self.lives, self.step, self.rank = 0, 0, None

    def __call__(self):
        self.lives += 1
        print("trains" if self.lives == 1 else "goes on", flush=True)
        self.rank = self.rank or os.environ["RANK"]
        deadline = time.monotonic() + 300
        while self.lives == 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            self.step += 1
        return [self.lives, self.step, self.rank]

folder, partition, node = sys.argv[1:]
executor = ElasticExecutor(folder, cluster="slurm")
executor.update_parameters(partition=partition, nodelist=node, exclusive=True, tasks_per_node=2, timeout_min=60)
job = executor.submit(Count())
print(job.job_id, job.run_dir, flush=True)
print(json.dumps([job.results(), job.state]))
"""
"""A function by submitit's protocol: it counts in its first life, until it is told to make room."""
LONG = 90.0
"""Seconds for what ends by Slurm's looks, on a slow machine."""


@pytest.fixture(scope="module")
def preempting_cluster(slurm_can_run: None) -> Iterator[SlurmCluster]:
    """Eight nodes of a site that preempts.

    With proctrack/cgroup, as most sites: there Slurm signals an agent and not its workers. (proctrack/linuxproc signals
    every process of a step.)
    """
    with SlurmCluster(8, accounting=False, cgroups=True, cred_expire=5, preemption=True) as started:
        yield started


@pytest.fixture
def cluster(preempting_cluster: SlurmCluster) -> SlurmCluster:
    return preempting_cluster


class Cases:
    """Runs side by side, each on whole nodes of its own."""

    def __init__(self, runs: SlurmRuns) -> None:
        self.runs = runs
        self.cluster = runs.cluster
        self._free = list(self.cluster.node_names)

    def submit(self, name: str, script: str, *options: str, nodes: int = 1, partition: str = "main") -> Run:
        mine, self._free = self._free[:nodes], self._free[nodes:]
        where = ("--nodes", str(nodes), "-p", partition, "-w", ",".join(mine), "--exclusive")
        usual = ("-t", "10", "--nproc-per-node", "1", "--job-name", name)
        return self.runs.submit(*where, *usual, *options, self.runs.script(script, name=f"{name}.py"))

    def submit_function(self, partition: str) -> tuple[Run, subprocess.Popen[str]]:
        """Two ranks of a function, by the executor, and the program that waits for them."""
        (node,), self._free = self._free[:1], self._free[1:]
        name = self.runs.script(COUNTS, name="counts.py")
        argv = ["python", name, str(self.runs.folder / "jobs"), partition, node]
        process = self.cluster.popen(argv, cwd=self.runs.folder)
        assert process.stdout is not None
        told = process.stdout.readline().split()
        assert len(told) == 2, process.communicate()
        return Run(self.runs, job=told[0], root=Path(told[1]), done=None), process

    def take_nodes(self, nodes: int) -> None:
        """A job of the higher partition wants the first `nodes` nodes, for a moment."""
        names = ",".join(self.cluster.node_names[:nodes])
        argv = ["sbatch", "-p", "urgent", f"-N{nodes}", "-w", names, "--exclusive", "-t", "5", "-o", "/dev/null"]
        done = self.cluster.run([*argv, "--wrap", "true"], cwd=self.runs.folder)
        assert done.returncode == 0, done.stderr

    def as_root(self, *argv: str) -> None:
        done = self.cluster.run(list(argv), user="root")
        assert done.returncode == 0, done.stderr


def wait_training(run: Run, nodes: int = 1) -> None:
    run.wait_log(lambda log: log.count("trains") == nodes, timeout=60)


def decided(run: Run, attempt: int = 0) -> list[tuple[object, object, object, object]]:
    """Of each signal: who heard it, what Slurm said, what it meant, and whether the workers might save."""
    keys = ("heard_by", "slurm", "meaning", "saves")
    told = [event for event in run.events(attempt) if event["event"] == "signal_decided"]
    return [tuple(event[key] for key in keys) for event in told]  # type: ignore[misc]


def saved_step(run: Run, why: str, *, ranks: int = 1) -> str:
    """The step after which all saved, once the job is back in the queue; the log and the report tell of it."""
    log = run.wait_log(lambda log: "is requeued" in log, timeout=LONG)
    steps = re.findall(r"saved after step (\d+)", log)
    assert len(steps) == ranks, log
    assert len(set(steps)) == 1, log
    said = rf"notice {why}; saved in \d+ of \d+ s \(step {steps[0]}\)"
    assert re.search(said, log), log
    assert re.search(said, run.result()["reason"])
    assert re.search(r"saved in \d+ of \d+ s", (run.root / "attempt-000" / "report.txt").read_text())
    assert run.result()["outcome"] == "preempted"
    step: str = steps[0]
    return step


def wait_resumed(run: Run, text: str = "") -> None:
    """The next attempt runs, once: nobody has requeued it twice."""
    run.wait_log(lambda log: f"{text} in attempt 1".strip() in log, timeout=LONG)
    assert run.runs.cluster.job_info(run.job)["Restarts"] == "1"


def wait_trains_on(run: Run) -> None:
    """The lock-step trainer goes on from the checkpoint that it wrote on SIGTERM."""
    run.wait_log(lambda log: re.search(r"rank 0 of \d begins at step [1-9]", log) is not None, timeout=LONG)


def test_each_way_to_be_preempted(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    cases = Cases(runs)
    requeued = cases.submit("requeued", SAVES_WHEN_TOLD, nodes=2, partition="requeued")
    cancelled = cases.submit("cancelled", SAVES_WHEN_TOLD, partition="cancelled")
    stubborn = cases.submit("stubborn", NEVER_REACTS, partition="cancelled")
    requeued_at_once = cases.submit("requeuednow", SAVES_ON_SIGTERM, partition="requeued-at-once")
    cancelled_at_once = cases.submit("cancellednow", SAVES_WHEN_TOLD, partition="cancelled-at-once")
    function, program = cases.submit_function("cancelled")
    shortened = cases.submit("shortened", NEVER_REACTS, partition="requeued")
    for run in (requeued, cancelled, stubborn, cancelled_at_once, function, shortened):
        wait_training(run, nodes=2 if run in (requeued, function) else 1)
    requeued_at_once.wait_steps(1)
    # It is to save already, with more time than the preemption will leave.
    assert cluster.run(["scancel", "--signal=USR2", "--batch", shortened.job]).returncode == 0
    shortened.wait_log(lambda log: "the workers have 85 s to save" in log)
    cases.take_nodes(8)

    # Without a grace time all hear of it, and everything ends.
    for run, word, meaning in (
        (requeued_at_once, "is requeued", "requeue"),
        (cancelled_at_once, "is ended by a preemption", "preemption"),
    ):
        run.wait_log(lambda log: "exit code 75" in log, timeout=LONG)
        assert run.result()["outcome"] == "preempted"
        assert [row[1:] for row in decided(run)] == [(word, meaning, False)]
        assert "saved after" not in run.log
    assert "Slurm itself has put the job back" in requeued_at_once.log

    # With one the agents alone hear of it; where Slurm would cancel the job, it is back in the queue first.
    told = ("agents alone", "is preempted, its grace time runs", "preemption", True)
    steps = {}
    for run, ranks in ((requeued, 2), (cancelled, 1)):
        steps[run] = saved_step(run, r"SIGTERM on n\d \(preemption\)", ranks=ranks)
        assert decided(run)[0] == told
    log = stubborn.wait_log(lambda log: "is requeued" in log, timeout=LONG)
    assert re.search(r"notice SIGTERM on n4 \(preemption\); n4 had not saved after \d+ s", log), log
    assert decided(stubborn)[0] == told
    log = shortened.wait_log(lambda log: "is requeued" in log, timeout=LONG)
    had = re.search(r"notice SIGTERM on n8 \(preemption\); n8 had not saved after (\d+) s", log)
    assert had, log
    assert int(had[1]) < 25, "of 85"
    assert decided(shortened)[:2] == [("supervisor", "runs", "requeue", True), told]

    for run, step in steps.items():
        wait_resumed(run, f"begins at step {int(step) + 1}")
    wait_resumed(stubborn)
    wait_resumed(shortened)
    wait_trains_on(requeued_at_once)
    wait_resumed(cancelled_at_once)
    check_function(function, program)


def check_function(run: Run, program: subprocess.Popen[str]) -> None:
    """Each rank's callable was saved, and went on from its own state when the job had nodes again."""
    out, err = program.communicate(timeout=2 * LONG * CROWDED)
    assert program.returncode == 0, out + err + run.log
    results, state = json.loads(out)
    assert state == "COMPLETED"
    assert [(lives, rank) for lives, _, rank in results] == [(2, "0"), (2, "1")]
    assert all(step > 0 for _, step, _ in results)
    assert run.result()["outcome"] == "preempted"
    assert decided(run)[0] == ("agents alone", "is preempted, its grace time runs", "preemption", True)
    assert run.runs.cluster.job_info(run.job)["Restarts"] == "1"


def test_limits_cancels_and_notices_at_bad_moments(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    cases = Cases(runs)
    slow_setup = runs.folder / "slow.sbatch"
    slow_setup.write_text(
        "#!/bin/bash\n@SBATCH_LINES@\ntrap '' USR2\ntouch setup-begins\n"
        "until [[ -e go-on ]]; do sleep 0.1; done\nexec @COMMAND@\n"
    )
    slow_setup.chmod(0o644)
    in_setup = cases.submit("setup", SAVES_WHEN_TOLD, "--template", str(slow_setup), partition="requeued")
    # A preemption's grace begins while the batch script is in its set-up: there is nobody who could hear of it.
    wait_until(lambda: (runs.folder / "setup-begins").exists(), timeout=60, what="the set-up")
    cases.take_nodes(1)
    preempted = r"\d{4}-.*"
    wait_until(
        lambda: re.match(preempted, cluster.job_info(in_setup.job).get("PreemptTime", "")) is not None,
        timeout=60,
        what="the preemption",
    )
    (runs.folder / "go-on").touch()

    near_limit = cases.submit("limit", SAVES_WHEN_TOLD)
    over_limit = cases.submit("late", SAVES_ON_SIGTERM, nodes=2)
    outside = cases.submit("outside", SAVES_ON_SIGTERM)
    # Its workers end by SIGKILL alone; what KillWait leaves after that is for the report.
    ended = cases.submit("ended", NEVER_REACTS, "--shutdown-timeout", "3")
    meeting = cases.submit(
        "meeting", SAVES_WHEN_TOLD, "--health-check", "sleep 300", "--health-check-timeout", "300", nodes=2
    )

    for run in (near_limit, ended):
        wait_training(run)
    over_limit.wait_steps(2)
    outside.wait_steps(1)
    # The limit comes near, and is over: Slurm tells of both at its next look.
    cases.as_root("scontrol", "update", f"jobid={near_limit.job}", "EndTime=now+80")
    cases.as_root("scontrol", "update", f"jobid={over_limit.job}", "EndTime=now+1")
    assert cluster.run(["scontrol", "requeue", outside.job]).returncode == 0
    # While its workers are to save (two notices), and would never end.
    for _ in range(2):
        assert cluster.run(["scancel", "--signal=USR2", "--batch", ended.job]).returncode == 0
    ended.wait_log(lambda log: "the workers have" in log)
    assert cluster.run(["scancel", ended.job]).returncode == 0
    # While nodes meet.
    meeting.wait_log(lambda log: "srun" in log or "requeue enabled" in log)
    wait_until(lambda: any(event["event"] == "agent_started" for event in meeting.events()), timeout=60, what="agents")
    assert cluster.run(["scancel", "--signal=USR2", "--batch", meeting.job]).returncode == 0

    assert ended.wait_end(timeout=LONG) == "CANCELLED"
    assert ended.result()["outcome"] == "cancelled"
    assert decided(ended)[0] == ("supervisor", "runs", "requeue", True)
    assert decided(ended)[-1][1:] == ("is ended", "cancel", False)
    assert len(decided(ended)) == 2, "the second notice was no news"
    assert "requeue 1" not in ended.log

    outside.wait_log(lambda log: "Slurm itself has put the job back into the queue" in log, timeout=LONG)
    assert outside.result()["outcome"] == "preempted"
    assert [row[1:] for row in decided(outside)] == [("is requeued", "requeue", False)]
    assert "Asked to requeue" in (outside.root / "attempt-000" / "report.txt").read_text()
    wait_trains_on(outside)

    meeting.wait_log(lambda log: "is requeued" in log, timeout=LONG)
    assert meeting.result()["outcome"] == "preempted"
    assert "no worker was running" in meeting.result()["reason"]
    cluster.run(["scancel", meeting.job])

    in_setup.wait_log(lambda log: "is requeued" in log, timeout=LONG)
    assert in_setup.result()["reason"] == "notice seen by the supervisor (preemption); no worker was running"

    saved_step(near_limit, r"SIGUSR2 on n2 \(time limit\)")
    assert decided(near_limit)[0] == ("supervisor", "runs, its time limit is near", "time limit", True)

    over_limit.wait_log(lambda log: "exit code 75" in log, timeout=LONG)
    assert decided(over_limit)[-1][1:] == ("is ended by its time limit", "time limit", False)
    assert over_limit.result()["outcome"] in ("timed_out", "preempted")
    wait_trains_on(over_limit)
    for run in (near_limit, in_setup):
        wait_resumed(run)


def test_the_users_own_signal_at_the_start_of_the_grace_time(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """SlurmctldParameters=preempt_send_user_signal: the batch script hears of it, and the agents do not."""
    cluster.reconfigure({"SlurmctldParameters": "preempt_send_user_signal"})
    cases = Cases(runs)
    run = cases.submit("usersignal", SAVES_WHEN_TOLD, nodes=2, partition="cancelled")
    wait_training(run, nodes=2)
    cases.take_nodes(2)
    saved_step(run, r"SIGUSR2 on n1 \(preemption\)", ranks=2)
    assert decided(run) == [("supervisor", "is preempted, its grace time runs", "preemption", True)]
