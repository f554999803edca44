"""How a run gets its next attempt on a real Slurm: at once, without nodes that broke, with all that was asked for."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_elastic.slurm.job_environment import expand
from tests.rigs.shown_output import Session, ShownOutput
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED, wait_until
from tests.rigs.slurm_runs import ALL_COME, SHORT, Run, SlurmRuns

QUICK = ("--rdzv-conf", "last_call_timeout=3")
SITE_DELAY = 120
"""Seconds before which Slurm by itself lets no requeued job begin, where the site has not set it."""
WAITED = ((0, "attempt_ended"), (1, "attempt_started"))

PRINTS = """
import os
env = os.environ
print("seat", env["RANK"], "of", env["WORLD_SIZE"], "round", env["TORCHELASTIC_RESTART_COUNT"], "in attempt",
      env["HPC_ELASTIC_ATTEMPT"], flush=True)
"""
# Waits in attempt 0 until it is told to end: by a node's loss, a notice, or a file that has rank 0 killed.
STAYS = """
import os, pathlib, signal, time
import hpc_elastic
env = os.environ
print("seat", env["RANK"], "of", env["WORLD_SIZE"], "round", env["TORCHELASTIC_RESTART_COUNT"], "in attempt",
      env["HPC_ELASTIC_ATTEMPT"], flush=True)
step = 0
while env["HPC_ELASTIC_ATTEMPT"] == "0":
    step += 1
    time.sleep(0.05)
    if hpc_elastic.should_checkpoint(step):
        break
    if env["RANK"] == "0" and pathlib.Path("die").exists():
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def hide(cluster: SlurmCluster) -> Iterator[Callable[[str, Path], None]]:
    """Mount an empty folder over one on a node, until the test's end."""
    hidden: list[tuple[str, str]] = []

    def mount(node: str, path: Path) -> None:
        cluster.run(["mount", "-t", "tmpfs", "none", str(path)], user="root", node=node, check=True)
        hidden.append((node, str(path)))

    yield mount
    for node, path in hidden:
        cluster.run(["umount", "--lazy", path], user="root", node=node, check=True)


def _seated(run: Run, world: int, *, round_index: int = 0, timeout: float = 40) -> None:
    run.wait_log(lambda log: log.count(f"of {world} round {round_index} in attempt 0") == world, timeout=timeout)


def _nodes(run: Run, attempt: int) -> list[str]:
    value = json.loads((run.root / f"attempt-{attempt:03d}" / "attempt.json").read_text())
    return list(value["nodes"])


def _wait_end(run: Run, attempt: int = 1, *, timeout: float = 90) -> None:
    result = run.root / f"attempt-{attempt:03d}" / "result.json"
    wait_until(result.exists, timeout=timeout, what=f"the end of attempt {attempt}")
    run.wait_log(lambda log: "; exit code 0" in log)


def test_a_lost_node_is_left_out_of_the_next_attempt_whose_delay_is_waived(
    cluster: SlurmCluster, runs: SlurmRuns, shown_output: ShownOutput
) -> None:
    arguments = ("submit", "--follow", "--nodes", "3", *SHORT, *QUICK, runs.script(STAYS))
    with cluster.popen(["hpc-elastic", *arguments], cwd=runs.folder) as follower:
        run = runs.newest()
        _lose_a_node_and_go_on(cluster, run)
        shown_output.check("bad-nodes", Session(output=run.log, folder=runs.folder))
        out, err = follower.communicate(timeout=120 * CROWDED)
    assert follower.returncode == 0, out + err
    assert _nodes(run, 1) == ["n1", "n2", "n4"]
    info = cluster.job_info(run.job)
    assert info["ExcNodeList"] == "n3"
    (bad,) = run.report(1)["bad_nodes"]
    assert (bad["node"], bad["excluded"]) == ("n3", True)


def _lose_a_node_and_go_on(cluster: SlurmCluster, run: Run) -> None:
    _seated(run, 3)
    assert _nodes(run, 0) == ["n1", "n2", "n3"]
    cluster.kill_node("n3")
    log = run.wait_log(lambda log: f"job {run.job} is requeued" in log, timeout=60)
    assert f"job {run.job} is requeued without n3 and may begin when this attempt is gone" in log
    assert re.search(r"Bad nodes: +n3 \(node n3 was lost\): left out of later attempts", log), log
    cluster.start_node("n3", wait=False)  # else the job waits until Slurm has found the node dead


