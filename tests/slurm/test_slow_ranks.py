"""A slow rank of an unmodified DDP script on four nodes: by its compute, loader, shared CPU, or its node's network; and
a requeue without its node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.rigs.slowed_training import SCRIPT, paces, share_lost, slow_down
from tests.rigs.slurm_cluster import SlurmCluster
from tests.rigs.slurm_runs import ALL_COME, SlurmRuns

pytestmark = [pytest.mark.torch, pytest.mark.slow]
CPU = Path("/sys/fs/cgroup/cpu")
RANK, NODE = 5, "n3"
FIRST_OF_NODE = 4


@contextmanager
def throttled(cluster: SlurmCluster, rank: int) -> Iterator[None]:
    """Meanwhile the rank has a fortieth of a CPU, and shares the rest."""
    group = CPU / "hpc-elastic-slow-rank"
    if not (CPU / "cpu.cfs_quota_us").exists():
        pytest.skip("no cgroup (version 1) for cpu")
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text("40000")
    (group / "cpu.cfs_quota_us").write_text("1000")
    pids = [pid for pid, _ in cluster.node_pids(NODE) if f"RANK={rank}" in environ_of(pid)]
    assert pids
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for pid in group.joinpath("cgroup.procs").read_text().split():
            (CPU / "cgroup.procs").write_text(pid)
        group.rmdir()


def environ_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def slowed(cluster: SlurmCluster, how: str) -> AbstractContextManager[None]:
    if how == "cpu":
        return throttled(cluster, RANK)
    if how == "delay":
        return cluster.delayed_link(NODE, seconds=0.03)
    return cluster.disturbed_link(NODE, mbit=8) if how == "bandwidth" else nullcontext()


@pytest.mark.parametrize("how", ["compute", "loader", "cpu", "delay", "bandwidth"])
def test_a_slow_rank_is_named_with_what_it_costs(cluster: SlurmCluster, runs: SlurmRuns, how: str) -> None:
    each = ("--nodes", "4", "-t", "10", "--nproc-per-node", "2", *ALL_COME)
    run = runs.submit(*each, runs.script(SCRIPT))
    run.wait_log(lambda log: len(paces(log)) > 6, timeout=120)
    before = paces(run.log)[2:]
    with slowed(cluster, how):
        slow_down(runs.folder, how, [RANK])
        log = run.wait_log(lambda log: "after the others" in log, timeout=120)
        after = paces(log)[len(before) + 4 :]
        runs.folder.joinpath("end").touch()
        run.wait_log(lambda log: "; exit code 0" in log)
    found = [event["slow"] for event in run.events() if event["event"] == "slow_rank_found"]
    by_network = how in ("delay", "bandwidth")
    assert {(one["rank"], one["host"]) for one in found} == {(FIRST_OF_NODE if by_network else RANK, NODE)}
    lost = share_lost(before, after)
    if how == "cpu":  # gloo's own threads lack it, too: part of the cost is within the collective
        assert lost / 2 < found[0]["share"] < lost + 0.04
    else:
        assert found[0]["share"] == pytest.approx(lost, rel=0.2, abs=0.04)


def test_the_next_attempt_is_without_the_node_of_a_slow_rank(cluster: SlurmCluster, runs: SlurmRuns) -> None:
    each = ("--nodes", "3", "-t", "10", "--nproc-per-node", "1", "--max-restarts", "0", "--slow-ranks", "exclude")
    run = runs.submit(*each, *ALL_COME, runs.script(SCRIPT))
    run.wait_log(lambda log: len(paces(log)) > 6, timeout=120)
    slow_down(runs.folder, "compute", [2])
    log = run.wait_log(lambda log: "after the others" in log, timeout=120)
    host = re.findall(r"rank 2 on (n\d)", log)[0]
    cluster.kill_process("n1", r"train\.py", 9)
    run.wait_log(lambda log: f"is requeued without {host}" in log)
    runs.folder.joinpath("end").touch()
    run.wait_log(lambda log: "; exit code 0" in log, timeout=120)
    assert host not in run.training(attempt=1)[1]
