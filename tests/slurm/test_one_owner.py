"""One run has one owner: what happens where Slurm has lost a node that lives, and its files stay readable."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest

from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import wait_until
from tests.rigs.slurm_runs import SHORT, Run, SlurmRuns

# Each worker appends a line every 0.1 s that it trains: which attempt, which node, when.
WRITES = """
import json, os, pathlib, time
attempt = os.environ["HPC_ELASTIC_ATTEMPT"]
with open("trained-" + attempt + "-" + os.environ["RANK"], "a", buffering=1) as lines:
    while not pathlib.Path("end-" + attempt).exists():
        lines.write(json.dumps({"node": os.uname().nodename, "at": time.time()}) + chr(10))
        time.sleep(0.1)
"""


@pytest.fixture
def runs(cluster: SlurmCluster) -> SlurmRuns:
    cluster.reconfigure({"SlurmdTimeout": 5})
    return SlurmRuns(cluster)


def _lines(run: Run, attempt: int) -> list[dict[str, float | str]]:
    """In the order of their times; each rank has a file of its own, since appends of several NFS clients get lost."""
    texts = [path.read_text() for path in run.runs.folder.glob(f"trained-{attempt}-*")]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: float(line["at"]))


def _trains(run: Run, attempt: int) -> Callable[[], bool]:
    return lambda: bool(_lines(run, attempt))


def _left(run: Run) -> list[str]:
    """Without Slurm's own commands, which try for a minute to reach the controller."""
    return [line for line in run.left_on_nodes() if not re.search(r": \d+ (srun|scontrol) ", line)]


@pytest.mark.parametrize("fault", ["link", pytest.param("munged", marks=pytest.mark.slow)])
def test_an_attempt_on_a_node_that_slurm_has_lost_ends_before_the_next_one_trains(
    cluster: SlurmCluster, runs: SlurmRuns, fault: str
) -> None:
    run = runs.submit("--nodes", "1", *SHORT, runs.script(WRITES))
    wait_until(_trains(run, 0), timeout=90, what="attempt 0 trains")
    lost = str(_lines(run, 0)[0]["node"])
    if fault == "munged":
        cluster.stop_munged(lost)
    else:
        cluster.cut_link(lost)
    wait_until(_trains(run, 1), timeout=120, what="attempt 1 trains")
    time.sleep(1)
    before, after = _lines(run, 0), _lines(run, 1)
    assert {line["node"] for line in after} != {lost}
    assert float(before[-1]["at"]) < float(after[0]["at"]), "two attempts trained at once"
    (runs.folder / "end-1").touch()
    assert run.wait_end() == "COMPLETED"
    assert run.result(0)["outcome"] == "superseded"
    assert run.result(1)["outcome"] == "succeeded"
    [event] = [event for event in run.events(1) if event["event"] == "attempt_superseded"]
    assert (event["superseded"], event["ended"], event["silent"]) == (0, [lost], [])
    assert f"attempt 0 has ended on {lost}" in run.log
    wait_until(lambda: _left(run) == [], timeout=60, what="no process of the run is left")


@pytest.mark.parametrize("fault", ["munged", pytest.param("link", marks=pytest.mark.slow)])
def test_the_end_of_a_run_whose_batch_host_slurm_has_given_up_is_finished_by_another_node(
    cluster: SlurmCluster, runs: SlurmRuns, fault: str
) -> None:
    run = runs.submit("--nodes", "2-3", *SHORT, runs.script(WRITES))
    wait_until(lambda: len({line["node"] for line in _lines(run, 0)}) == 3, timeout=90, what="three nodes train")
    batch_host = cluster.job_info(run.job)["BatchHost"]
    if fault == "munged":
        cluster.stop_munged(batch_host)
    else:
        cluster.cut_link(batch_host)
    wait_until(
        lambda: batch_host not in cluster.job_info(run.job)["NodeList"] and cluster.node_state(batch_host) == "down*",
        timeout=90,
        what="Slurm has given the batch host up",
    )
    (runs.folder / "end-0").touch()
    wait_until(lambda: (run.root / "attempt-000" / "result.json").exists(), timeout=90, what="the verdict")
    assert run.wait_end(timeout=60) in ("CANCELLED", "COMPLETED")
    assert run.result()["outcome"] == "succeeded"
    [taken] = [event for event in run.events() if event["event"] == "end_taken_over"]
    assert taken["host"] != batch_host
    wait_until(lambda: _left(run) == [], timeout=60, what="no process of the run is left")
