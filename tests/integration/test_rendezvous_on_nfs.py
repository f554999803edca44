"""The rendezvous where each node has an NFS mount of its own: real clocks, real caches, no notifier."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.rendezvous_threads import ThreadNode, run_until

NODES = 4
SETTINGS = RendezvousSettings(
    min_nodes=2,
    max_nodes=NODES,
    expected_nodes=NODES,
    last_call_timeout=5.0,
    heartbeat_interval=0.5,
    heartbeat_ttl=3.0,
    poll_interval=0.2,
    doorbell=False,
)


def settled(nodes: list[ThreadNode], members: set[int]) -> bool:
    finals = [node.final for node in nodes]
    return len({final and final.round for final in finals}) == 1 and all(
        final is not None and {member.node for member in final.members} == members for final in finals
    )


@contextmanager
def nodes_on(emulator: NfsEmulator) -> Iterator[list[ThreadNode]]:
    nodes = [ThreadNode(index, path, SETTINGS) for index, path in enumerate(emulator.paths)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.stop()


CACHES = {
    "3 s": MountSettings(attributes=3.0, directories=3.0),
    "60 s": MountSettings(attributes=60.0, directories=60.0),
    "60 s, times of 1 s": MountSettings(attributes=60.0, directories=60.0, granularity=1.0),
    "3 s, an hour back": MountSettings(attributes=3.0, directories=3.0, clock_offset=-3600.0),
}


@pytest.mark.parametrize(
    ("caches", "lost"),
    [("3 s", 0), ("60 s", 2), ("60 s, times of 1 s", 0), ("3 s, an hour back", 0)],
)
def test_nodes_meet_and_go_on_without_one_that_stopped(tmp_path: Path, caches: str, lost: int) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    with NfsEmulator(tmp_path, mounts=NODES, settings=CACHES[caches]) as emulator, nodes_on(emulator) as nodes:
        met = run_until(nodes, lambda: settled(nodes, {0, 1, 2, 3}), seconds=90)
        nodes[lost].stop()
        left = [node for node in nodes if node.index != lost]
        shrunk = run_until(left, lambda: settled(left, {0, 1, 2, 3} - {lost}), seconds=90)
        assert left[0].final is not None
        assert left[0].final.round == 1, "nobody else was taken for lost"
        print(f"caches of {caches}: met in {met:.1f} s, shrunk in {shrunk:.1f} s")


def test_a_frozen_server_costs_nobody_a_place(tmp_path: Path) -> None:
    """All have seen nothing for twice the lease's time: nobody is taken for lost, and the coordinator stays."""
    (tmp_path / "store").mkdir(mode=0o700)
    with NfsEmulator(tmp_path, mounts=NODES) as emulator, nodes_on(emulator) as nodes:
        run_until(nodes, lambda: settled(nodes, {0, 1, 2, 3}), seconds=90)
        before = nodes[0].final
        emulator.freeze()
        time.sleep(2 * SETTINGS.heartbeat_ttl)  # the freeze's length is what this is about
        through: set[int] = set()
        for node in nodes:
            node.coordination.ask(lambda _, index=node.index: through.add(index))  # type: ignore[misc]
        time.sleep(0.5)
        assert through == set(), "nobody has got through"
        emulator.thaw()
        run_until(nodes, lambda: len(through) == NODES, seconds=90)
        until = time.monotonic() + 1.5 * SETTINGS.heartbeat_ttl  # long enough to take somebody for lost
        run_until(nodes, lambda: time.monotonic() > until, seconds=90)
        assert [node.final for node in nodes] == [before] * NODES


@pytest.mark.parametrize("operation", ["symlink", "write", "mkdir"])
def test_nodes_meet_though_replies_are_lost(tmp_path: Path, operation: str) -> None:
    """Of each client the first three of a kind: done, and told as failed."""
    (tmp_path / "store").mkdir(mode=0o700)  # by the launcher, before any agent starts
    with NfsEmulator(tmp_path, mounts=NODES) as emulator:
        emulator.fail("EIO", operation, done=True, times=3)
        with nodes_on(emulator) as nodes:
            run_until(nodes, lambda: settled(nodes, {0, 1, 2, 3}), seconds=90)
