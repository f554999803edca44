"""Who takes part: one listing tells, also where a cache still has the listing of before."""

from __future__ import annotations

from hpc_elastic.rendezvous.peers import Peers, announcement
from hpc_elastic.rendezvous.state import NodeInfo
from hpc_elastic.store.memory_store import MemoryStore


class CachedStore(MemoryStore):
    """Trusts its first listing of a folder until it stirs it."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[str, list[str]] = {}
        self.stirred = 0

    def list(self, folder: str) -> list[str]:
        return self.cached.setdefault(folder, super().list(folder))

    def stir(self, folder: str) -> None:
        self.stirred += 1
        self.cached.pop(folder, None)


def node(index: int) -> NodeInfo:
    return NodeInfo(
        uid=f"{index:05d}-n{index}-00000000000000aa-bbbb",
        node=index,
        host=f"n{index}",
        local_world_size=1,
        addresses=(f"10.0.0.{index}",),
        port=100 + index,
    )


def test_one_whose_announcement_a_cache_hides_is_found_and_stirred_for_once() -> None:
    store = CachedStore()
    peers = Peers(store, node(1), None)
    peers.learn([])
    store.put_if_absent(f"node/{announcement(node(2))}", "{}")
    peers.learn([node(2).uid])
    assert peers.get(node(2).uid) == node(2)
    assert store.stirred == 1
    for _ in range(3):
        peers.learn([node(2).uid, "00003-nonsense"])
    assert store.stirred == 2, "once for each"


def test_where_nothing_is_hidden_nothing_is_stirred() -> None:
    store = CachedStore()
    store.put_if_absent(f"node/{announcement(node(2))}", "{}")
    peers = Peers(store, node(1), None)
    peers.learn([node(2).uid])
    assert peers.addresses([node(2).uid]) == [("10.0.0.2", 102)]
    assert store.stirred == 0
