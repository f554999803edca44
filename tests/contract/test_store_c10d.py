"""The store's contract on torch's stores, and what is special there: listings that are made of lines."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.store.base import StoreError
from tests.contract.store_suite import ProcessSuite, StoreSuite, Subject
from tests.rigs.rendezvous_world import World

pytestmark = pytest.mark.torch

SECONDS = timedelta(seconds=30)
NUMBERS = itertools.count()
KINDS = ("TCPStore", "HashStore", "HashStore without append")


@pytest.fixture(scope="session")
def server() -> Any:
    """One for all tests, each of which has a prefix of its own."""
    dist = pytest.importorskip("torch.distributed")
    return dist.TCPStore("localhost", 0, None, True, wait_for_workers=False, timeout=SECONDS)


def opener(kind: str, server: Any) -> Callable[[], Any]:
    import torch.distributed as dist

    from hpc_elastic.pytorch.c10d_store import C10dStore

    prefix, shared = f"test-{next(NUMBERS)}", dist.HashStore()

    def on_tcp() -> C10dStore:
        client = dist.TCPStore("localhost", server.port, None, False, timeout=SECONDS)
        return C10dStore(dist.PrefixStore(prefix, client))

    def in_memory() -> C10dStore:
        store = C10dStore(shared)
        store._appends = store._appends and "without" not in kind
        return store

    return on_tcp if kind == "TCPStore" else in_memory


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, server: Any) -> Subject:
    return Subject(open=opener(request.param, server))


class TestC10d(StoreSuite):
    pass


class TestTcpStoreInProcesses(ProcessSuite):
    @pytest.fixture
    def subject(self, server: Any) -> Subject:
        return Subject(open=opener("TCPStore", server))


def test_many_writers_lose_no_name(subject: Subject) -> None:
    stores = [subject.open() for _ in range(4)]

    def work(me: int) -> None:
        for number in range(40):
            stores[me].put_if_absent(f"join/{number % 2}/{me}-{number}", "in")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {*stores[0].list("join/0"), *stores[0].list("join/1")}
    assert names == {f"{me}-{number}" for me in range(4) for number in range(40)}
    assert sorted(stores[0].list("join")) == ["0", "1"]


def test_a_name_that_another_one_lists_meanwhile_stays(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = subject.open(), subject.open()
    one.put_if_absent("log/0", "v")
    read = one._read

    def overtaken(key: str) -> bytes | None:
        found: bytes | None = read(key)
        if key == "l/log":
            monkeypatch.undo()
            other.put_if_absent("log/1", "v")
        return found

    monkeypatch.setattr(one, "_read", overtaken)
    one.put_if_absent("log/2", "v")
    monkeypatch.undo()
    other.put_if_absent("log/1", "v")  # where nothing is read before it is written, nobody came between
    assert sorted(other.list("log")) == ["0", "1", "2"]


def test_a_value_whose_writer_died_is_listed_by_the_next_one(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = subject.open(), subject.open()

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_enlist", die)
    with pytest.raises(KeyboardInterrupt):
        one.put_if_absent("log/1", "mine")
    assert other.list("log") == []
    assert not other.put_if_absent("log/1", "yours")
    assert other.list("log") == ["1"]
    assert other.get("log/1") == "mine"


def test_a_writer_that_was_held_up_lists_nothing_that_is_gone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = subject.open(), subject.open()
    append = type(slow)._append

    def held_up(folder: str, line: str) -> None:
        if folder == "log":
            monkeypatch.undo()
            assert not other.put_if_absent("log/1", "yours")
            other.delete("log/1")
            other._tidy_to(0, "log")
        append(slow, folder, line)

    monkeypatch.setattr(slow, "_append", held_up)
    assert slow.put_if_absent("log/1", "mine")
    assert other.list("log") == []


def test_names_that_are_gone_take_no_room_for_ever(subject: Subject) -> None:
    store: Any = subject.open()
    for number in range(600):
        store.put_if_absent(f"log/{number:016d}", "v")
        if number >= 2:
            store.delete(f"log/{number - 2:016d}")
    assert sorted(store.list("log")) == [f"{number:016d}" for number in (598, 599)]
    assert len(store._read("l/log")) < 5000


def test_a_cell_s_version_changes_also_where_its_value_does_not(subject: Subject) -> None:
    store = subject.open()
    store.overwrite("hb/a", "same")
    before = store.version("hb/a")
    store.overwrite("hb/a", "same")
    assert store.version("hb/a") != before
    assert store.get("hb/a") == "same"


def test_a_server_that_is_gone_is_no_passing_fault() -> None:
    dist = pytest.importorskip("torch.distributed")
    from hpc_elastic.pytorch.c10d_store import C10dStore

    own = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False, timeout=SECONDS)
    store = C10dStore(dist.TCPStore("localhost", own.port, None, False, timeout=SECONDS))
    assert store.put_if_absent("log/1", "v")
    del own
    for call in (lambda: store.get("log/1"), lambda: store.put_if_absent("log/2", "v"), lambda: store.list("log")):
        with pytest.raises(StoreError, match="TCPStore: its server does not answer any more"):
            call()


# -- a rendezvous in it

SETTINGS = RendezvousSettings(
    min_nodes=2, max_nodes=3, expected_nodes=3, timeout=120, last_call_timeout=5, heartbeat_interval=1, heartbeat_ttl=5
)


@pytest.fixture
def world(server: Any) -> World:
    world = World(SETTINGS)
    open_store = opener("TCPStore", server)
    world.store = open_store()
    for index in range(3):
        world.start(index)
    return world


def test_participants_meet_lose_their_coordinator_and_take_a_newcomer_in(world: World) -> None:
    assert world.run(world.all_running_in_one_round)
    world.nodes[0].alive = False
    assert world.run(lambda: world.all_running_in_one_round() and world.newest().round == 1)  # type: ignore[union-attr]
    assert [member.node for member in world.newest().members] == [1, 2]  # type: ignore[union-attr]
    world.start(0)
    assert world.run(lambda: world.all_running_in_one_round() and len(world.newest().members) == 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("effects", range(0, 24, 3))
def test_a_participant_may_die_after_any_of_its_writes(server: Any, effects: int) -> None:
    world = World(SETTINGS)
    world.store = opener("TCPStore", server)()
    for index in range(3):
        world.start(index)
    world.nodes[0].crash_after = effects
    assert world.run(lambda: not world.nodes[0].alive or world.all_running_in_one_round())
    assert world.run(world.all_running_in_one_round)
    assert len(world.live()) >= 2
