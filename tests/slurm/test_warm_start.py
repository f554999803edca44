"""Workers that are forks of each node's fork server, on a real Slurm, while a worker, an agent and a node are lost."""

from __future__ import annotations

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import ALL_COME, SHORT, SlurmRuns

WAITS = """
import os, pathlib, sys, time
rank, index = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "in round", index, "is a fork" if "decimal" in sys.modules else "is fresh")
while not pathlib.Path("end").exists():
    time.sleep(0.05)
    if pathlib.Path(f"die-{rank}-{index}").exists():
        os.kill(os.getpid(), 9)
"""


@pytest.mark.any_release
def test_a_lost_worker_a_lost_agent_and_a_lost_node_each_cost_a_fork(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    warm = ("--start-method", "forkserver", "--preload", "decimal")
    run = runs.submit("--nodes", "2-4", *ALL_COME, *SHORT, *warm, runs.script(WAITS))
    run.wait_log(lambda log: log.count("in round 0 is a fork") == 4)
    (runs.folder / "die-1-0").touch()
    run.wait_log(lambda log: log.count("in round 1 is a fork") == 4)
    run.kill_agent("n3")
    log = run.wait_log(lambda log: log.count("in round 2 is a fork") == 4)
    assert "round 2: role default" in log
    assert "1 of 3 restarts used" in log
    cluster.kill_node("n4")
    index, _ = run.wait_training(["n1", "n2", "n3"], after=2)
    run.wait_log(lambda log: log.count(f"in round {index} is a fork") == 3)
    run.say_end()
    log = run.wait_log(lambda log: "; exit code 0" in log)
    assert "is fresh" not in log
    assert {event["started_fresh"] for event in run.events() if event["event"] == "workers_started"} == {""}
    report = runs.hpc_elastic("report", run.job).stdout
    assert "SIGKILL" in report
    assert "node n4 was lost" in report
    assert run.left_on_nodes() == []
