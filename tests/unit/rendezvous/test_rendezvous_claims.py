"""What of a long run is removed, by whom, and that nobody who slept through it is harmed."""

from __future__ import annotations

import re
from collections import Counter, deque

import pytest

from hpc_elastic.rendezvous.claims import (
    GONE_SECONDS,
    MOST_AT_ONCE,
    REMOVALS_PER_SECOND,
    SWEEP_SECONDS,
    Sweep,
    old_rounds,
)
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord, Status
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import StoreWipedError
from tests.rigs.memory_store import MemoryStore, SpyStore
from tests.rigs.rendezvous_world import World

SETTINGS = RendezvousSettings(
    max_nodes=3, expected_nodes=3, timeout=10_000, last_call_timeout=2, heartbeat_interval=2, heartbeat_ttl=10
)


def test_the_newest_rounds_and_what_is_no_round_are_kept() -> None:
    names = ["000000", "000007", "000008", "000009", "000010", ".nfs000000", "later"]
    assert old_rounds(names, newest=9, kept=1) == [0, 7]
    assert old_rounds(names, newest=0, kept=1) == []


class NoPeers:
    def __init__(self) -> None:
        self.announced = 0

    def announce(self) -> None:
        self.announced += 1


def sweep_of(store: MemoryStore, uid: str, *, observes: bool = False) -> tuple[Sweep, NoPeers]:
    peers = NoPeers()
    return Sweep(store, uid, peers, deque(), observes=observes, now=0.0), peers  # type: ignore[arg-type]


def record(index: int, status: Status = Status.FINAL, leader: str = "00000-me-1-a") -> RoundRecord:
    return RoundRecord(number=index + 1, epoch="e", term=1, leader=leader, round=index, status=status)


@pytest.mark.parametrize(
    ("status", "observes", "removes"),
    [
        pytest.param(Status.FINAL, False, True, id="while workers run"),
        pytest.param(Status.FINAL, True, False, id="not by an observer"),
        *(
            pytest.param(status, False, False, id=f"not while somebody waits: {status.value}")
            for status in (Status.JOINABLE, Status.FROZEN, Status.CLOSED)
        ),
    ],
)
def test_the_coordinator_alone_removes_and_not_while_somebody_waits(
    status: Status, observes: bool, removes: bool
) -> None:
    store = SpyStore()
    store.put_if_absent("round/000000/join+x", "in")
    sweep, _ = sweep_of(store, "00000-me-1-a", observes=observes)
    for index in range(20):
        sweep.step(record(index, status), joined=frozenset(), now=float(index) * SWEEP_SECONDS)
    assert store.deleted == (["round/000000/join+x", "round/000000"] if removes else [])


def test_no_more_than_so_many_at_a_step_and_in_a_second() -> None:
    store = SpyStore()
    for index in range(500):
        store.put_if_absent(f"round/000000/join+{index:05d}-x-1-a", "in")
    sweep, _ = sweep_of(store, "00000-me-1-a")
    now, most = SWEEP_SECONDS, 0
    for _ in range(300):
        before = len(store.deleted)
        sweep.step(record(10), joined=frozenset(), now=now)
        most = max(most, len(store.deleted) - before)
        now += 0.1 if store.list("round/000000") else 0.0
    assert store.list("round/000000") == []
    assert most <= MOST_AT_ONCE
    assert now - SWEEP_SECONDS > (500 - MOST_AT_ONCE) / REMOVALS_PER_SECOND - 1


def test_a_fault_of_the_filesystem_is_nobodys_matter() -> None:
    store = SpyStore()
    store.put_if_absent("round/000000/join+x", "in")
    store.refuse = lambda key: True
    sweep, _ = sweep_of(store, "00000-me-1-a")
    for index in range(20):
        sweep.step(record(index), joined=frozenset(), now=float(index) * SWEEP_SECONDS)


def test_who_was_away_for_long_announces_itself_again() -> None:
    sweep, peers = sweep_of(SpyStore(), "00000-me-1-a")
    for now, announced in ((10.0, 0), (10.0 + GONE_SECONDS, 1)):
        sweep.step(record(0), joined=frozenset(), now=now)
        assert peers.announced == announced


