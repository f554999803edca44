"""Many participants over one memory store and one fake clock, stepped, crashed and frozen one by one.

Each effect on the store passes a gate where a test can end the participant ("died between two writes") or let others
run first. After every step the invariants of the log are checked.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.claims import read_claims
from hpc_elastic.rendezvous.membership import NodeInfo, RoundLog
from hpc_elastic.rendezvous.participant import OBSERVER_NODE, Participant
from hpc_elastic.rendezvous.proposals import RestartDecision
from hpc_elastic.rendezvous.state import (
    OBSERVER_PLACE,
    FailureMemory,
    NodeFailure,
    RoundRecord,
    Status,
    decode_record,
    new_uid,
    supersedes,
)
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import Store
from hpc_elastic.store.notifier import Address
from tests.rigs.event_pairs import pair_of
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore


class Crash(BaseException):
    """The participant's process has died here."""


class GatedStore(Store):
    """A participant's own view of the shared store: every write passes `gate`, before and after."""

    def __init__(self, inner: MemoryStore, gate: Callable[[str], None]) -> None:
        self._inner = inner
        self._gate = gate

    def put_if_absent(self, key: str, value: str) -> bool:
        self._gate(f"before put {key}")
        result = self._inner.put_if_absent(key, value)
        self._gate(f"after put {key}")
        return result

    def get(self, key: str) -> str | None:
        return self._inner.get(key)

    def version(self, key: str) -> str | None:
        return self._inner.version(key)

    def list(self, folder: str) -> list[str]:
        return self._inner.list(folder)

    def overwrite(self, key: str, value: str) -> None:
        self._gate(f"before overwrite {key}")
        self._inner.overwrite(key, value)
        self._gate(f"after overwrite {key}")

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def invalidate(self, folder: str) -> None:
        pass


def settle_always_restarting(record: RoundRecord, failures: tuple[NodeFailure, ...]) -> RestartDecision:
    return RestartDecision(
        go_on=True, restarts_used=record.restarts_used + bool(failures), reason="", memory=FailureMemory()
    )


@dataclass
class Node:
    """A stand-in for an agent: joins, confirms, and runs until it is told otherwise."""

    world: World
    index: int
    participant: Participant = field(init=False)
    info: NodeInfo = field(init=False)
    alive: bool = True
    frozen: bool = False
    crash_after: int | None = None
    effects: int = 0
    ready_round: int | None = None
    """Confirmed, or running."""
    running_round: int | None = None
    finals: list[RoundRecord] = field(default_factory=list)
    due: float = 0.0
    """When it is to be stepped, where the world drives it as its thread would."""
    notified: bool = True
    was_frozen: bool = False

    def __post_init__(self) -> None:
        clock = self.world.clock
        clock.now += 0.001  # two agents of one node never start in the same nanosecond
        self.info = NodeInfo(
            uid=new_uid(self.index, f"n{self.index}", clock),
            node=OBSERVER_NODE if self.index == OBSERVER_PLACE else self.index,
            host=f"n{self.index}",
            local_world_size=self.world.sizes.get(self.index, 1),
            spare=self.world.has_spares and self.index >= self.world.settings.max_nodes,
            addresses=(f"10.0.0.{self.index}",) if self.world.driven else (),
            port=len(self.world.nodes) + 1 if self.world.driven else 0,
        )
        self.participant = Participant(
            run_id="model",
            store=GatedStore(self.world.store, self._gate),
            info=self.info,
            settings=self.world.settings,
            decide_restart=self.world.decide_restart,
            clock=clock,
            rng=random.Random(self.index),
            listener=self,
            notifier=(WorldNotifier(self) if self.world.driven else SilentNotifier()) if self.world.beats else None,
        )
        self.enter()

    def enter(self) -> None:
        """It wants to be in; a supervisor only looks."""
        if not self.participant.observes:
            self.participant.join()

    def _gate(self, where: str) -> None:
        self.effects += 1
        if self.crash_after is not None and self.effects > self.crash_after:
            self.alive = False
            raise Crash(where)
        self.world.on_effect(self, where)

    def on_record(self, record: RoundRecord) -> None:
        if self.participant.observes:
            return
        member = record.member(self.info.uid)
        if record.status is Status.FROZEN and member is not None:
            self.ready_round = record.round
            first = record.members[0].uid == self.info.uid
            self.participant.claims.confirm(record.round, f"n{self.index}:1" if first else "")
        elif record.status is Status.FINAL and member is not None:
            self.running_round = record.round
            self.finals.append(record)
        elif record.status is Status.CLOSED:
            self.running_round = None
        elif self.ready_round is not None and record.round > self.ready_round:
            self.running_round = self.ready_round = None
            self.participant.join()

    def on_event(self, event: RunEvent) -> None:
        self.world.events.append((self.index, *pair_of(event)))

    def step(self, *, notified: bool = True) -> float:
        self.notified = False
        joined = self.world.joined_before_a_step()
        try:
            delay = self.participant.step(notified=notified)
        except Crash:
            return 0.0
        finally:
            self.world.check_freeze(joined)
        self.due = self.world.clock.now + delay
        return delay


