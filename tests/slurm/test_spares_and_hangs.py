"""Spares that take lost nodes' places, and a worker that hangs, on a real Slurm of four nodes."""

from __future__ import annotations

import re

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import ALL_COME, SlurmRuns

SHORT = ("-t", "10", "--nproc-per-node", "2")

# Rank 3 never comes out of its section; the others wait for it a step further, as in a collective.
ONE_HANGS = """
import os, pathlib, threading, time
import hpc_elastic

def wait_in_a_collective():
    time.sleep(600)

def read_the_batch():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
waiting = pathlib.Path("waiting")
threading.Thread(target=time.sleep, args=(600,), name="loader", daemon=True).start()
for step in range(4):
    hpc_elastic.heartbeat(step=step)
if first and rank == 3:
    # How long the others' start takes is nobody's to say.
    while len(list(pathlib.Path().glob("waits-*"))) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.05)
    with hpc_elastic.section("load"):
        read_the_batch()
hpc_elastic.heartbeat(step=4)
if first:
    pathlib.Path(f"waits-{rank}").touch()
    wait_in_a_collective()
print("rank", rank, "trained in round", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@pytest.mark.any_release
def test_a_spare_takes_a_lost_nodes_ranks_and_without_one_the_run_shrinks(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    # The first round waits for all four, so it has the first three, in Slurm's order.
    run = runs.submit("--nodes", "2-3", "--spares", "1", "--max-restarts", "0", *ALL_COME, *SHORT, runs.trainer())
    assert run.wait_training(["n1", "n2", "n3"]) == (0, {"n1": [0, 1], "n2": [2, 3], "n3": [4, 5]})
    run.wait_steps(6)
    assert cluster.job_info(run.job)["NumNodes"] == "4"
    run.wait_log(lambda log: "n4 waits as a spare" in log)
    cluster.kill_node("n2")
    # One round, and nobody who lives has moved.
    assert run.wait_training(["n1", "n4", "n3"]) == (1, {"n1": [0, 1], "n4": [2, 3], "n3": [4, 5]})
    cluster.kill_node("n4", silent=False)
    assert run.wait_training(["n1", "n3"]) == (2, {"n1": [0, 1], "n3": [2, 3]})
    run.say_end()
    log = run.wait_log(lambda log: "; exit code 0" in log)
    assert "n4 took the place of n2" in log
    rounds = re.findall(r"^ +round (\d): (\d) nodes, (\d) workers,.*: (.*?)(?: \(\+\d more\))?$", run.log, re.M)
    assert rounds == [
        ("0", "3", "6", "node n2 was lost"),
        ("1", "3", "6", "node n4 was lost"),
        ("2", "2", "4", "all workers ended with 0"),
    ]
    run.check_training()
    run.check_losses("n2", "n4")


@pytest.mark.any_release
def test_a_node_lost_with_the_only_spare_requeues_where_all_are_needed(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    quick = ("--rdzv-conf", "last_call_timeout=2")
    run = runs.submit("--nodes", "3", "--spares", "1", "--max-restarts", "0", *quick, *SHORT, runs.trainer())
    run.wait_steps(6)
    seated = set(run.training()[1])
    assert cluster.job_info(run.job)["NumNodes"] == "4"
    # The spare is whoever came last. Two die, it and a member; the batch host stays.
    member = max(seated)
    for node in sorted({"n2", "n3", "n4"} - {min(seated - {"n1"})}):
        cluster.kill_node(node, silent=False)
    log = run.wait_log(lambda log: f"job {run.job} is requeued" in log)
    assert "round 1: role" not in log, "no round without as many nodes as were asked for"
    closed, ended = (
        next(event["t"] for event in run.events() if event["event"] == name) for name in ("closed", "attempt_ended")
    )
    # Who waits for a node that says nothing does so for the workers' grace of 30 s and 15 s more.
    assert (ended - closed) / 1e9 < 40.0, "nobody waits for the goodbye of a spare that is dead"
    result = run.result()
    assert result["outcome"] == "too_few_nodes"
    assert member in result["reason"]
    assert run.report()["verdict"]["cause"] == "node"
    cluster.run(["scancel", run.job])


def test_a_hang_is_told_with_all_nodes_stacks_and_the_run_starts_again(runs: SlurmRuns) -> None:
    run = runs.submit_and_follow("--nodes", "3", *SHORT, "--section-timeouts", "step:60,load:2", runs.script(ONE_HANGS))
    assert run.done is not None
    assert run.done.returncode == 0, run.log
    assert sorted(re.findall(r"rank (\d) trained in round (\d)", run.log)) == [(str(rank), "1") for rank in range(6)]
    cause = run.report()["verdict"]["failure"]
    assert (cause["global_rank"], cause["host"], cause["failure_class"]) == (3, "n2", "hang")
    # The job log has it all: who, where in the script, and where all the others were.
    report = run.log.partition("Root Cause (first observed failure)")
    assert "in section 'load' at step 3" in report[2]
    assert "in read_the_batch" in report[2]
    assert "rank 3: " in run.log
    assert "ranks 0-2,4-5: wait_in_a_collective" in run.log
