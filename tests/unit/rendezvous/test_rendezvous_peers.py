"""Who takes part, told in names; and how thousands are notified."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpc_elastic.rendezvous.membership import (
    DIRECT_NOTIFICATIONS,
    NodeInfo,
    Peers,
    addresses_of,
    announcement,
    notifier_of,
)
from hpc_elastic.store.notifier import MOST_FORWARDED, Address
from tests.rigs.memory_store import MemoryStore, fits_key


def info(node: int, *, port: int = 7000, addresses: tuple[str, ...] | None = None, host: str = "") -> NodeInfo:
    return NodeInfo(
        uid=f"{node:05d}-{host or f'n{node}'}-{node:016x}-0000",
        node=node,
        host=host or f"n{node}",
        local_world_size=8,
        addresses=(f"10.0.{node // 250}.{node % 250 + 1}",) if addresses is None else addresses,
        port=port,
    )


class RecordingNotifier:
    def __init__(self) -> None:
        self.notifications: list[tuple[list[Address], str, list[Address]]] = []

    def notify(self, addresses: list[Address], about: str = "", forward: Sequence[Address] = ()) -> None:
        self.notifications.append((addresses, about, list(forward)))


def test_one_listing_tells_all_about_all() -> None:
    class NoReads(MemoryStore):
        def get(self, key: str) -> str | None:
            raise AssertionError(f"{key} is read")

    store = NoReads()
    others = [info(n, host=f"rack-{n}.example") for n in range(1, 6)]
    for other in others:
        Peers(store, other, None).announce()
    peers = Peers(store, info(0), None)
    peers.learn([other.uid for other in others])
    assert [peers.get(other.uid) for other in others] == others
    assert sorted(peers.all_uids()) == sorted(other.uid for other in others)
    assert peers.names()[3] == "rack-3.example"


def test_every_address_of_the_members_is_found_or_nothing_is_said() -> None:
    store = MemoryStore()
    many = info(2, addresses=tuple(f"10.1.0.{n}" for n in range(12)))  # more than its name has room for
    for node in (info(1), many, info(3, addresses=())):
        Peers(store, node, None).announce()
    own = info(0, addresses=tuple(f"10.2.0.{n}" for n in range(9)))
    peers = Peers(store, own, None)
    uids = [own.uid, info(1).uid, many.uid]
    assert peers.all_addresses(uids) == {*own.addresses, "10.0.0.2", *many.addresses}
    assert peers.all_addresses([*uids, info(3).uid]) is None, "one has said none"
    assert peers.all_addresses([*uids, info(4).uid]) is None, "one is not known"
    crowd = [info(n, addresses=tuple(f"10.{n // 200}.{n % 200}.{k}" for k in range(9))) for n in range(10, 300)]
    for node in crowd:
        Peers(store, node, None).announce()
    assert peers.all_addresses([node.uid for node in crowd]) is None, "so many files are not read"


@pytest.mark.parametrize("addresses", [0, 1, 8, 30])
def test_a_name_fits(addresses: int) -> None:
    node = info(99999, host="h" * 64, port=65535, addresses=tuple(f"10.0.0.{n}" for n in range(addresses)))
    assert fits_key(announcement(node))


@pytest.mark.parametrize("said", ["", "8", "8.7000", "8.x.0", "8.7000.0.zz", "8.7000.0.0a0000", "x.7000.0"])
def test_nonsense_is_as_if_nobody_had_come(said: str) -> None:
    store = MemoryStore()
    uid = info(1).uid
    store.put_if_absent(f"node/{uid}+{said}", "x")
    peers = Peers(store, info(0), None)
    peers.learn([uid])
    assert peers.get(uid) is None


def test_where_a_notifier_is_comes_back_from_a_record() -> None:
    assert addresses_of(notifier_of(info(1))) == [("10.0.0.2", 7000)]
    assert addresses_of(notifier_of(info(1, port=0))) == []
    assert addresses_of(["x", "10.0.0.2"]) == []


@pytest.mark.parametrize("count", [1, DIRECT_NOTIFICATIONS, DIRECT_NOTIFICATIONS + 1, 1000])
def test_everybody_is_notified_once(count: int) -> None:
    store, notifier = MemoryStore(), RecordingNotifier()
    for n in range(1, count + 1):
        Peers(store, info(n), None).announce()
    peers = Peers(store, info(0), notifier)
    peers.learn([info(1).uid])
    peers.notify_all("log/7")
    direct = [address for addresses, _, _ in notifier.notifications for address in addresses]
    forwarded = [address for _, _, forward in notifier.notifications for address in forward]
    assert sorted(direct + forwarded) == sorted((info(n).addresses[0], 7000) for n in range(1, count + 1))
    assert {about for _, about, _ in notifier.notifications} == {"log/7"}
    assert all(len(forward) <= MOST_FORWARDED for _, _, forward in notifier.notifications)
    assert len(direct) <= max(DIRECT_NOTIFICATIONS, count // 20 + 1)


def test_who_is_silent_is_notified_and_nobody_through_it() -> None:
    store, notifier = MemoryStore(), RecordingNotifier()
    for n in range(1, 101):
        Peers(store, info(n), None).announce()
    peers = Peers(store, info(0), notifier)
    peers.learn([info(1).uid])
    silent = {info(n).uid for n in range(50, 101)}
    peers.notify_all("log/7", silent=silent)
    for addresses, _, forward in notifier.notifications:
        if forward:
            assert addresses[0][0] not in {info(n).addresses[0] for n in range(50, 101)}
    notified = {a for addresses, _, forward in notifier.notifications for a in (*addresses, *forward)}
    assert len(notified) == 100
