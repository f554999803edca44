"""The main job as its user sees it: submitted by a normal user to a real Slurm of four nodes, and things die."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED, wait_until
from tests.rigs.slurm_runs import ALL_COME, SHORT, SlurmRuns

EPOCHS = "16"
"""So many that the last but one, in which a rank is killed, comes after the cut, however late epoch 1 is seen."""
FLAP_SECONDS = 4.0
"""Longer than a node may be silent before it becomes a suspect."""

SAVES_WHEN_TOLD = """
import hpc_elastic, sys, time
for step in range(10000):
    time.sleep(0.05)
    if step == 20:
        print("trains")
    if hpc_elastic.should_checkpoint(step):
        print("saved after step", step)
        sys.exit(0)
"""
WAITS = """
import os, sys, time
print("line of", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "round", os.environ["TORCHELASTIC_RESTART_COUNT"])
time.sleep(float(sys.argv[1]))
"""
# How long a test takes to do something to a run is nobody's to say: it ends when it is told to.
WAITS_TO_BE_TOLD = """
import os, pathlib, time
print("line of", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "round", os.environ["TORCHELASTIC_RESTART_COUNT"])
while not pathlib.Path("end").exists():
    time.sleep(0.05)
"""


def _final_line(log: str) -> tuple[float, float]:
    match = re.search(r"final: epoch=\d+ loss=([\d.]+) accuracy=([\d.]+)", log)
    assert match, log
    return float(match.group(1)), float(match.group(2))


@pytest.mark.parametrize("cluster", [pytest.param("plain", marks=pytest.mark.slow), "emulated"], indirect=True)
@pytest.mark.torch
def test_the_example_trains_to_the_same_loss_through_a_drain_a_flap_and_a_kill(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    """While a link is down, all wait in a collective: the training can't end before it is up again."""
    example = str(cluster.environment.examples / "train_digits.py")
    undisturbed = runs.submit_and_follow(
        "--nodes", "4", *SHORT, example, "--epochs", EPOCHS, "--checkpoint", str(runs.folder / "a.pt")
    )
    assert undisturbed.done.returncode == 0, undisturbed.log
    disturbed = runs.submit(
        *("--nodes", "4", *SHORT, example, "--epochs", EPOCHS, "--checkpoint", str(runs.folder / "b.pt")),
        *("--kill-rank", "0", "--kill-epoch", str(int(EPOCHS) - 1)),
    )
    disturbed.wait_log(lambda log: f"epoch 1/{EPOCHS}" in log)
    cluster.cut_link("n3")
    cut_at = time.monotonic()
    cluster.drain("n4")
    wait_until(lambda: time.monotonic() - cut_at > FLAP_SECONDS, timeout=2 * FLAP_SECONDS, what="the flap's end")
    assert cluster.job_state(disturbed.job) == "RUNNING"
    cluster.heal_link("n3")
    assert disturbed.wait_end() == "COMPLETED", disturbed.log
    assert f"resuming after epoch {int(EPOCHS) - 2}" in disturbed.log
    loss, accuracy = _final_line(undisturbed.log)
    assert _final_line(disturbed.log) == pytest.approx((loss, accuracy), abs=1e-4)
    assert accuracy > 0.9
    assert "Root Cause (first observed failure)" in disturbed.log
    assert disturbed.report()["verdict"]["failure"]["global_rank"] == 0, disturbed.log
    lost = [event for event in disturbed.events() if event["event"] == "node_lost"]
    assert lost == [], "its files answered all the time"
    assert cluster.node_state("n4").rstrip("*").startswith("drain")


@pytest.mark.any_release
def test_the_first_lines_say_what_runs_where_and_whether_requeue_is_armed(runs: SlurmRuns) -> None:
    run = runs.submit_and_follow("--nodes", "2", *SHORT, runs.script(WAITS), "0.2")
    assert run.done.returncode == 0, run.log
    head = run.log[:2000]
    assert f"job {run.job}" in head
    assert "n[1-2]" in head
    assert "slurm 2" in head
    assert str(run.root) in head
    assert "requeue enabled: yes" in head
    assert "[n2:1] line of 1 of 2 round 0" in run.log
    off = runs.submit_and_follow("--nodes", "1", "--no-requeue", *SHORT, runs.script(WAITS), "0.1")
    assert "requeue enabled: no, because" in off.log


