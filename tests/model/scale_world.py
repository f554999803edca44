"""Thousands of participants in one process and in simulated time, each with an NFS client of its own.

The participants and the `FileStore` below them are the real code. What is simulated: the server and the clients'
caches (`scale_server`), the datagrams (`HOP` seconds each, `SEND` seconds of their sender's time), and the thread that
drives a participant (`coordination`): it steps it when the time that the last step named has come, or when it is
notified. A step's effects and looks happen at the simulated times of its operations, never earlier.
"""

from __future__ import annotations

import functools
import gc
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath
from typing import Any
from unittest import mock

from hpc_elastic.rendezvous import membership
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.participant import OBSERVER_NODE, Participant
from hpc_elastic.rendezvous.proposals import RestartDecision
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import FailureMemory, NodeFailure, RoundRecord, Status, new_uid
from hpc_elastic.run.events import RunEvent, name_of
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store import file_store
from tests.model.scale_server import Client, ClientClock, ModelOs, Server

ROOT = "/runs/20260101-120000-train/attempt-000/store"
"""Where the store lies below the mount: its folders' attributes are asked for too."""
HOP = 0.0002
SEND = 0.00002
STOP_WORKERS = 0.05
"""Seconds that an agent needs to end its workers."""
Address = tuple[str, int]


class Node:
    """A stand-in for an agent: joins, confirms, runs, and does as it is told."""

    def __init__(self, world: World, index: int, *, doorbell: bool) -> None:
        self.world = world
        self.client = Client(world.server)
        self.client.now = world.now
        clock = ClientClock(self.client)
        self.address = (f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}", 7000)
        host = f"node{index:05d}" if index >= 0 else "batch"
        self.info = NodeInfo(
            uid=new_uid(index if index >= 0 else 99999, host, clock),
            node=index,
            host=host,
            local_world_size=8,
            addresses=(self.address[0],) if doorbell else (),
            port=self.address[1] if doorbell else 0,
        )
        with world.on(self):
            self.store = file_store.FileStore(PurePosixPath(ROOT), clock=clock)  # type: ignore[arg-type]
        self.store.get_many = self._in_lanes  # type: ignore[method-assign]
        self.participant = Participant(
            run_id="scale",
            store=self.store,
            info=self.info,
            settings=world.settings,
            decide_restart=_go_on,
            clock=clock,
            rng=random.Random(index),
            listener=self,
            notifier=self if doorbell else None,
        )
        self.alive = True
        self.busy_until = world.now
        self.turn = 0
        self.sent_about: dict[str, int] = {}
        self.notifications: list[tuple[frozenset[str], tuple[Address, ...]]] = []
        self.final_at: dict[int, float] = {}
        self._running = -1

    def _in_lanes(self, keys: Sequence[str]) -> list[str | None]:
        """Several files at once, as `FileStore` does with threads."""
        begin = self.client.now
        lanes = [begin] * file_store.LANES
        found = []
        for key in keys:
            lane = heapq.heappop(lanes)
            self.client.now = lane
            found.append(self.store.get(key))
            heapq.heappush(lanes, self.client.now)
        self.client.now = max(lanes)
        return found

    # -- the participant's notifier

    def notify(self, addresses: list[Address], about: str = "", forward: Sequence[Address] = ()) -> None:
        forward = tuple(forward)
        if about.startswith("log/"):
            told = self.sent_about.setdefault(about, 0) + len(addresses)
            self.sent_about[about] = told
            self.world.most_sent_at_once = max(self.world.most_sent_at_once, told)
        for address in addresses:
            self.client.now += SEND
            self.world.send(self.client.now, self, address, about, forward)

    # -- the participant's listener

    def on_event(self, event: RunEvent) -> None:
        name = name_of(event)
        self.world.events.append((self.client.now, self.info.node, name))

    def on_record(self, record: RoundRecord) -> None:
        if self.info.node == OBSERVER_NODE:
            return
        uid, participant = self.info.uid, self.participant
        member = record.member(uid) is not None
        if record.status is Status.FROZEN and member:
            master = self.info.host if record.members[0].uid == uid else ""
            self.ask(lambda: participant.claims.confirm(record.round, master))
        elif record.status is Status.FINAL and member:
            self._running = record.round
            self.final_at[record.round] = self.client.now
        elif record.status is Status.CLOSED:
            self.ask(participant.claims.deregister)
        elif record.status is Status.JOINABLE and 0 <= self._running < record.round:
            self._running = -1
            self.ask(participant.join, after=STOP_WORKERS)

    def ask(self, command: Callable[[], None], *, after: float = 0.001) -> None:
        self.world.later(self.client.now + after, self, command)


