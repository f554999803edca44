"""``--checkpoint-dir`` on a real Slurm: the nodes of another attempt begin with what was committed."""

from __future__ import annotations

import re

import pytest

from tests.rigs.checkpoint_trainer import trainer
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import wait_until
from tests.rigs.slurm_runs import ALL_COME, SHORT, SlurmRuns


@pytest.mark.slow
def test_a_requeue_after_a_lost_node_continues_from_the_committed_step(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    cluster.reconfigure({"SlurmdTimeout": 5})
    options = ("--nodes", "3", "--checkpoint-dir", "saved", "--checkpoint-local", "/dev/shm:64M")
    run = runs.submit(*options, *ALL_COME, *SHORT, runs.script(trainer(pad=100_000)))

    def committed() -> list[int]:
        return [event["step"] for event in run.events() if event["event"] == "checkpoint_committed"]

    wait_until(lambda: len(committed()) > 1, timeout=90, what="committed steps")
    assert len(run.checkpoints_on_nodes(["n1", "n2", "n3"])) == 3
    cluster.kill_node("n2")
    run.wait_training({"n1", "n3", "n4"}, attempt=1, timeout=120)
    assert run.result()["outcome"] == "too_few_nodes"
    log = run.wait_log(lambda log: log.count("begins at step") == 6)
    ((step, place),) = set(re.findall(r"begins at step (\d+) from ([a-z ]+)", log)[3:])
    assert place == "shared"
    assert int(step) >= committed()[-1], "n2 may have committed one, and lost its event with its power"
    run.say_end()
    assert run.wait_end() == "COMPLETED"
    run.check_training(1)
    assert run.left_on_nodes() == []
    assert run.checkpoints_on_nodes(["n1", "n3", "n4"]) == []
    assert not [path for path in (runs.folder / "saved").iterdir() if path.name.startswith(".")]
