"""One run has one owner: what happens where Slurm has lost a node that lives, and its files stay readable."""

from __future__ import annotations

import re

import pytest

from tests.rigs.folded_run import printed
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import wait_until
from tests.rigs.slurm_runs import ALL_COME, SHORT, Run, SlurmRuns


@pytest.fixture
def runs(cluster: SlurmCluster) -> SlurmRuns:
    cluster.reconfigure({"SlurmdTimeout": 5})
    return SlurmRuns(cluster)


def _steps(run: Run, attempt: int) -> list[float]:
    """When the attempt's ranks did their steps, by the machine's one clock."""
    texts = printed(run.root / f"attempt-{attempt:03d}")
    return sorted(float(at) for text in texts for at in re.findall(r"^step \d+ at (\d+\.\d+)$", text, re.M))


def _left(run: Run) -> list[str]:
    """Without Slurm's own commands, which try for a minute to reach the controller."""
    return [line for line in run.left_on_nodes() if not re.search(r": \d+ (srun|scontrol) ", line)]


def _left_on(run: Run, node: str) -> list[str]:
    return [line for line in _left(run) if line.startswith(node)]


@pytest.mark.parametrize("fault", ["link", pytest.param("munged", marks=pytest.mark.slow)])
def test_an_attempt_on_a_node_that_slurm_has_lost_ends_before_the_next_one_trains(
    cluster: SlurmCluster, runs: SlurmRuns, fault: str
) -> None:
    run = runs.submit("--nodes", "1", *SHORT, runs.trainer())
    run.wait_steps(1, beyond=10)
    (lost,) = run.training()[1]
    if fault == "munged":
        cluster.stop_munged(lost)
    else:
        cluster.cut_link(lost)
    wait_until(lambda: len(_steps(run, 1)) > 20, timeout=120, what="attempt 1 trains")
    assert set(run.training(1)[1]) != {lost}
    assert _steps(run, 0)[-1] < _steps(run, 1)[0], "two attempts trained at once"
    run.say_end()
    assert run.wait_end() == "COMPLETED"
    assert run.result(0)["outcome"] == "superseded"
    assert run.result(1)["outcome"] == "succeeded"
    run.check_training(1)
    [event] = [event for event in run.events(1) if event["event"] == "attempt_superseded"]
    assert event["text"] == f"attempt 0 was superseded; it has ended on {lost}"
    assert f"attempt 0 has ended on {lost}" in run.log
    wait_until(lambda: _left(run) == [], timeout=60, what="no process of the run is left")


COMMITS = """
import hpc_elastic, os, pathlib, time
attempt, step = os.environ["HPC_ELASTIC_ATTEMPT"], 0
while not os.path.exists("end"):
    step += 1
    hpc_elastic.heartbeat(step)
    print(f"step {step} at {time.time():.3f}", flush=True)
    pathlib.Path(f"part-{attempt}").write_text(attempt)
    time.sleep(0.05)
    hpc_elastic.commit(f"part-{attempt}", "checkpoint")
"""


@pytest.mark.slow
def test_a_node_that_thaws_beside_the_next_attempt_commits_nothing_and_makes_no_step(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    run = runs.submit("--nodes", "1", *SHORT, runs.script(COMMITS))
    run.wait_steps(1, beyond=10)
    (lost,) = run.training()[1]
    cluster.freeze_node(lost)
    wait_until(lambda: len(_steps(run, 1)) > 20, timeout=120, what="attempt 1 trains")
    cluster.thaw_node(lost)
    seen = []
    wait_until(
        lambda: (seen.append((runs.folder / "checkpoint").read_text()), _left_on(run, lost) == [])[1],
        timeout=60,
        what="the old attempt's processes are gone",
    )
    assert set(seen) == {"1"}
    assert len([at for at in _steps(run, 0) if at > _steps(run, 1)[0]]) <= 1, "one that was begun before"
    run.say_end()
    assert run.wait_end() == "COMPLETED"


@pytest.mark.parametrize("fault", ["munged", pytest.param("link", marks=pytest.mark.slow)])
def test_the_end_of_a_run_whose_batch_host_slurm_has_given_up_is_finished_by_another_node(
    cluster: SlurmCluster, runs: SlurmRuns, fault: str
) -> None:
    run = runs.submit("--nodes", "2-3", *ALL_COME, *SHORT, runs.trainer())
    run.wait_steps(3)
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
    run.say_end()
    wait_until(lambda: (run.root / "attempt-000" / "result.json").exists(), timeout=90, what="the verdict")
    assert run.wait_end(timeout=60) in ("CANCELLED", "COMPLETED")
    assert run.result()["outcome"] == "succeeded"
    run.check_training()
    [taken] = [event for event in run.events() if event["event"] == "end_taken_over"]
    assert taken["host"] != batch_host
    wait_until(lambda: _left(run) == [], timeout=60, what="no process of the run is left")