class World:
    """All of it. `run` moves the time on."""

    def __init__(self, settings: RendezvousSettings, *, doorbell: bool = True) -> None:
        self.settings = settings
        self.doorbell = doorbell
        self.server = Server()
        self.server.make_folder(ROOT)
        self.now = 0.0
        self.nodes: list[Node] = []
        self.events: list[tuple[float, int, str]] = []
        self.most_sent_at_once = 0
        """Datagrams of one node about one record."""
        self._by_address: dict[Address, Node] = {}
        self._queue: list[tuple[float, int, Node | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self._os = ModelOs()
        self._stack = ExitStack()

    def __enter__(self) -> World:
        patch = self._stack.enter_context
        patch(mock.patch.object(file_store, "os", self._os))
        patch(mock.patch.object(file_store, "make_private_dir", lambda root: self._os._client.walk(str(root))))
        # All have the same records: to decode each of them thousands of times would measure this process, not them.
        patch(mock.patch.object(membership, "_decode", functools.lru_cache(maxsize=64)(membership._decode)))
        decode, known = membership.decode_record, {}

        def decode_once(number: int, value: Mapping[str, Any], **more: Any) -> RoundRecord:
            key = (number, value.get("nonce"))
            if key not in known:
                known[key] = decode(number, value, **more)
            return known[key]

        patch(mock.patch.object(membership, "decode_record", decode_once))
        gc.collect()
        gc.disable()  # millions of objects that live long: looking for cycles among them takes most of the time
        self._stack.callback(gc.enable)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def on(self, node: Node) -> Iterator[None]:
        self._os.client = node.client
        try:
            yield
        finally:
            self._os.client = None

    def start(self, index: int, *, at: float) -> None:
        """A node, or with `OBSERVER_NODE` the supervisor, whose agent starts at a time."""

        def begin() -> None:
            node = Node(self, index, doorbell=self.doorbell)
            self.nodes.append(node)
            self._by_address[node.address] = node
            if index != OBSERVER_NODE:
                node.participant.join()
            self._step(node, notified=False)

        self._push(at, None, begin)

    def begin_beats(self) -> None:
        interval = poll_intervals(self.settings).beat

        def tick() -> None:
            self._beat()
            self._push(self.now + interval, None, tick)

        if self.doorbell:
            self._push(self.now + interval, None, tick)

    def _beat(self) -> None:
        for sender in self.nodes:
            if not sender.alive:
                continue
            plan = sender.participant.beats()
            for hears, addresses in ((True, plan.heard), (False, plan.unheard)):
                for address in addresses:
                    other = self._by_address.get(address)
                    if other is None or not other.alive:
                        continue
                    other.participant.detector.heard([sender.info.uid], hears_us=hears)
                    if plan.about and other.participant.note_newest([plan.about]):
                        self._push(self.now + HOP, other, functools.partial(self._rung, other, plan.about, ()))

    def send(self, at: float, sender: Node, address: Address, about: str, forward: tuple[Address, ...]) -> None:
        """A notification."""
        other = self._by_address.get(address)
        if other is not None and other.alive and sender.alive:
            uid = sender.info.uid

            def arrive() -> None:
                other.participant.detector.heard([uid], hears_us=None)
                self._rung(other, about, forward)

            self._push(at + HOP, other, arrive)

    def _rung(self, node: Node, about: str, forward: tuple[Address, ...]) -> None:
        node.notifications.append((frozenset([about] if about else []), forward))
        if self.now >= node.busy_until:
            self._take_notifications(node)

    def _take_notifications(self, node: Node) -> None:
        notifications, node.notifications = node.notifications, []
        for about, forward in notifications:
            if forward:
                node.client.now = max(node.client.now, self.now)
                (key,) = about or {""}
                node.notify(list(forward), key)
            node.participant.notifications.add(about)
        self._step(node, notified=True)

    def later(self, at: float, node: Node, command: Callable[[], None]) -> None:
        """Something that the agent asks of its participant."""

        def do() -> None:
            command()
            self._step(node, notified=node.participant.looks_when_asked)

        self._push(at, node, do)

    def _push(self, at: float, node: Node | None, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at, next(self._order), node, action))

    def _step(self, node: Node, *, notified: bool) -> None:
        node.client.now = max(node.client.now, self.now)
        self._os.client = node.client
        delay = node.participant.step(notified=notified)
        self._os.client = None
        node.busy_until = node.client.now
        node.turn += 1
        turn = node.turn

        def again() -> None:
            if node.turn == turn:
                if node.notifications:
                    self._take_notifications(node)
                else:
                    self._step(node, notified=False)

        self._push(node.busy_until + (0.0 if node.notifications else delay), node, again)

    def run(self, until: Callable[[], bool] | None = None, *, seconds: float) -> bool:
        """Move on until the condition holds, or so many simulated seconds are over. Returns whether it holds."""
        end = self.now + seconds
        check = 0
        while self._queue and self._queue[0][0] <= end:
            at, _, node, action = heapq.heappop(self._queue)
            if node is not None and not node.alive:
                continue
            self.now = max(self.now, at)
            if node is not None and self.now < node.busy_until:
                self._push(node.busy_until, node, action)
                continue
            action()
            check += 1
            if until is not None and (check % max(1, len(self.nodes) // 64) == 0) and until():
                return True
        if until is not None and until():
            return True
        self.now = max(self.now, end)
        return False

    def newest(self) -> RoundRecord:
        records = [node.participant.record for node in self.nodes if node.alive]
        return max((record for record in records if record is not None), key=lambda record: record.number)

    def agents(self) -> list[Node]:
        return [node for node in self.nodes if node.alive and node.info.node != OBSERVER_NODE]


def failure(node: int) -> NodeFailure:
    return NodeFailure(node=node, fingerprint="E", failure_class="root", retryable=True, message="E: boom")


def _go_on(record: RoundRecord, failures: Any) -> RestartDecision:
    return RestartDecision(
        go_on=True, restarts_used=record.restarts_used + bool(failures), reason="", memory=FailureMemory()
    )
