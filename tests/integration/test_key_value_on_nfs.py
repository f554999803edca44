"""The key-value store and the handler where each process has an NFS mount with caches of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.key_value import KeyValueStore
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
from tests.rigs.rendezvous_handlers import HandlerRig
from tests.rigs.waiting import until

CACHES = {
    "3 s": MountSettings(),
    "3 s, times in whole seconds": MountSettings(granularity=1.0),
}


@pytest.mark.parametrize("caches", CACHES)
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
