"""Every way to lose a node, on a real Slurm that takes minutes to notice it: the others go on, and the job ends."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from tests.rigs.event_pairs import read_events
from tests.rigs.slurm_cluster import RigError, SlurmCluster
from tests.rigs.slurm_cluster.processes import wait_until
from tests.rigs.slurm_runs import ALL_COME, SHORT, Run, SlurmRuns

SITE_TIMEOUT = 300
"""SlurmdTimeout as sites have it: what happens within a test is not Slurm's doing."""


@pytest.fixture
def slow_to_notice(cluster: SlurmCluster) -> SlurmCluster:
    cluster.reconfigure({"SlurmdTimeout": SITE_TIMEOUT})
    return cluster


def _start(runs: SlurmRuns, *options: str, nodes: int = 4) -> Run:
    """A run that trains on the first `nodes` nodes, or on any so many."""
    all_come = () if "--rdzv-conf" in options else ALL_COME
    run = runs.submit(*options, *all_come, *SHORT, runs.trainer())
    wait_until(lambda: len(run.training()[1]) == nodes, timeout=90, what=f"{nodes} nodes train")
    run.wait_steps(nodes)
    return run


def _end(run: Run, *, timeout: float = 90) -> None:
    """End the training, and wait for the verdict: it has succeeded, with the right result."""
    run.say_end()
    wait_until(lambda: (run.root / "attempt-000" / "report.json").exists(), timeout=timeout, what="the run's report")
    assert run.result()["outcome"] == "succeeded", run.log
    run.check_training()


def _nothing_is_left(run: Run) -> None:
    wait_until(lambda: run.left_on_nodes() == [], timeout=90, what="no process of the run is left")


def _coordinator(run: Run) -> str:
    """The node that opened the newest round."""
    opened = [event for event in run.events() if event["event"] == "round_opened"]
    host: str = max(opened, key=lambda event: (event["round"], event["t"]))["host"]
    return host


def _failed(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == "worker_failed"]


def _workers(cluster: SlurmCluster, node: str) -> list[int]:
    return [
        pid
        for pid, command in cluster.node_pids(node, user="alice")
        if "train.py" in command and "batch" not in command
    ]


def test_two_nodes_with_batch_host_and_coordinator_are_lost_and_the_job_still_ends(
    slow_to_notice: SlurmCluster, runs: SlurmRuns
) -> None:
    cluster = slow_to_notice
    run = _start(runs, "--nodes", "2-4")
    other = _coordinator(run) if _coordinator(run) != "n1" else "n3"
    lost_at = time.time()
    cluster.kill_node("n1")
    cluster.kill_node(other)
    alive = set(cluster.node_names) - {"n1", other}
    index, ranks = run.wait_training(alive)
    assert sorted(rank for found in ranks.values() for rank in found) == [0, 1]
    run.check_in_time(index, lost_at, "two nodes lost their power")
    _end(run)
    run.check_losses("n1", other)
    # Slurm has not noticed yet, and holds the job; the others' part of the allocation is given back.
    for node in sorted(alive):
        cluster.wait_node(node, {"idle"}, timeout=90)
    assert "the supervisor on n1 did not finish the attempt" in run.log
    assert "SUCCEEDED" in run.log


@pytest.mark.parametrize(
    "lost", ["the batch host", "all processes of the user", pytest.param("the agent", marks=pytest.mark.slow)]
)
def test_a_loss_is_the_cause_and_free_though_others_fail_first(
    slow_to_notice: SlurmCluster, runs: SlurmRuns, lost: str
) -> None:
    """Their connections are closed with it, seconds before it is known to be lost."""
    cluster = slow_to_notice
    run = _start(runs, "--nodes", "2-4", "--max-restarts", "0")
    lost_at = time.time()
    node = "n1" if lost == "the batch host" else "n3"
    if lost == "the batch host":
        cluster.kill_node(node, silent=False)
        index, _ = run.wait_training({"n2", "n3", "n4"})
    elif lost == "the agent":
        run.kill_agent(node)
        index, _ = run.wait_training(cluster.node_names, after=0)
    else:
        for pid, _ in cluster.node_pids("n3", user="alice"):
            with contextlib.suppress(RigError):  # the guardian was faster
                cluster.kill_process("n3", pid)
        index, _ = run.wait_training(cluster.node_names, after=0)
    run.check_in_time(index, lost_at, f"{lost} was lost")
    _end(run)
    assert any("ConnectionError" in failure["fingerprint"] for failure in _failed(run)), "the others have failed"
    run.check_losses(node)