class WorldNotifier:
    """One whose notifies the world delivers, or loses."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def notify(self, addresses: Sequence[Address], about: str = "", forward: Sequence[Address] = ()) -> None:
        for address in (*addresses, *forward):
            self._node.world.deliver(self._node, address, about)


class SilentNotifier:
    """A notifier that nobody hears: `World.beat` carries the beats, and notifications are left to polling."""

    def notify(self, addresses: object, about: str = "", forward: object = ()) -> None:
        pass


class World:
    def __init__(
        self,
        settings: RendezvousSettings,
        *,
        beats: bool = False,
        driven: bool = False,
        loses: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args:
        settings: Of all participants.
        beats: Whether packets come through.
        driven: Whether a participant is stepped when it asked for it or is notified, as its thread does; else at each
            tick, and told to look.
        loses: Whether the next notification is lost.
        """
        self.beats = beats
        self.driven = driven
        self.loses = loses
        self.cut: set[tuple[int, int]] = set()
        """(from, to): node indexes between which no packet comes through."""
        self.sizes: dict[int, int] = {}
        """Node → how many workers it brings, where that is not one."""
        self.has_spares = False
        """Whether nodes beyond MAX were submitted as spares."""
        self.settings = settings
        self.decide_restart: Callable[..., RestartDecision] = settle_always_restarting
        self.clock = FakeClock()
        self.store = MemoryStore()
        self.nodes: list[Node] = []
        self.events: list[tuple[int, str, object]] = []
        self.on_effect: Callable[[Node, str], None] = lambda node, where: None
        self.history: dict[int, RoundRecord] = {}
        self._next_beat = 0.0

    def start(self, index: int) -> Node:
        node = Node(self, index)
        self.nodes.append(node)
        return node

    def live(self) -> list[Node]:
        for node in self.nodes:
            node.was_frozen = node.was_frozen or node.frozen
        return [node for node in self.nodes if node.alive and not node.frozen]

    def run(
        self, until: Callable[[], bool], *, seconds: float = 300.0, tick: float = 0.25, rng: random.Random | None = None
    ) -> bool:
        """Step all live nodes, in order or shuffled, until the condition holds or the simulated time is over."""
        deadline = self.clock.now + seconds
        while not until():
            if self.clock.now > deadline:
                return False
            if self.beats:
                self.beat()
            order = self.live()
            if rng is not None:
                rng.shuffle(order)
            for node in order:
                if not node.alive or node.frozen:
                    continue
                if not self.driven:
                    node.step()
                elif node.notified or self.clock.now >= node.due:
                    node.step(notified=node.notified)
                else:
                    continue
                self.check()
            self.clock.now += tick
        return True

    def beat(self) -> None:
        """Every live participant says to the coordinator, and the coordinator to all, that it lives."""
        if self.driven:
            self._beat_as_planned()
            return
        live = {node.info.uid: node for node in self.live()}
        for node in live.values():
            record = node.participant.record
            if record is None or record.status is Status.CLOSED:
                continue
            hearers = [record.leader] if record.leader != node.info.uid else list(live)
            for uid in hearers:
                other = live.get(uid)
                if other is not None and other is not node and (node.index, other.index) not in self.cut:
                    hears = node.participant.detector.hears(uid)
                    other.participant.detector.heard([node.info.uid], hears_us=hears)

    def _beat_as_planned(self) -> None:
        if self.clock.now < self._next_beat:
            return
        self._next_beat = self.clock.now + self.settings.beat_interval
        for node in self.live():
            plan = node.participant.beats()
            for hears, addresses in ((True, plan.heard), (False, plan.unheard)):
                for address in addresses:
                    other = self._reached(node, address)
                    if other is not None:
                        other.participant.detector.heard([node.info.uid], hears_us=hears)
                        other.notified = other.participant.note_newest([plan.about]) or other.notified

    def deliver(self, sender: Node, address: Address, about: str) -> None:
        """A notification, where it is not lost."""
        other = self._reached(sender, address)
        if other is not None and not self.loses():
            other.participant.detector.heard([sender.info.uid], hears_us=None)
            other.participant.notifications.add([about] if about else [])
            other.notified = True

    def _reached(self, sender: Node, address: Address) -> Node | None:
        for node in self.live():
            if (node.info.addresses[0], node.info.port) == address:
                return None if (sender.index, node.index) in self.cut else node
        return None

    def joined_before_a_step(self) -> tuple[int, set[str]]:
        """The round that is joinable, -1 for none, and who has claimed a place in it."""
        record = self.newest()
        if record is None or record.status is not Status.JOINABLE:
            return -1, set()
        return record.round, set(read_claims(self.store, record.round).get("join", ()))

    def check_freeze(self, joined: tuple[int, set[str]]) -> None:
        """Who claimed a place before the step that froze the round began is in it, if it lives and there is room."""
        record = self.newest()
        if record is None or (record.status, record.round) != (Status.FROZEN, joined[0]):
            return
        if len(record.members) == self.settings.max_nodes:
            return
        for node in self.nodes:
            newer = any(supersedes(other.info.uid, node.info.uid) for other in self.nodes)
            if node.info.uid in joined[1] and node.alive and not (node.frozen or node.was_frozen or newer):
                assert record.member(node.info.uid) is not None, f"{node.info.uid} was overlooked"

    def newest(self) -> RoundRecord | None:
        return RoundLog(self.store, "model").latest()

    def all_running_in_one_round(self) -> bool:
        record = self.newest()
        live = self.live()
        return (
            record is not None
            and record.status is Status.FINAL
            and bool(live)
            and all(node.running_round == record.round for node in live if record.member(node.info.uid))
            and {m.uid for m in record.members} <= {node.info.uid for node in live}
        )

    def check(self) -> None:
        numbers = sorted(int(name) for name in self.store.list("log"))
        new = set(numbers) - set(self.history)
        for number in numbers:
            if number in new:
                value = json.loads(self.store.get(f"log/{number:016d}") or "")
                self.history[number] = decode_record(number, value, run_id="model")
        records = [self.history[number] for number in sorted(self.history)]
        members_of: dict[int, tuple[str, ...]] = {}
        for before, after in itertools.pairwise(records):
            assert after.number == before.number + 1
            assert after.term >= before.term, "terms never go back"
            assert after.round >= before.round, "rounds never go back"
            assert after.leader == before.leader or after.term > before.term, "a deposed coordinator committed"
            assert before.status is not Status.CLOSED, "something was written after the end"
            if after.number in new:
                self._check_losses(before, after)
        for record in records:
            if record.status in (Status.FROZEN, Status.FINAL):
                assert [record.rank(m.uid) for m in record.members] == [*range(len(record.members))]
                uids = tuple(m.uid for m in record.members)
                assert len(set(uids)) == len(uids), "a node has two ranks"
                assert len({m.node for m in record.members}) == len(uids)
                assert members_of.setdefault(record.round, uids) == uids, "a round has two member lists"
                assert self.settings.min_nodes <= len(uids) <= self.settings.max_nodes

    def _check_losses(self, before: RoundRecord, after: RoundRecord) -> None:
        """Nobody is taken for lost that has lived and run all the time, whatever packets were lost."""
        for node in self.nodes:
            if node.index in after.lost and node.index not in before.lost and before.member(node.info.uid) is not None:
                assert not node.alive or node.frozen or node.was_frozen, f"{node.info.uid} lives and was taken for lost"