@pytest.mark.any_release
def test_every_shape_of_job_gives_one_agent_per_node_with_all_its_cpus(runs: SlurmRuns) -> None:
    text = "import os\nprint('cpus', len(os.sched_getaffinity(0)), 'rank', os.environ['RANK'])\n"
    for shape in (("--exclusive", "--cpus-per-task", "2"), ("--cpus-per-task", "2"), ("--nodes", "1-2")):
        run = runs.submit_and_follow("--nodes", "2", *shape, *SHORT, runs.script(text))
        assert run.done.returncode == 0, run.log
        assert len(re.findall(r"cpus \d+ rank \d", run.log)) == 2, run.log


def test_arguments_reach_the_script_untouched(runs: SlurmRuns) -> None:
    text = "import sys, json\nprint('ARGV', json.dumps(sys.argv[1:]))\n"
    arguments = [
        "two words",
        'quo"te',
        "it's",
        "$HOME",
        "`id`",
        "line\nbreak",
        "ünïcode ✓",
        "--nodes",
        "7",
        "",
        "*",
        "-t",
    ]
    run = runs.submit_and_follow("--nodes", "1", *SHORT, runs.script(text), *arguments)
    assert run.done.returncode == 0, run.log
    import json

    (line,) = [line for line in run.log.splitlines() if "ARGV" in line]
    assert json.loads(line.split("ARGV ", 1)[1]) == arguments


@pytest.mark.any_release
def test_a_killed_agent_is_replaced_on_its_node_and_costs_no_restart(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "4", "--max-restarts", "0", *SHORT, runs.trainer())
    run.wait_steps(4)
    workers = [pid for pid, command in cluster.node_pids("n3", user="alice") if "train.py" in command]
    assert len(workers) == 1
    run.kill_agent("n3")
    run.wait_training(cluster.node_names, after=0)
    # Looked at while the step still runs: at a step's end Slurm would clean up for us.
    now = [pid for pid, command in cluster.node_pids("n3", user="alice") if "train.py" in command]
    assert len(now) == 1
    assert now != workers
    run.say_end()
    assert run.wait_end() == "COMPLETED"
    assert run.report()["outcome"] == "succeeded"
    run.check_training()
    run.check_losses("n3")
    assert "the agent on n3 died" in run.log
    assert run.left_on_nodes() == []


def test_the_agent_of_the_batch_host_and_coordinator_may_die_too(runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "3", "--max-restarts", "0", *ALL_COME, *SHORT, runs.trainer())
    run.wait_steps(3)
    run.kill_agent("n1")
    run.wait_training(["n1", "n2", "n3"], after=0)
    run.say_end()
    assert run.wait_end() == "COMPLETED"
    run.check_training()
    run.check_losses("n1")


