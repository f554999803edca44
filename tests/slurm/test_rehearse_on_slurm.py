"""``rehearse --cluster slurm`` on a real Slurm: faults by the means of a job's owner, the same judge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.test_rehearse import TRAIN
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_cluster.processes import CROWDED
from tests.rigs.slurm_runs import ALL_COME, SHORT, SlurmRuns


def rehearse(
    runs: SlurmRuns, flaw: str, faults: str, *more: str, steps: int, script: str = TRAIN
) -> tuple[int, dict[str, Any]]:
    runs.script(script)
    options = ("--cluster", "slurm", "--nodes", "2", *SHORT, *ALL_COME, "--faults", faults, *more)
    done = runs.hpc_elastic("rehearse", "--json", *options, "train.py", flaw, str(steps), timeout=400 * CROWDED)
    assert done.stdout.startswith("{"), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_a_right_script_holds_through_what_a_jobs_owner_can_do_to_it(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    faults = ("kill-worker", "kill-saving", "notice", "exception", "kill-node")
    code, found = rehearse(runs, "right", ",".join(faults), steps=300)
    assert (code, found["guilty"]) == (0, []), found
    assert found["not_done"] == []
    assert {one["fault"] for one in found["faults"]} == set(faults)
    for one in found["faults"]:
        assert one["resumed"] is not None, one
        assert one["seconds"] is not None, one
    assert {one["hit"].partition(" on ")[2] for one in found["faults"] if one["fault"] == "kill-worker"} <= {
        *cluster.node_names
    }
    assert {one["used_notice"] for one in found["faults"] if one["fault"] == "notice"} == {True}
    assert found["losses"]["compared"] > 500
    assert cluster.run(["squeue", "--noheader"], user="root").stdout.strip() == ""


def test_a_script_that_is_killed_while_it_saves_in_place_is_found_guilty(
    cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    code, found = rehearse(runs, "in-place", "kill-saving", steps=100)
    assert code == 1, found
    assert "did_not_go_on" in {one["of"] for one in found["guilty"]}
    (one,) = found["faults"]
    assert one["hit"].startswith("while part-"), one
    assert cluster.run(["squeue", "--noheader"], user="root").stdout.strip() == "", "its job is cancelled"


PATIENT = """
def save(state):
    try:
        replace(PATH, json.dumps(state))
    except OSError as error:
        print("not saved:", error)
"""
CLEANS_UP_AND_TRIES_AGAIN = """
OLD = f"old-{RANK}"
open(OLD, "w").write("x" * 1000000)


def save(state):
    try:
        save_in_place(state)
    except OSError:
        os.remove(OLD)  # on a disk that others fill this gives no room
        time.sleep(1)
        save_in_place(state)


def save_in_place(state):
    with open(PATH, "w") as file:
        time.sleep(0.1)
        json.dump(state, file)
"""


@pytest.mark.parametrize(
    ("save", "guilt"), [(PATIENT, set()), (CLEANS_UP_AND_TRIES_AGAIN, {"did_not_go_on"})], ids=["patient", "in place"]
)
def test_a_full_disk_of_the_runs_spoils_a_checkpoint_that_is_saved_in_place(
    save: str, guilt: set[str], cluster: SlurmCluster, runs: SlurmRuns
) -> None:
    head, begin, rest = TRAIN.partition("state = {")
    with cluster.small_filesystem(mib=48) as small:
        options = ("--runs-dir", str(small / "runs"))
        code, found = rehearse(runs, "right", "disk-full", *options, steps=100, script=head + save + begin + rest)
        assert list(small.rglob(".rehearsal-*")) == []
    assert (code, {one["of"] for one in found["guilty"]}) == (len(guilt), guilt), found
    assert ([one["fault"] for one in found["faults"]], found["not_done"]) == (["disk-full"], [])
    if not guilt:
        assert found["faults"][0]["resumed"] is None, "it trained on"
        assert found["losses"]["compared"] == 2 * 100, "the journals have the steps that were done meanwhile"
