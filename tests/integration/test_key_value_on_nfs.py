"""The rendezvous, the handler and the key-value store where each node has an NFS mount with caches of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.key_value import KeyValueStore
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.rendezvous_handlers import HandlerRig
from tests.rigs.rendezvous_threads import ThreadNode, run_until
from tests.rigs.waiting import until

CACHES = {
    "3 s": MountSettings(attributes=3.0, directories=3.0),
    "3 s, times of 1 s": MountSettings(attributes=3.0, directories=3.0, granularity=1.0),
    "60 s": MountSettings(attributes=60.0, directories=60.0),
    "60 s, times of 1 s": MountSettings(attributes=60.0, directories=60.0, granularity=1.0),
    "3 s, an hour back": MountSettings(attributes=3.0, directories=3.0, clock_offset=-3600.0),
}


@pytest.mark.parametrize("caches", ["3 s", "3 s, times of 1 s"])
def test_no_change_is_lost_between_mounts(tmp_path: Path, caches: str) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    with NfsEmulator(tmp_path, mounts=2, settings=CACHES[caches]) as emulator, ThreadPoolExecutor(4) as pool:
        clock = SystemClock()
        stores = [
            KeyValueStore(FileStore(emulator.paths[number % 2] / "store", clock=clock), "kv", clock=clock)
            for number in range(4)
        ]

        def work(kv: KeyValueStore) -> tuple[list[int], bytes]:
            sums = [kv.add("count", 1) for _ in range(8)]
            kv.add("arrived", 1)
            if kv is stores[0]:
                kv.set("late", b"value")
            return sums, kv.get_waiting("late", 30)

        results = list(pool.map(work, stores))
        assert sorted(number for sums, _ in results for number in sums) == list(range(1, 33))
        assert {value for _, value in results} == {b"value"}
        until(lambda: [kv.get("arrived") for kv in stores] == [b"4"] * 4)


def test_handlers_on_mounts_of_their_own_meet_and_start_a_new_epoch(tmp_path: Path) -> None:
    with NfsEmulator(tmp_path, mounts=2) as emulator:
        rig = HandlerRig(emulator.paths[0])
        try:
            for _ in range(2):
                rig.folder = emulator.paths[0]
                one = rig.make(2, doorbell=False, timeout=40.0, reopen=True)
                rig.folder = emulator.paths[1]
                other = rig.make(2, doorbell=False, timeout=40.0, reopen=True)
                found = rig.meet(one, other)
                assert sorted(round_.rank for round_ in found) == [0, 1]
                assert {round_.version for round_ in found} == {0}
                found[0].store.set("key", b"value")
                assert found[1].store.get_waiting("key", 20) == b"value"
                one.shutdown(workers_done=True)
                other.shutdown(workers_done=True)
        finally:
            rig.end()
    assert len(list(tmp_path.glob("*/epoch-*"))) == 2


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