def test_where_all_nodes_are_needed_the_batch_hosts_death_requeues(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """By an agent: no supervisor is left, and no last call for what nobody could bring. Then with the node that was
    left, once Slurm knows."""
    cluster.reconfigure({"SlurmdTimeout": 5})
    run = _start(runs, "--nodes", "3", nodes=3)
    cluster.kill_node("n1")
    wait_until(lambda: (run.root / "attempt-000" / "result.json").exists(), timeout=90, what="the attempt's verdict")
    assert run.result()["outcome"] == "too_few_nodes"
    assert run.result()["action"] == "requeue"
    told = {event["event"]: event for event in read_events(run.root / "attempt-000" / "events")}
    assert "no supervisor answers" in told["closed"]["reason"]
    assert told["closed"]["t"] - told["node_lost"]["t"] < 25e9, "the last call is 30 s"
    run.wait_training({"n2", "n3", "n4"}, attempt=1, timeout=120)
    run.say_end()
    assert run.wait_end() == "COMPLETED"
    assert run.result(1)["outcome"] == "succeeded"
    run.check_training(1)
    run.check_losses("n1")
    _nothing_is_left(run)


def test_a_frozen_coordinator_is_left_behind_and_taken_in_when_it_thaws(
    slow_to_notice: SlurmCluster, runs: SlurmRuns
) -> None:
    cluster = slow_to_notice
    run = _start(runs, "--nodes", "2-4")
    node = _coordinator(run)
    (worker,) = _workers(cluster, node)
    lost_at = time.time()
    cluster.freeze_node(node)
    index, _ = run.wait_training(set(cluster.node_names) - {node})
    run.check_in_time(index, lost_at, "a kernel hung")
    assert _workers(cluster, node) == [worker]
    cluster.thaw_node(node)
    run.wait_training(cluster.node_names, after=index)
    assert worker not in _workers(cluster, node), "it was told that it is out"
    _end(run)
    run.wait_end()
    _nothing_is_left(run)


@pytest.mark.parametrize("cluster", ["emulated"], indirect=True)
def test_a_cut_off_node_learns_that_it_is_out(slow_to_notice: SlurmCluster, runs: SlurmRuns) -> None:
    """Its network is gone, and with it the filesystem; its workers go on meanwhile."""
    cluster = slow_to_notice
    run = _start(runs, "--nodes", "2-4")
    (worker,) = _workers(cluster, "n3")
    lost_at = time.time()
    cluster.cut_link("n3")
    cluster.tell_client("n3", "freeze")
    index, _ = run.wait_training({"n1", "n2", "n4"})
    run.check_in_time(index, lost_at, "a node was cut off")
    run.wait_log(lambda log: "Slurm and the run disagree: n3 lost to the run, and in the job by Slurm" in log)
    assert "differs  : n3 lost to the run" in runs.hpc_elastic("status", run.job).stdout
    cluster.tell_client("n3", "thaw")
    cluster.heal_link("n3")
    run.wait_training(cluster.node_names, after=index)
    assert worker not in _workers(cluster, "n3")
    _end(run)
    _nothing_is_left(run)


def test_a_node_whose_network_alone_is_cut_leaves_when_the_script_gives_up(
    slow_to_notice: SlurmCluster, runs: SlurmRuns
) -> None:
    """Its files answer, so it stays in until the script's own time-out; then it finds out why, and the others go on."""
    cluster = slow_to_notice
    run = runs.submit("--nodes", "2-4", *ALL_COME, *SHORT, runs.trainer(), "--timeout", "6")
    before, _ = run.wait_training(cluster.node_names)
    run.wait_steps(4)
    cluster.cut_link("n3")
    cut_at = time.time()
    index, _ = run.wait_training({"n1", "n2", "n4"}, after=before)
    print(f"a network was cut: workers run again after {run.seconds_to_train(index, cut_at):.1f} s")
    left = [event for event in run.events() if event["event"] == "node_left"]
    assert {cluster.node_names[event["node"]] for event in left} == {"n3"}
    assert "health check failed: the network has no link (eth0)" in left[0]["reason"]
    cluster.heal_link("n3")
    _end(run)
    run.wait_end()
    _nothing_is_left(run)
    assert "node n3 left: health check failed: the network has no link" in run.log


@pytest.mark.parametrize(("nodes", "silent"), [("2-4", True), ("4", False)], ids=["unheard", "all-are-needed"])
def test_a_node_that_reboots_before_slurm_has_missed_it_comes_back(
    slow_to_notice: SlurmCluster, runs: SlurmRuns, nodes: str, silent: bool
) -> None:
    cluster = slow_to_notice
    run = _start(runs, "--nodes", nodes, "--max-restarts", "0")
    cluster.kill_node("n3", silent=silent)
    cluster.start_node("n3", wait=False)
    run.wait_training(cluster.node_names, after=0)
    _end(run)
    assert run.wait_end() == "COMPLETED"
    run.check_losses(*(cluster.node_names if silent else ["n3"]))  # silent: srun ends all agents when it is back


def test_a_node_that_slurm_gives_up_or_drains_breaks_nothing(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """Its slurmd is gone; what runs there does not know, until Slurm takes the node out of the job."""
    cluster.reconfigure({"SlurmdTimeout": 5})
    run = _start(runs, "--nodes", "2-4")
    cluster.drain("n4")
    cluster.stop_slurmd("n3")
    wait_until(lambda: cluster.job_info(run.job)["NodeList"] == "n[1-2,4]", timeout=90, what="Slurm has given n3 up")
    cluster.start_node("n3", wait=False)
    _end(run)
    run.wait_end()
    _nothing_is_left(run)


def test_segments_leave_together(slow_to_notice: SlurmCluster, runs: SlurmRuns) -> None:
    cluster = slow_to_notice
    run = _start(runs, "--nodes", "2-4", "--segment", "2")
    cluster.kill_node("n4")
    index, ranks = run.wait_training({"n1", "n2"})
    assert ranks == {"n1": [0], "n2": [1]}
    # Its other half waits for it, and is of use again when it is back.
    wait_until(lambda: _workers(cluster, "n3") == [], timeout=60, what="the other half is at rest")
    cluster.start_node("n4", wait=False)
    _, ranks = run.wait_training(cluster.node_names, after=index)
    assert {frozenset(ranks["n3"]), frozenset(ranks["n4"])} == {frozenset({2}), frozenset({3})}
    _end(run)
    # Not from the job log: an srun that the reboot ends takes the last lines along.
    assert any(
        "(the rest of a segment)" in event["reason"] for event in run.events() if event["event"] == "round_frozen"
    )


def test_a_spare_takes_the_place_of_a_node_that_fails_its_health_check(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """/tmp is each node's own."""
    check = runs.folder / "check.sh"
    check.write_text("#!/bin/sh\ntest ! -e /tmp/broken || { echo the fan is broken; exit 1; }\n")
    check.chmod(0o755)
    run = runs.submit("--nodes", "3", "--spares", "1", "--health-check", str(check), *SHORT, runs.trainer())
    run.wait_steps(3)
    index, before = run.training()
    (spare,) = set(cluster.node_names) - set(before)
    run.wait_log(lambda log: f"{spare} waits as a spare" in log)
    broken = max(before)
    assert cluster.run(["touch", "/tmp/broken"], node=broken).returncode == 0
    cluster.kill_process(broken, min(_workers(cluster, broken)))
    after, ranks = run.wait_training({spare, *before} - {broken}, after=index)
    assert after == index + 1
    assert ranks == {**{node: here for node, here in before.items() if node != broken}, spare: before[broken]}
    _end(run)
    log = run.wait_log(lambda log: "; exit code 0" in log)
    assert f"{spare} took the place of {broken}" in log
    assert f"node {broken} left: health check failed: {check} ended with exit code 1" in log


@pytest.mark.slow
def test_a_batch_host_that_slurm_gives_up_while_its_files_answer_is_left_behind(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    """It coordinates. Its supervisor can't ask Slurm, and its workers hold the others up until the script's own
    time-out of 120 s: the first of the other nodes asks, and it alone."""
    cluster.reconfigure({"SlurmdTimeout": 5})
    run = _start(runs, "--nodes", "2-4", "--max-restarts", "0")
    assert _coordinator(run) == "n1"
    cluster.cut_link("n1")
    wait_until(lambda: cluster.job_info(run.job)["NodeList"] == "n[2-4]", timeout=90, what="Slurm has given n1 up")
    given_up_at = time.time()
    index, _ = run.wait_training({"n2", "n3", "n4"}, after=0)
    run.check_in_time(index, given_up_at, "the batch host was given up")
    _end(run)
    run.check_losses("n1")
    assert [event["host"] for event in run.events() if event["event"] == "node_given_up"] == ["n2"]


@pytest.mark.slow
def test_a_job_that_is_stopped_and_goes_on_has_lost_nothing(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    """``scancel -s STOP``, for longer than a node may be silent."""
    run = _start(runs, "--nodes", "2-4", "--max-restarts", "0")
    cluster.run(["scancel", "-s", "STOP", run.job], user="alice")
    time.sleep(15)
    cluster.run(["scancel", "-s", "CONT", run.job], user="alice")
    step = max(int(line.split()[2]) for line in run.log.splitlines() if "] step " in line)
    run.wait_steps(4, beyond=step)
    _end(run)
    assert run.training()[0] == 0, "it is the first round still"
    assert _failed(run) == []


SAVES_WHEN_TOLD = """
import os, sys, time
import hpc_elastic
attempt, rank = os.environ["HPC_ELASTIC_ATTEMPT"], os.environ["RANK"]
for step in range(100_000):
    time.sleep(0.05)
    if step == 20:
        print("trains in attempt", attempt)
    if attempt == "0" and hpc_elastic.should_checkpoint(step):
        print("saves")
        time.sleep(600 if rank == "2" else 0)
        sys.exit(0)
    if attempt == "1" and step == 20:
        sys.exit(0)
"""


@pytest.mark.slow
def test_a_node_that_crashes_while_it_saves_under_a_notice_keeps_nobody_waiting(
    slow_to_notice: SlurmCluster, runs: SlurmRuns
) -> None:
    """srun would wait for its task until Slurm misses the node; the supervisor does not."""
    cluster = slow_to_notice
    run = runs.submit("--nodes", "3", *SHORT, runs.script(SAVES_WHEN_TOLD))
    run.wait_log(lambda log: log.count("trains in attempt 0") == 3)
    (last,) = (node for node, ranks in run.training()[1].items() if ranks == [2])
    assert runs.hpc_elastic("requeue", run.job).returncode == 0
    run.wait_log(lambda log: log.count("saves") == 3)
    cluster.kill_node(last)
    crashed_at = time.time()
    wait_until(lambda: (run.root / "attempt-000" / "result.json").exists(), timeout=90, what="the attempt's end")
    took = time.time() - crashed_at
    closed = next(event["t"] for event in run.events() if event["event"] == "closed") / 1e9 - crashed_at
    print(f"a node crashed in its save: the run was closed after {closed:.1f} s, the attempt ended after {took:.1f} s")
    assert took - closed < 20, "the grace and 15 s were 45 s"
    assert (run.result()["outcome"], run.result()["action"]) == ("preempted", "requeue")