def test_a_node_without_the_interpreter_is_named_with_what_it_said_and_left_out_of_the_next_attempt(
    cluster: SlurmCluster, runs: SlurmRuns, hide: Callable[[str, Path], None]
) -> None:
    assert cluster.environment is not None
    hide("n3", cluster.environment.bin)
    done = runs.submit_and_follow("--nodes", "3", *SHORT, runs.script(PRINTS))
    assert done.done is not None
    assert done.done.returncode == 0, done.done.stderr + done.log
    assert [_nodes(done, attempt) for attempt in (0, 1)] == [["n1", "n2", "n3"], ["n1", "n2", "n4"]]
    starts = [event for event in done.events(0) if event["event"] == "agent_ended" and event.get("name") == "n3"]
    assert [event["code"] for event in starts] == [127, 127], "a second start, in a step of its own, and no more"
    (given_up,) = [event for event in done.events(0) if event["event"] == "node_given_up"]
    assert (given_up["name"], given_up["cause"]) == ("n3", "could_not_run")
    assert re.fullmatch(r"exit code 127: hpc-elastic: 1: exec: .*python.*: not found", given_up["reason"])
    report = done.report(0)
    assert report["verdict"]["summary"] == f"node n3 could not run the agent: {given_up['reason']}"
    assert report["verdict"]["lost_node"]["host"] == "n3"
    assert [(node["node"], node["excluded"]) for node in report["bad_nodes"]] == [("n3", True)]


def test_a_range_goes_on_at_once_without_nodes_that_can_not_run_the_agent(
    cluster: SlurmCluster, runs: SlurmRuns, hide: Callable[[str, Path], None]
) -> None:
    """One whose TaskProlog fails, and one where the run directory is not mounted."""
    prolog = cluster.shared / "prolog.sh"
    prolog.write_text('#!/bin/sh\n[ "$(hostname)" != n3 ] || exit 3\n')
    prolog.chmod(0o755)
    cluster.reconfigure({"TaskProlog": str(prolog)})
    hide("n4", runs.folder)
    done = runs.submit_and_follow("--nodes", "2-4", *SHORT, *ALL_COME, runs.script(PRINTS))
    assert done.done is not None
    assert done.done.returncode == 0, done.done.stderr + done.log
    assert not (done.root / "attempt-001").exists()
    assert done.log.count("of 2 round 0 in attempt 0") == 2
    given_up = {event["name"]: event for event in done.events(0) if event["event"] == "node_given_up"}
    assert {name: event["cause"] for name, event in given_up.items()} == dict.fromkeys(("n3", "n4"), "could_not_run")
    assert given_up["n3"]["reason"] == "exit code 3: slurmstepd-n3: error: TaskProlog failed status=3"
    assert given_up["n4"]["reason"].startswith("exit code 2: n4: the run directory can't be read from this node: ")
    assert {node["node"] for node in done.report(0)["bad_nodes"]} == {"n3", "n4"}
    assert "did without  : node n3 could not run the agent: exit code 3: " in done.log


@pytest.mark.slow
def test_a_prolog_that_fails_on_one_node_is_the_reason(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """Slurm drains the node, requeues the job, and holds it: no attempt is spent on it until it is released."""
    prolog = cluster.shared / "prolog.sh"
    prolog.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != n2 ] || exit 3\n')
    prolog.chmod(0o755)
    cluster.reconfigure({"Prolog": str(prolog)})
    run = runs.submit("--nodes", "2", *SHORT, *QUICK, runs.script(PRINTS))
    cluster.wait_job(run.job, {"PENDING"}, timeout=60)
    wait_until(lambda: cluster.job_info(run.job)["Restarts"] == "1", timeout=60, what="the job is requeued")
    wait_until(lambda: (run.root / "attempt-000" / "result.json").exists(), timeout=60, what="the attempt's end")
    assert run.result()["reason"] == (
        "SIGTERM on n1 (requeue; Slurm: launch failed requeued held); n2: Job prolog failed"
    )
    assert f"held: scontrol release {run.job} lets it go on" in runs.hpc_elastic("status", run.job).stdout
    cluster.run(["scontrol", "release", run.job], user="root", node="ctl", check=True)
    _wait_end(run)
    assert "n2" not in _nodes(run, 1)


def test_after_a_shrink_the_whole_range_is_asked_for_again(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "2-4", "--bad-nodes", "off", *SHORT, *ALL_COME, runs.script(STAYS))
    _seated(run, 4)
    cluster.kill_node("n4")
    _seated(run, 3, round_index=1)
    # What Slurm does by itself after SlurmdTimeout, on most sites minutes.
    cluster.run(["scontrol", "update", "nodename=n4", "state=down", "reason=test"], user="root", node="ctl", check=True)
    wait_until(
        lambda: expand(cluster.job_info(run.job)["NodeList"]) == ("n1", "n2", "n3"),
        timeout=60,
        what="Slurm has taken n4 out of the job",
    )
    cluster.start_node("n4", wait=False)
    cluster.undrain("n4")
    cluster.wait_nodes_ready(["n4"])
    assert "asked to save" in runs.hpc_elastic("requeue", run.job).stdout
    _wait_end(run)
    assert _nodes(run, 1) == ["n1", "n2", "n3", "n4"]


