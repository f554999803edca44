"""The rendezvous where each node has an NFS mount of its own: real clocks, real caches, no notifier."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.peers import NodeInfo
from hpc_elastic.rendezvous.state import RoundRecord, Status, new_uid
from hpc_elastic.run.event_types import RunEvent
from hpc_elastic.store.file_store import FileStore
from tests.rigs.event_pairs import pair_of
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator, require_fuse
from tests.rigs.rendezvous_world import settle_always_restarting

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


class Node:
    """A stand-in for an agent: a thread that drives one participant on one mount."""

    def __init__(self, index: int, mount: Path, *, settings: RendezvousSettings) -> None:
        clock = SystemClock()
        self.index = index
        self.info = NodeInfo(
            uid=new_uid(index, f"n{index}", clock),
            node=index,
            host=f"n{index}",
            local_world_size=1,
            addresses=(),
            port=0,
        )
        self.newest: RoundRecord | None = None
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.faults: list[str] = []
        self.error: BaseException | None = None
        self.slowest_step = 0.0
        self._running_round: int | None = None
        self._stop = threading.Event()
        self._mount = mount
        self._settings = settings
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=f"node {index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._participant = Participant(
                run_id="nfs",
                store=FileStore(self._mount / "store", clock=self._clock, stop=self._stop),
                info=self.info,
                settings=self._settings,
                decide_restart=settle_always_restarting,
                clock=self._clock,
                rng=random.Random(self.index),
                listener=self,
            )
            self._participant.join()
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    delay = self._participant.step()
                except OSError as error:
                    self.faults.append(repr(error))
                    delay = 0.1
                self.slowest_step = max(self.slowest_step, time.monotonic() - began)
                self._stop.wait(delay)
        except BaseException as error:
            self.error = error

    def on_record(self, record: RoundRecord) -> None:
        self.newest = record
        member = record.member(self.info.uid)
        if record.status is Status.FROZEN and member is not None:
            first = record.members[0].uid == self.info.uid
            self._participant.claims.confirm(record.round, f"n{self.index}:1" if first else "")
        elif record.status is Status.FINAL and member is not None:
            self._running_round = record.round
        elif self._running_round is not None and record.round > self._running_round:
            self._running_round = None
            self._participant.join()

    def on_event(self, event: RunEvent) -> None:
        self.events.append(pair_of(event))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


def settled(nodes: list[Node], members: set[int], *, after: int = -1) -> bool:
    """Whether all nodes see the same final round of exactly these members."""
    records = [node.newest for node in nodes]
    return all(
        record is not None
        and record.status is Status.FINAL
        and record.round > after
        and {member.node for member in record.members} == members
        for record in records
    )


def wait_for(nodes: list[Node], condition: Callable[[], bool], *, seconds: float) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        for node in nodes:
            assert node.error is None, node.error
        seen = [(n.index, n.newest and (n.newest.number, n.newest.round, n.newest.status.value)) for n in nodes]
        assert time.monotonic() - began < seconds, (seen, [n.faults[-3:] for n in nodes])
        time.sleep(0.02)
    return time.monotonic() - began


@contextmanager
def nodes_on(
    emulator: NfsEmulator, *, settings: RendezvousSettings = SETTINGS, count: int = NODES
) -> Iterator[list[Node]]:
    found: list[Node] = []
    try:
        for index in range(count):
            found.append(Node(index, emulator.paths[index], settings=settings))
        yield found
    finally:
        for node in found:
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
    require_fuse()
    with NfsEmulator(tmp_path, mounts=NODES, settings=CACHES[caches]) as emulator, nodes_on(emulator) as nodes:
        met = wait_for(nodes, lambda: settled(nodes, {0, 1, 2, 3}), seconds=90)
        nodes[lost].stop()
        left = [node for node in nodes if node.index != lost]
        shrunk = wait_for(left, lambda: settled(left, {0, 1, 2, 3} - {lost}), seconds=90)
        record = left[0].newest
        assert record is not None
        assert record.round == 1, "nobody else was taken for lost"
        print(f"caches of {caches}: met in {met:.1f} s, shrunk in {shrunk:.1f} s")


def test_a_frozen_server_costs_nobody_a_place(tmp_path: Path) -> None:
    """All have seen nothing for twice the lease's time: nobody is taken for lost, and the coordinator stays."""
    require_fuse()
    with NfsEmulator(tmp_path, mounts=NODES) as emulator, nodes_on(emulator) as nodes:
        wait_for(nodes, lambda: settled(nodes, {0, 1, 2, 3}), seconds=90)
        before = nodes[0].newest
        emulator.freeze()
        time.sleep(2 * SETTINGS.heartbeat_ttl)  # the freeze's length is what this is about
        assert all(node.slowest_step < SETTINGS.heartbeat_ttl for node in nodes), "nobody has got through"
        emulator.thaw()
        wait_for(nodes, lambda: all(n.slowest_step > SETTINGS.heartbeat_ttl for n in nodes), seconds=90)
        time.sleep(1.5 * SETTINGS.heartbeat_ttl)  # long enough to take somebody for lost
        assert [node.newest for node in nodes] == [before] * NODES
        assert not any(node.error for node in nodes)


@pytest.mark.parametrize("operation", ["symlink", "write", "mkdir"])
def test_nodes_meet_though_replies_are_lost(tmp_path: Path, operation: str) -> None:
    """Of each client the first three of a kind: done, and told as failed."""
    require_fuse()
    with NfsEmulator(tmp_path, mounts=NODES) as emulator:
        emulator.fail("EIO", operation, done=True, times=3)
        (tmp_path / "store").mkdir(mode=0o700)  # by the launcher, before any agent starts
        with nodes_on(emulator) as nodes:
            wait_for(nodes, lambda: settled(nodes, {0, 1, 2, 3}), seconds=90)
