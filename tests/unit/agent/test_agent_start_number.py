"""How an agent learns the how-manyeth of its node it is."""

from __future__ import annotations

import pytest

from hpc_elastic.agent.rendezvous_session import START_NUMBER_SECONDS, next_start_number
from hpc_elastic.store.base import StoreFullError
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore


class Refusing(MemoryStore):
    """Its listings fail so many times, or show nothing; or it is full."""

    def __init__(self, *, fails: int = 0, hides: int = 0, full: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.hides = hides
        self.full = full

    def list(self, folder: str) -> list[str]:
        if self.fails:
            self.fails -= 1
            raise OSError(5, "Input/output error")
        if self.hides:
            self.hides -= 1
            return []
        return super().list(folder)

    def put_if_absent(self, key: str, value: str) -> bool:
        if self.full:
            raise StoreFullError(root="store", why="full")
        return super().put_if_absent(key, value)


def start(store: MemoryStore, node: int = 3) -> int:
    return next_start_number(lambda: store, node, clock=FakeClock())


def test_each_start_of_a_node_has_the_next_number() -> None:
    store = MemoryStore()
    assert [start(store), start(store), start(store, node=4), start(store)] == [1, 2, 1, 3]


def test_what_a_cache_hides_is_found_out_by_the_refusal() -> None:
    store = Refusing()
    for _ in range(3):
        start(store)
    store.hides = 2
    assert start(store) == 4


def test_passing_faults_are_waited_out() -> None:
    assert start(Refusing(fails=7)) == 1


def test_a_full_disk_holds_up_no_start() -> None:
    store = Refusing()
    start(store)
    store.full = True
    assert start(store) == 2


def test_a_filesystem_that_goes_on_refusing_is_told_of() -> None:
    clock = FakeClock()
    with pytest.raises(OSError, match="Input/output"):
        next_start_number(lambda: Refusing(fails=10**6), 0, clock=clock)
    assert clock.now - 1000.0 >= START_NUMBER_SECONDS