@pytest.mark.any_release
def test_an_srun_that_is_killed_costs_no_restart(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """All agents of the step die with it; each is started again in a step of its own."""
    run = runs.submit("--nodes", "3", "--max-restarts", "0", *SHORT, runs.trainer())
    run.wait_steps(3)
    assert cluster.kill_process("n1", r"\Asrun -N3 ", 9)
    # Each in a round of its own, or several in one.
    run.wait_training(["n1", "n2", "n3"], after=0)
    run.say_end()
    assert run.wait_end() == "COMPLETED"
    run.check_training()
    assert run.left_on_nodes() == []


@pytest.mark.any_release
@pytest.mark.parametrize("cluster", ["plain", "minute"], indirect=True)
def test_a_node_that_loses_its_power_shrinks_the_run(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "2-4", *ALL_COME, *SHORT, runs.trainer())
    run.wait_steps(4)
    # Fills the caches of the submitting host, with what is missing too.
    assert "is running" in runs.hpc_elastic("report", run.job).stdout
    cluster.kill_node("n3")
    lost_at = time.time()
    index, _ = run.wait_training(["n1", "n2", "n4"])
    run.check_in_time(index, lost_at, "a node lost its power")
    assert "node n3 was lost" in runs.hpc_elastic("report", run.job).stdout
    run.say_end()
    run.wait_log(lambda log: "; exit code 0" in log)
    report = runs.hpc_elastic("report", run.job).stdout
    assert "node n3 was lost" in report
    assert "SUCCEEDED" in report
    assert "node n3 was lost" in run.log
    assert run.report()["outcome"] == "succeeded"
    run.check_training()
    run.check_losses("n3")
    if cluster.settings.fs is None:
        assert run.wait_end(timeout=60) in ("COMPLETED", "COMPLETING")


@pytest.mark.parametrize("cluster", ["emulated"], indirect=True)
def test_a_lost_node_without_a_spare_requeues_and_the_next_attempt_resumes(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    quick = ("--rdzv-conf", "last_call_timeout=3")
    arguments = ("submit", "--follow", "--nodes", "3", *SHORT, *quick, runs.trainer())
    with cluster.popen(["hpc-elastic", *arguments], cwd=runs.folder) as follower:
        run = runs.newest()
        run.wait_steps(3, beyond=10)
        cluster.kill_node("n3")
        run.wait_log(lambda log: f"job {run.job} is requeued" in log)
        cluster.start_node("n3", wait=False)  # else the job waits until Slurm has found the node dead
        run.wait_log(lambda log: len(re.findall(r"of 3 begins at step [1-9]", log)) == 3)
        run.say_end()
        out, err = follower.communicate(timeout=120 * CROWDED)
    assert follower.returncode == 0, out + err
    assert len(re.findall(r"rank \d of 3 begins at step 0", out)) == 3
    assert len(re.findall(r"rank \d of 3 begins at step [1-9]", out)) == 3, "who follows sees both attempts"
    run.check_training(1)
    run.check_losses("n3")
    assert run.result(0)["outcome"] == "too_few_nodes"
    assert "(missing: n3)" in run.result(0)["reason"]
    report = runs.hpc_elastic("report", str(run.root), "--attempt", "0").stdout
    assert "node n3 was lost" in report
    assert "attempt 1" in runs.hpc_elastic("report", str(run.root)).stdout


@pytest.mark.any_release
@pytest.mark.parametrize("cluster", ["plain", "emulated"], indirect=True)
def test_the_batch_host_may_die_and_the_job_ends_with_its_report(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "2-3", *ALL_COME, *SHORT, runs.trainer())
    run.wait_steps(3)
    cluster.kill_node("n1")
    run.wait_training(["n2", "n3"])
    run.say_end()
    log = run.wait_log(lambda log: "; exit code 0" in log)
    assert "the supervisor on n1 did not finish the attempt" in log
    assert "SUCCEEDED" in log
    assert "node n1 was lost" in log
    assert run.result()["outcome"] == "succeeded"
    run.check_training()
    run.check_losses("n1")
    # Slurm would keep the allocation for ever: nobody else ends a job whose batch script is gone.
    assert run.wait_end(timeout=60) in ("CANCELLED", "COMPLETED")
    assert run.left_on_nodes() == []


@pytest.mark.any_release
def test_a_node_that_is_dead_at_launch_is_left_out(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    # Not noticed by Slurm, however slow the submission: the job gets the node, srun aborts the whole launch for it.
    cluster.reconfigure({"SlurmdTimeout": 300})
    assert cluster.kill_process("n3", r"slurmd\b", 9)
    run = runs.submit("--nodes", "2-4", *SHORT, runs.script(WAITS), "1")
    log = run.wait_log(lambda log: log.count("of 3 round") == 3)
    assert "launching again without" in log
    run.wait_log(lambda log: "exit code 0" in log)
    assert run.result()["outcome"] == "succeeded"


@pytest.mark.any_release
def test_an_srun_that_never_returns_holds_nothing_up(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "2", *SHORT, runs.script(WAITS_TO_BE_TOLD))
    run.wait_log(lambda log: log.count("of 2 round 0") == 2)
    assert cluster.kill_process("n2", r"slurmstepd: \[\d+\.0\]", 9)
    run.say_end()
    run.wait_log(lambda log: "closed (round 0): all workers ended with 0" in log)
    run.wait_log(lambda log: "; exit code 0" in log)
    run.wait_end()
    assert run.result()["outcome"] == "succeeded"


@pytest.mark.any_release
def test_a_script_that_raises_is_reported_with_its_traceback_and_not_requeued(runs: SlurmRuns) -> None:
    text = "import os\nif os.environ['RANK'] == '2':\n    raise ValueError('bad batch')\nimport time; time.sleep(60)\n"
    run = runs.submit_and_follow("--nodes", "4", *SHORT, runs.script(text))
    assert run.done.returncode == 93, run.log
    assert "ValueError: bad batch" in run.log
    assert "this looks like a bug in the script" in run.log
    cause = run.report()["verdict"]["failure"]
    assert (cause["global_rank"], cause["host"]) == (2, "n3")
    assert run.runs.cluster.job_info(run.job)["Restarts"] == "0"


@pytest.mark.any_release
def test_a_killed_worker_costs_a_restart_and_then_a_requeue(runs: SlurmRuns) -> None:
    """Its peers fail with it, a moment later. Two on one node would speak against the node."""
    run = runs.submit("--nodes", "2", "--max-restarts", "1", "--max-same-failures", "0", *SHORT, runs.trainer())
    run.wait_steps(2)
    for index, node in enumerate(("n2", "n1")):
        run.wait_training(["n1", "n2"], after=index - 1)
        assert runs.cluster.kill_process(node, r" -u train\.py", 9)
    run.wait_training(["n1", "n2"], attempt=1)
    run.say_end()
    run.wait_end()
    assert run.result(1)["outcome"] == "succeeded", run.log
    run.check_training(1)
    assert "restarts exhausted (1 of 1 restarts used)" in run.log
    rounds = run.report()["attempts"][0]["rounds"]
    for part, place in zip(rounds, ("rank 1 on n2", "rank 0 on n1"), strict=True):
        assert f"{place}: Signal 9 (SIGKILL)" in part["verdict"]["summary"]
    assert run.result(0)["exit_code"] == 75
    assert [attempt["number"] for attempt in run.report(1)["attempts"]] == [0, 1]
    assert run.log.index("attempt 0,") < run.log.index("attempt 1,"), "the log is appended to, not overwritten"
    # A fresh shell, elsewhere, later, by the job's id.
    again = runs.hpc_elastic("report", run.job)
    assert again.returncode == 0
    assert "attempt 1" in again.stdout


def test_a_requeue_limit_of_none_ends_with_the_workers_failure(runs: SlurmRuns) -> None:
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    run = runs.submit_and_follow(
        "--nodes", "1", "--max-restarts", "0", "--max-requeues", "0", *SHORT, runs.script(text)
    )
    assert run.done.returncode == 1, run.log


@pytest.mark.any_release
def test_a_job_cancelled_while_it_runs_ends_clean(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """Its workers have the time to save: nobody has told them to end before."""
    run = runs.submit("--nodes", "2", *SHORT, runs.trainer(), "--save-every", "1000000", "--save-on-sigterm")
    run.wait_steps(2)
    assert list(runs.folder.glob("step-*.json")) == []
    assert cluster.run(["scancel", run.job]).returncode == 0
    assert run.wait_end() == "CANCELLED"
    assert len(list(runs.folder.glob("step-*.json"))) == 1, run.log
    assert run.report()["outcome"] == "cancelled"
    assert "requeue 1" not in run.log
    assert run.left_on_nodes() == []


def test_a_job_cancelled_while_it_is_pending_is_told_to_who_follows(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    follower = cluster.popen(
        ["hpc-elastic", "submit", "--follow", "--begin", "now+1hour", "--nodes", "1", *SHORT, runs.script(WAITS), "1"],
        user="alice",
        cwd=runs.folder,
    )
    out = follower.stdout
    assert out is not None
    first = out.readline()
    job = (first.decode() if isinstance(first, bytes) else first).split()[1]
    cluster.run(["scancel", job])
    code = follower.wait(timeout=90 * CROWDED)
    assert code not in (0, 2)


@pytest.mark.any_release
def test_a_time_limits_notice_requeues(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """What --signal=B:USR2 sends, without the minute that a real limit takes: all ranks save after one step."""
    run = runs.submit("--nodes", "2", *SHORT, runs.script(SAVES_WHEN_TOLD))
    run.wait_log(lambda log: log.count("trains") == 2)
    status = runs.hpc_elastic("status", run.job)
    assert re.match(rf"run {run.root.name}: (up|training), attempt 0, job {run.job}", status.stdout), status
    assert re.search(r"slurm    : RUNNING, 0:0\d:\d\d left", status.stdout)
    assert "asked to save" in runs.hpc_elastic("requeue", run.job).stdout
    run.wait_log(lambda log: "attempt 1," in log)
    saved = set(re.findall(r"saved after step (\d+)", run.log))
    assert len(saved) == 1
    assert re.search(rf"saved in \d+ of 85 s \(step {saved.pop()}\)", run.log)
    assert run.result(0)["outcome"] == "preempted"
    assert "SIGTERM" in runs.hpc_elastic("cancel", run.job).stdout
    run.wait_end()


def test_sbatchs_refusal_is_one_line_and_leaves_nothing(runs: SlurmRuns) -> None:
    done = runs.hpc_elastic("submit", "--nodes", "2", "-p", "nosuch", *SHORT, runs.script(WAITS), "1")
    assert done.returncode not in (0, None)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "nosuch" in done.stderr or "partition" in done.stderr
    folder = runs.folder / "runs"
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_run_directory_that_the_nodes_do_not_see_is_said(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    done = runs.hpc_elastic("submit", "--runs-dir", "/tmp/runs", "--nodes", "2", *SHORT, runs.script(WAITS), "1")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "/tmp" in done.stderr


@pytest.mark.any_release
@pytest.mark.parametrize("step", [[], ["srun", "-N1", "-n1", "--exact"]], ids=["itself", "in an interactive step"])
def test_inside_an_allocation_run_uses_it(cluster: SlurmCluster, runs: SlurmRuns, step: list[str]) -> None:
    """Also in a step that has all of the job's CPUs on its node: the agents' step shares them."""
    command = ["hpc-elastic", "run", "--nproc-per-node", "1", runs.script(WAITS), "0.2"]
    done = cluster.run(["salloc", "-N2", "-t", "5", *step, *command], cwd=runs.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requeue enabled: no, because" in done.stdout
    assert "line of 1 of 2" in done.stdout


def test_a_second_user_can_neither_read_nor_join_a_run(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "1", *SHORT, runs.script(WAITS), "3")
    run.wait_log(lambda log: "of 1 round 0" in log)
    for path in (run.root, run.root / "secret", run.root / "job.log", run.root / "attempt-000" / "store"):
        seen = cluster.run(["ls", "-la", str(path)], user="mallory")
        assert seen.returncode != 0, f"mallory could list {path}"
    done = runs.hpc_elastic("report", str(run.root), user="mallory", env={"HOME": "/tmp"})
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    modes = cluster.run(["find", str(run.root), "-perm", "/077", "-not", "-type", "l"], user="alice").stdout
    assert [line for line in modes.splitlines() if not line.endswith("job.log")] == [], modes
    run.wait_end()


def test_a_planted_runs_folder_is_refused(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    planted = Path(cluster.shared) / f"{runs.folder.name}-planted"
    cluster.run(["mkdir", "-m", "0777", str(planted)], user="mallory")
    cluster.run(["mkdir", "-m", "0777", str(planted / "victim")], user="mallory")
    done = runs.hpc_elastic("report", str(planted / "victim"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.torch
def test_the_workers_store_hears_the_rounds_nodes_alone(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """torch's TCPStore has no password: another host of the network gets no answer, a node of the round does."""
    text = """
import os, socket, sys, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
socket.create_connection(address, timeout=60).close()
print("reached", *address, os.environ["TORCHELASTIC_USE_AGENT_STORE"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
    stop = runs.folder / "stop"
    run = runs.submit("-w", "n1,n2", "--nodes", "2", *SHORT, runs.script(text), str(stop))
    log = run.wait_log(lambda log: log.count("reached") == 2, timeout=60)
    found = re.search(r"reached (\S+) (\d+) True", log)
    assert found is not None, log
    # torch's store answers nobody who says nothing, and closes no connection: one that is closed was refused.
    knock = f"""
import socket
try:
    socket.create_connection(({found[1]!r}, {found[2]}), timeout=2).recv(1)
except TimeoutError:
    print("in")
"""
    told = {node: cluster.run(["python3", "-c", knock], node=node, cwd="/") for node in ("n1", "n2", "n3")}
    stop.touch()
    assert run.wait_end() == "COMPLETED", run.log
    assert [told[node].stdout.strip() for node in ("n1", "n2", "n3")] == ["in", "in", ""]
    assert re.search(r"refused 10\.\d+\.\d+\.\d+: not an address of a node", run.log), run.log
    assert "serves every address" not in run.log
