"""Barriers, the one decision per iteration, and the dead, over torch's HashStore with threads as ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hpc_elastic.inprocess.state import Interruption, InterruptionRecord
from hpc_elastic.inprocess.store import (
    COMPLETED,
    INTERRUPTED,
    BarrierOverflow,
    BarrierTimeout,
    PrefixStore,
    StoreMixin,
    TCPStore,
    detect_silence,
    listen_at,
    serve_at,
)

pytestmark = pytest.mark.torch

LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=0)


class HashStore(StoreMixin, dist.HashStore):  # type: ignore[misc, unused-ignore]
    pass


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore(0, HashStore())


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, in threads."""
    found: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            found[number] = bodies[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("name", ["initial_barrier", "iteration_barrier", "termination_barrier"])
def test_a_barrier_lets_all_go_once_all_are_there(store: PrefixStore, name: str) -> None:
    barrier = getattr(store, name)
    with pytest.raises(BarrierTimeout, match=r"1 of 2 ranks had not come after 0 s \(ranks 1\)"):
        barrier(rank=0, rendezvous_count=2, timeout=SHORT)
    other = PrefixStore(1, store)
    calls = [lambda rank=rank: getattr(other, name)(rank=rank, rendezvous_count=3, timeout=LONG) for rank in range(3)]
    assert together(*calls) == [None, None, None]


def comes(store: PrefixStore, barrier: str, rank: int, count: int) -> bool:
    """Whether all are there as `rank` comes."""
    try:
        getattr(store, barrier)(rank=rank, rendezvous_count=count, timeout=SHORT)
    except BarrierTimeout:
        return False
    return True


def test_who_comes_twice_is_refused_unless_the_barrier_allows_it(store: PrefixStore) -> None:
    assert not comes(store, "iteration_barrier", 0, 2)
    with pytest.raises(BarrierOverflow, match="rank 0 of 2"):
        comes(store, "iteration_barrier", 0, 2)
    assert [comes(store, "termination_barrier", rank, 2) for rank in (0, 1, 0)] == [False, True, True]
    with pytest.raises(BarrierOverflow):
        comes(store, "termination_barrier", 2, 2)


def test_all_completed_and_interrupted_exclude_each_other(store: PrefixStore) -> None:
    assert store.completion_barrier(rank=0, rendezvous_count=1, timeout=SHORT) is True
    store.record_interrupted(InterruptionRecord(0, Interruption.TERMINATED))
    assert store.outcome() == COMPLETED

    other = PrefixStore(1, store)
    other.record_interrupted()
    assert other.completion_barrier(rank=0, rendezvous_count=1, timeout=SHORT) is False
    assert other.outcome() == INTERRUPTED == other.wait_for_outcome()


def test_who_waits_at_the_completion_barrier_hears_of_a_fault(store: PrefixStore) -> None:
    found = together(
        lambda: store.completion_barrier(rank=0, rendezvous_count=2, timeout=LONG),
        lambda: store.record_interrupted(InterruptionRecord(1, Interruption.EXCEPTION)),
        store.wait_for_outcome,
    )
    assert found == [False, None, INTERRUPTED]
    assert not comes(PrefixStore(1, store), "completion_barrier", 0, 2)


def test_spares_wait_for_a_completion_or_an_interruption(store: PrefixStore) -> None:
    assert not store.wait_for_completed_or_interrupted(0)
    assert not store.is_any_rank_completed()
    store.record_completed()
    assert store.is_any_rank_completed()
    assert store.wait_for_completed_or_interrupted(0)
    other = PrefixStore(1, store)
    other.record_interrupted()
    assert other.wait_for_completed_or_interrupted(0)


def test_all_ranks_read_the_same_terminated_ranks(store: PrefixStore) -> None:
    store.record_terminated_rank(2)
    assert store.get_terminated_ranks() == {2}
    assert [comes(store, "termination_barrier", rank, 4) for rank in range(4)] == [False, False, False, True]
    store.record_terminated_rank(0)  # too late: the others have read it already
    assert store.get_terminated_ranks() == {2}


def test_nobody_waits_for_the_dead(store: PrefixStore) -> None:
    found = together(
        lambda: store.iteration_barrier(rank=0, rendezvous_count=2, timeout=LONG),
        lambda: store.stand_in_for(1, 2, Interruption.HARD_TIMEOUT),
    )
    assert found == [None, None]
    assert store.outcome() == INTERRUPTED
    store.answer(0, 2)
    assert store.wait_for_answers(0)
    assert comes(store, "termination_barrier", 0, 2)
    assert store.get_terminated_ranks() == {1}
    assert store.get_interruption_records() == [InterruptionRecord(1, Interruption.HARD_TIMEOUT)]


@pytest.mark.parametrize("gone_first", [True, False])
def test_who_died_before_saying_a_new_rank_has_the_one_that_is_left(store: PrefixStore, gone_first: bool) -> None:
    steps: list[Callable[[], Any]] = []
    for rank in (0, 2):
        steps.append(lambda: store.put_count(3))
        steps.append(lambda rank=rank: comes(store, "iteration_barrier", rank, 3))
    steps.insert(0 if gone_first else len(steps), lambda: store.report_gone(7))
    for step in steps:
        step()
    assert store.is_released(store.ITERATION_BARRIER)
    assert store.get_terminated_ranks() == {1}
    assert store.outcome() == INTERRUPTED


def test_heartbeats_are_counters_and_a_last_call_ends_when_all_have_answered(store: PrefixStore) -> None:
    assert store.get_heartbeat(3) == 0
    store.send_heartbeat(3)
    store.send_heartbeat(3)
    assert store.get_heartbeat(3) == 2
    store.answer(0, 2)
    store.answer(0, 2)
    assert not store.wait_for_answers(0)
    store.answer(1, 2)
    assert store.wait_for_answers(0)


def test_initial_ranks_and_the_end_of_the_store(store: PrefixStore) -> None:
    assert store.find_initial_rank(1) is None
    store.set_initial_rank(1, 5)
    assert store.get_initial_rank(1) == store.find_initial_rank(1) == 5
    assert store.get_base_terminated_count() == 0
    for rank in (1, 0, 1):
        store.record_base_terminated_rank(rank)
    assert store.get_base_terminated_count() == 2
    assert HashStore().critical_ranks == ()


def test_a_list_loses_nothing_without_append() -> None:
    class Bare(HashStore):
        def has_extended_api(self) -> bool:
            return False

        def append(self, key: str, value: str) -> None:
            raise AssertionError("it has none")

    store = Bare()
    together(*(lambda name=name: [store.append_item("list", f"{name}{n}") for n in range(50)] for name in "abc"))
    assert len(set(store.items("list"))) == 150


def is_reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


ONE_HOST = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
SEVERAL = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("host", "environ", "elsewhere"),
    [
        ("127.0.0.1", {}, False),
        ("127.0.0.1", SEVERAL, False),
        ("localhost", SEVERAL, False),
        (socket.gethostname(), SEVERAL, True),  # what other nodes take the name for is not known here
    ],
)
def test_a_store_listens_where_its_ranks_come_to(host: str, environ: dict[str, str], elsewhere: bool) -> None:
    """And not at every address: torch's store knows no password."""
    server = serve_at(host, 0, environ, use_libuv=True)
    server.set("key", "value")
    assert is_reached("127.0.0.1", server.port)
    assert is_reached("127.0.0.9", server.port) is elsewhere


def test_on_one_host_a_name_is_one_address() -> None:
    with socket.socket(fileno=listen_at(socket.gethostname(), 0, ONE_HOST)["master_listen_fd"]) as listener:
        assert listener.getsockname()[0] not in ("0.0.0.0", "::")
    assert listen_at("192.0.2.1", 7, ONE_HOST) == {"port": 7}, "not this host's own: torch may know what to do"


def test_the_ring_opens_its_store_at_the_masters_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ONE_HOST, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    store = TCPStore(wait_for_workers=False)
    assert store.critical_ranks == (0,)
    assert not is_reached("127.0.0.9", store.port)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert TCPStore.serve_apart("elsewhere") == "elsewhere", "somebody serves there"
    assert TCPStore(wait_for_workers=False).critical_ranks == (0,), "and is joined"
    monkeypatch.setenv("MASTER_PORT", "0")
    assert not is_reached("127.0.0.9", TCPStore.serve_apart("elsewhere").port)


def test_a_silent_node_ends_its_connections() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_connection(("127.0.0.1", server.port)) as other:
        detect_silence(server.port, 30)
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
