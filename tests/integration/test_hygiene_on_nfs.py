"""Removing what is old on NFS: folders go, other clients stand it, and what somebody has open becomes .nfsXXXX."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.rendezvous.claims import SWEEP_SECONDS, ClaimKind, Sweep, claim_key, read_claims
from hpc_elastic.rendezvous.handler_config import HandlerConfig, RunFolder, remove_epoch
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.rendezvous.succession import close_run
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.key_value import KeyValueStore
from tests.rigs.fake_clock import FakeClock
from tests.rigs.nfs_emulator import NfsEmulator

ROUNDS = 40
MINE, OTHERS = "00000-a-1-a", "00001-b-1-b"


class NoPeers:
    def announce(self) -> None:
        pass


def final(index: int) -> RoundRecord:
    return RoundRecord(number=index + 1, epoch="e", term=1, leader=MINE, round=index, status=Status.FINAL)


def test_old_rounds_go_with_their_folders_while_another_client_writes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with NfsEmulator(tmp_path, mounts=2) as emulator:
        here, there = (FileStore(path / "store", clock=SystemClock()) for path in emulator.paths)
        claimed: deque[str] = deque()
        sweep = Sweep(here, MINE, NoPeers(), claimed, observes=False, now=0.0)  # type: ignore[arg-type]
        for index in range(ROUNDS):
            for store, uid in ((here, MINE), (there, OTHERS)):
                for kind in (ClaimKind.JOIN, ClaimKind.ACK):
                    assert store.put_if_absent(claim_key(index, kind, uid), "x")
                KeyValueStore(store, f"kv/{index:06d}", clock=SystemClock()).set(uid, b"v")
            assert read_claims(there, index) == {"join": [MINE, OTHERS], "ack": [MINE, OTHERS]}
            claimed.extend(claim_key(index, kind, MINE) for kind in (ClaimKind.JOIN, ClaimKind.ACK))
            sweep.step(final(index), joined=frozenset(), now=index * SWEEP_SECONDS)
        for turn in range(30):
            sweep.step(final(ROUNDS - 1), joined=frozenset(), now=(ROUNDS + turn) * SWEEP_SECONDS)
        server = tmp_path / "store"
        assert sorted(os.listdir(server / "round")) == [f"{ROUNDS - 2:06d}", f"{ROUNDS - 1:06d}"]
        assert len(os.listdir(server / "kv")) == 9
        # One that slept finds nothing, and can still write what it had begun.
        assert read_claims(there, 0) == {}
        assert there.put_if_absent(claim_key(3, ClaimKind.DONE, OTHERS), "x")
        slept = KeyValueStore(there, "kv/000001", clock=SystemClock())
        assert slept.get(MINE) is None
        slept.set("late", b"word")
        for turn in range(30):
            sweep.step(final(ROUNDS - 1), joined=frozenset(), now=(2 * ROUNDS + turn) * SWEEP_SECONDS)
        assert sorted(os.listdir(server / "round")) == [f"{ROUNDS - 2:06d}", f"{ROUNDS - 1:06d}"]
        assert len(os.listdir(server / "kv")) == 9


def test_an_epoch_with_an_open_file_goes_once_that_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    never = threading.Event()
    with NfsEmulator(tmp_path, mounts=1) as emulator:
        folder = RunFolder(
            HandlerConfig(directory=str(emulator.paths[0]), run_id="x", min_nodes=1, max_nodes=1, reopen=True),
            SystemClock(),
        )
        store = folder.enter(1)
        store.overwrite("hb/a", "1 x")
        close_run(store, "x", Outcome.SUCCEEDED, "done")
        assert folder.current_epoch() == 2
        path = folder.epoch_path(1)
        with open(f"{path}/hb/a"):
            assert not remove_epoch(path, clock=FakeClock(), stop=never)
            (silly,) = os.listdir(f"{path}/hb")
            assert silly.startswith(".nfs")
            assert store.list("hb") == []
        assert remove_epoch(path, clock=FakeClock(), stop=never)
        assert not os.path.exists(path)
