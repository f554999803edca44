"""Setup, `--after` and notices in a real Slurm job: also where an agent is killed."""

from __future__ import annotations

import json

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import ALL_COME, SHORT, SlurmRuns

TRAINS = """
import os, pathlib, time
print("rank", os.environ["RANK"], "in round", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ.get("BY_SETUP"))
while not pathlib.Path("end").exists():
    time.sleep(0.05)
"""


@pytest.mark.any_release
def test_setup_after_and_notices_while_an_agent_is_killed(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    for name in ("after", "notices"):
        (runs.folder / name).touch(mode=0o666)
        (runs.folder / name).chmod(0o666)
    options = [
        *("--setup", "export BY_SETUP=set-up"),
        *("--after", 'echo "$HPC_ELASTIC_OUTCOME $HPC_ELASTIC_EXIT_CODE" >> after'),
        *("--notify", "cat >> notices"),
    ]
    run = runs.submit("--nodes", "2", *ALL_COME, *SHORT, *options, runs.script(TRAINS))
    run.wait_log(lambda log: log.count("in round 0 set-up") == 2)
    run.kill_agent("n2")
    run.wait_log(lambda log: log.count("in round 1 set-up") == 2)
    run.say_end()
    run.wait_log(lambda log: "; exit code 0" in log)
    assert run.wait_end() == "COMPLETED"
    assert (runs.folder / "after").read_text().split() == ["succeeded", "0"]
    notices = [json.loads(line) for line in (runs.folder / "notices").read_text().splitlines()]
    assert [(one["event"], one["job_id"]) for one in notices] == [("failure", run.job), ("end", run.job)]
    assert run.left_on_nodes() == []


@pytest.mark.any_release
def test_a_setup_that_fails_is_the_jobs_failure_and_no_nodes(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    run = runs.submit("--nodes", "2", *SHORT, "--setup", "echo no licence; exit 3", runs.script(TRAINS))
    log = run.wait_log(lambda log: "; exit code 93" in log)
    assert "--setup failed: exit code 3: no licence" in log
    assert "each of the 2 agents refused to start the workers; no node is to blame" in log
