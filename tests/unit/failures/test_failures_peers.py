"""A peer's address in a symptom: which rank it is, and where the lost connections begin."""

from __future__ import annotations

import tracemalloc

import pytest

from hpc_elastic.failures.peers import Peer, chain_ends, describe_peers, find_peer, resolve_peers, with_peers
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.run.activities import Activity, RankSockets
from hpc_elastic.run.agent_events import RanksObserved

HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (f"{GLOO} Connection closed by peer [10.0.0.7]:41234. This is typically caused by", "[10.0.0.7]:41234"),
        (f"{GLOO} Read error [fe80::1]:24496: Connection reset by peer", "[fe80::1]:24496"),
        ("socketProgress: Connection closed by remote peer nid003<43210>", "nid003<43210>"),
        ("Call to recv from 10.0.0.7<41234> failed : Connection reset by peer", "10.0.0.7<41234>"),
        ("recvValue failed on SocketImpl(fd=4, addr=[localhost]:55310, remote=[localhost]:42105)", ""),
        ("RuntimeError: shape [3]:4 of std::vector<12> at 0x7f", ""),
        ("Timed out waiting 3000ms for recv operation to complete", ""),
    ],
)
def test_the_address_is_found_as_it_is_printed(text: str, address: str) -> None:
    assert find_peer(text) == address


def activity(rank: int, peer: str) -> Activity:
    return Activity(rank=rank, failed=True, peer=peer)


def sockets(network: str, **ranks: tuple[str, str]) -> RanksObserved:
    found = tuple(RankSockets(rank=int(name[1:]), ends=(end,)) for name, end in ranks.items())
    return RanksObserved(round=0, network=network, sockets=found)


NODES = [
    sockets("a", r0=("10.0.0.1", "42601,50000-50002"), r1=("10.0.0.1", "46801")),
    sockets("b", r2=("10.0.0.2", "33421,51366"), r3=("10.0.0.2", "32901")),
]


@pytest.mark.parametrize(
    ("address", "rank"),
    [
        ("10.0.0.2<33421>", 2),
        ("n1<51366>", 2),
        ("n1.cluster.org<51366>", 2),
        ("[10.0.0.1]:50001", 0),
        ("[10.0.0.2]:36226", 2),  # gloo prints 33421 with its bytes swapped
        ("10.0.0.2<36226>", None),
        ("10.0.0.2<1>", None),
        ("n0<33421>", None),
        ("[10.0.0.9]:33421", None),
        ("10.0.0.1<46801>", None),  # its own
        ("", None),
    ],
)
def test_an_address_is_a_rank_where_it_is_one_ranks_alone(address: str, rank: int | None) -> None:
    found = resolve_peers([activity(1, address)], NODES, hosts=HOSTS)
    assert [peer.rank for peer in found] == ([] if rank is None else [rank])


@pytest.mark.parametrize(("network", "rank"), [("a", 2), ("b", None), ("", None)])
def test_a_loopback_address_means_the_same_on_one_machine_only(network: str, rank: int | None) -> None:
    nodes = [sockets("a", r0=("127.0.0.1", "42601")), sockets(network, r2=("127.0.0.1", "33421"))]
    found = resolve_peers([activity(0, "[127.0.0.1]:33421")], nodes, hosts=HOSTS)
    assert [peer.rank for peer in found] == ([] if rank is None else [rank])


def test_an_address_of_two_ranks_is_nobodys() -> None:
    nodes = [sockets("a", r0=("10.0.0.1", "5000"), r1=("10.0.0.1", "5000"))]
    assert resolve_peers([activity(3, "10.0.0.1<5000>")], nodes) == []


@pytest.mark.parametrize("ports", ["x", "7-", "-3", "5000,,6000", "5000-99999999999", "5001-9", ""])
def test_ports_that_make_no_sense_are_nobodys(ports: str) -> None:
    assert resolve_peers([activity(3, "10.0.0.1<5000>")], [sockets("a", r0=("10.0.0.1", ports))]) == []


def test_a_short_text_of_very_many_ports_takes_no_memory() -> None:
    found = tuple(RankSockets(rank=rank, ends=(("10.0.0.1", "0-999999999," * 300 + "7"),)) for rank in range(20))
    tracemalloc.start()
    assert resolve_peers([activity(3, "10.0.0.1<5001>")], [RanksObserved(round=0, network="a", sockets=found)]) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def peer(of: int, rank: int) -> Peer:
    return Peer(of=of, rank=rank, address=f"10.0.0.{rank}<1>")


@pytest.mark.parametrize(
    ("peers", "failed", "ends"),
    [
        ([peer(0, 1), peer(1, 2), peer(3, 2)], {0, 1, 3}, [2]),
        ([peer(0, 1)], {0, 1}, []),  # rank 1 waited in vain itself
        ([peer(0, 1), peer(1, 0)], {0, 1}, []),
        ([peer(0, 2), peer(1, 3)], {0, 1}, [2, 3]),
        ([], {0}, []),
    ],
)
def test_the_lost_connections_lead_to_a_rank_that_no_message_explains(
    peers: list[Peer], failed: set[int], ends: list[int]
) -> None:
    assert [end.rank for end in chain_ends(peers, failed=failed)] == ends


def test_the_suspects_begin_with_the_peer_that_was_lost() -> None:
    suspects = (Suspect(rank=3, host="n1", why="it was asleep"), Suspect(rank=2, host="n1", why="it was in a read"))
    found = with_peers(suspects, [peer(0, 2), peer(0, 1)], hosts=HOSTS)
    assert [(one.rank, one.why) for one in found] == [
        (2, "it was in a read; rank 0 lost the connection to it (10.0.0.2<1>)"),
        (1, "rank 0 lost the connection to it (10.0.0.1<1>)"),
        (3, "it was asleep"),
    ]
    assert found[1].host == "n0"
    assert describe_peers([peer(0, 2)], hosts=HOSTS) == "the peer 10.0.0.2<1> of rank 0 is rank 2 (n1)"
    assert describe_peers([], hosts=HOSTS) == ""