def kinds(store: MemoryStore) -> Counter[str]:
    """How many files there are of each kind, whatever their numbers and names."""
    with store._lock:
        return Counter(re.sub(r"[0-9a-f]{4,}.*|\d+", "N", key.split("+")[0]) for key in store._values)


def play(world: World, rounds: int, *, values: bool = True) -> None:
    """Fail once in each of so many rounds. A round's programs leave something in its key-value folder."""
    for _ in range(rounds):
        newest = world.newest()
        at = newest.round if newest is not None else -1
        assert world.run(lambda at=at: world.all_running_in_one_round() and world.newest().round > at, seconds=300)  # type: ignore[misc, union-attr]
        now = world.newest()
        assert now is not None
        if values:
            world.store.put_if_absent(f"kv/{now.round:06d}/key/open", "open")
        teller = next(node for node in world.live() if now.member(node.info.uid))
        teller.participant.claims.report_failure(
            now.round,
            NodeFailure(node=teller.index, fingerprint="E", failure_class="root", retryable=True, message="E: boom"),
        )


class UncheckedWorld(World):
    """Whether the log is right is looked at once, at the end: it takes longer than the rounds themselves."""

    def check(self) -> None:
        pass


def test_after_a_thousand_rounds_there_is_no_more_than_after_a_hundred() -> None:
    world = UncheckedWorld(SETTINGS)
    for index in range(3):
        world.start(index)
    play(world, 100)
    after_hundred = kinds(world.store)
    play(world, 900)
    assert world.newest().round >= 999  # type: ignore[union-attr]
    after_all = kinds(world.store)
    assert sum(after_all.values()) <= sum(after_hundred.values()) + 100, after_all
    assert sum(after_all.values()) < 300, after_all
    World.check(world)


def test_a_node_frozen_for_ten_rounds_reads_the_newest_and_comes_back() -> None:
    world = World(SETTINGS)
    for index in range(3):
        world.start(index)
    play(world, 3)
    for sleeper in (0, 2):  # the coordinator at first, then another one
        world.nodes[sleeper].frozen = True
        play(world, 12)
        world.run(lambda: False, seconds=3 * SWEEP_SECONDS)
        before = world.newest()
        world.nodes[sleeper].frozen = False
        assert world.run(
            lambda: world.all_running_in_one_round() and len(world.newest().members) == 3,  # type: ignore[union-attr]
            seconds=120,
        )
        assert before is not None
        assert world.newest().round > before.round  # type: ignore[union-attr]
        world.check()


def test_what_gone_agents_left_is_removed_and_one_that_only_slept_comes_back() -> None:
    world = World(SETTINGS)
    for index in range(3):
        world.start(index)
    play(world, 2)
    dead = world.nodes[2].info.uid
    world.nodes[2].alive = False
    sleeper: NodeInfo = world.nodes[1].info
    world.nodes[1].frozen = True
    world.run(lambda: False, seconds=GONE_SECONDS + 10 * SWEEP_SECONDS)
    for folder in ("hb", "node"):
        uids = [name.partition("+")[0] for name in world.store.list(folder)]
        assert uids == [world.nodes[0].info.uid]
        assert dead not in uids
    world.nodes[1].frozen = False
    assert world.run(
        lambda: world.all_running_in_one_round() and len(world.newest().members) == 2,  # type: ignore[union-attr]
        seconds=60,
    )
    assert world.newest().member(sleeper.uid) is not None  # type: ignore[union-attr]


def test_who_takes_over_looks_whether_the_store_is_still_the_one_that_it_joined() -> None:
    """The coordinator alone looks regularly: it may have gone because of what it saw."""
    world = World(SETTINGS)
    for index in range(3):
        world.start(index)
    assert world.run(world.all_running_in_one_round)
    world.store.delete("epoch/id")
    world.nodes[0].alive = False
    number = world.newest().number  # type: ignore[union-attr]
    found = None
    for _ in range(400):
        world.clock.now += 0.25
        try:
            world.nodes[1].step()
        except OSError:
            continue
        except StoreWipedError as error:
            found = error
            break
    assert found is not None
    assert "has lost its epoch" in str(found)
    assert world.newest().number == number, "nothing was written meanwhile"  # type: ignore[union-attr]