def test_a_drained_spare_is_not_waited_for(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "3", "--spares", "1", "--max-restarts", "0", *SHORT, *QUICK, runs.script(STAYS))
    _seated(run, 3)
    cluster.drain("n2")
    (runs.folder / "die").touch()
    _wait_end(run)
    assert (_nodes(run, 0), _nodes(run, 1)) == (["n1", "n2", "n3", "n4"], ["n1", "n3", "n4"])
    assert "requeued with 3 to 4 nodes (n2 is drained or down)" in run.log


def test_the_delay_that_slurm_adds_is_waived(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """With the two minutes that it is on most sites; the rig has 11 s else."""
    cluster.reconfigure({"AuthInfo": f"cred_expire={SITE_DELAY}"}, restart=True)
    run = runs.submit("--nodes", "1", "--max-restarts", "0", *SHORT, runs.script(STAYS))
    _seated(run, 1)
    (runs.folder / "die").touch()
    _wait_end(run)
    times = [next(e["t"] for e in run.events(n) if e["event"] == name) / 1e9 for n, name in WAITED]
    print(f"the next attempt began {times[1] - times[0]:.1f} s after the end of the one before")
    assert times[1] - times[0] < SITE_DELAY / 2


def test_a_job_that_is_held_says_what_lets_it_go_on(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """By a person here; a launch that fails too often ends the same way."""
    argv = ["hpc-elastic", "submit", "--follow", "--nodes", "1", *SHORT, runs.script(STAYS)]
    with (
        (runs.folder / "follower").open("w") as said,
        cluster.popen(argv, cwd=runs.folder, stdout=subprocess.DEVNULL, stderr=said.fileno()) as follower,
    ):
        run = runs.newest()
        _seated(run, 1)
        cluster.run(["scontrol", "requeuehold", run.job], check=True)
        way_out = f"held: scontrol release {run.job} lets it go on"
        wait_until(lambda: way_out in (runs.folder / "follower").read_text(), timeout=90, what=way_out)
        assert way_out in runs.hpc_elastic("status", run.job).stdout
        assert cluster.job_state(run.job) == "PENDING"
        cluster.run(["scontrol", "release", run.job], check=True)
        follower.wait(timeout=120 * CROWDED)
    assert follower.returncode == 0, run.log
    assert run.result(0)["outcome"] == "preempted"
    assert cluster.job_info(run.job)["Restarts"] == "1"


def test_a_job_that_may_not_be_requeued_goes_on_in_a_follow_on_job(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    (runs.folder / "die").touch()
    done = runs.submit_and_follow(
        *("--nodes", "2", "--max-restarts", "0", "--sbatch-arg=--no-requeue", *SHORT, runs.script(STAYS))
    )
    assert done.done is not None
    assert done.done.returncode == 0, done.done.stderr + done.log
    assert "requeue enabled: yes, by a follow-on job: this job may not be requeued" in done.log
    (following,) = re.findall(rf"job (\d+) goes on when job {done.job} has ended", done.log)
    assert f"the run continues in job {following}" in done.done.stderr
    jobs = [json.loads((done.root / f"attempt-00{n}" / "attempt.json").read_text())["job_id"] for n in (0, 1)]
    assert jobs == [done.job, following]
    assert done.result(0)["next_job"] == following
    assert not (done.root / "attempt-002").exists()
    assert cluster.job_info(following)["JobState"] in ("COMPLETED", "COMPLETING")
    for job in jobs:
        assert "SUCCEEDED" in runs.hpc_elastic("report", job).stdout


def test_a_requeue_that_slurm_refuses_becomes_a_follow_on_job(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """The job may be requeued by all that could be asked beforehand, and its owner has no right to it all the same."""
    cluster.refuse_requeue()
    (runs.folder / "die").touch()
    done = runs.submit_and_follow("--nodes", "1", "--max-restarts", "0", *SHORT, runs.script(STAYS))
    assert done.done is not None
    assert done.done.returncode == 0, done.done.stderr + done.log
    assert "requeue enabled: yes\n" in done.log
    assert "submitting a follow-on job instead" in done.log
    (following,) = re.findall(rf"job (\d+) goes on when job {done.job} has ended", done.log)
    assert done.result(0)["next_job"] == following
    assert json.loads((done.root / "attempt-001" / "attempt.json").read_text())["job_id"] == following


def test_a_controller_that_is_down_loses_no_requeue(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "1", "--max-restarts", "0", *SHORT, runs.script(STAYS))
    _seated(run, 1)
    cluster.stop_slurmctld()
    (runs.folder / "die").touch()
    run.wait_log(lambda log: "trying again for up to" in log, timeout=90)
    assert run.result(0)["action"] == "requeue", "the verdict is on the disk before Slurm has heard of it"
    cluster.start_slurmctld()
    run.wait_log(lambda log: f"job {run.job} is requeued" in log, timeout=90)
    for line in ("Slurm's controller does not answer (", "trying again for up to", "Slurm's controller answers again"):
        assert run.log.count(line) == 1, run.log
    _wait_end(run)
    assert cluster.job_info(run.job)["Restarts"] == "1"
