"""A peer's address in a symptom: whose socket it is as the kernel has it, and where the lost connections begin;
and what NCCL's RAS answers, as its documentation and issues show it (tests/data/nccl_ras/README.md)."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import tracemalloc
from pathlib import Path

import pytest

from hpc_elastic.agent import worker_evidence
from hpc_elastic.agent.worker_evidence import FIRST_SECONDS, SocketWatch, next_look
from hpc_elastic.failures.peers import (
    Communicator,
    Launches,
    Peer,
    RasReport,
    UnreadableReportError,
    chain_ends,
    describe_peers,
    find_culprits,
    find_peer,
    network_id,
    parse_json,
    parse_table,
    read_sockets,
    resolve_peers,
    with_peers,
)
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.run.agent_events import RanksObserved
from hpc_elastic.run.progress import Activity, RankSockets
from tests.rigs.fake_clock import FakeClock

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


@pytest.mark.parametrize("ports", ["x", "7-", "-3", "5000,,6000", "5000-99999999999", "5001-9", ""])
def test_ports_that_make_no_sense_are_nobodys(ports: str) -> None:
    assert resolve_peers([activity(3, "10.0.0.1<5000>")], [sockets("a", r0=("10.0.0.1", ports))]) == []
    two = [sockets("a", r0=("10.0.0.1", "5000"), r1=("10.0.0.1", "5000"))]
    assert resolve_peers([activity(3, "10.0.0.1<5000>")], two) == [], "an address of two ranks is nobody's"


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


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(local: str, state: str, inode: int) -> str:
    return f"   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0\n"


TCP = HEAD + line("0100007F:A65B", "0A", 11) + line("00000000:07E8", "0A", 12) + line("0700000A:1267", "01", 13)
TCP6 = (
    HEAD
    + line("0000000000000000FFFF00000700000A:1268", "01", 14)
    + line("00000000000000000000000001000000:1269", "01", 15)
    + line("00000000000000000000000000000000:126A", "0A", 16)
    + "torn\n"
    + line("XYZ:1", "01", 17)
    + line("0700000A:1267", "06", 0)
)


@pytest.mark.skipif(sys.byteorder != "little", reason="the table was taken on a little-endian machine")
def test_the_kernels_table_is_read_by_inode() -> None:
    assert parse_table(TCP) == {11: ("127.0.0.1", 42587), 13: ("10.0.0.7", 4711)}, "any address is nobody's"
    assert parse_table(TCP6) == {14: ("10.0.0.7", 4712), 15: ("::1", 4713)}
    assert parse_table("") == {}


def process(proc: Path, pid: int, *links: str, children: str = "") -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "net").mkdir()
    (proc / str(pid) / "net" / "tcp").write_text(TCP)
    for number, link in enumerate(links):
        (proc / str(pid) / "fd" / str(number)).symlink_to(link)
    (proc / str(pid) / "task" / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "task" / str(pid) / "children").write_text(children)


def test_a_process_has_its_own_sockets_or_those_of_its_children(tmp_path: Path) -> None:
    process(tmp_path, 1, "/dev/null", "pipe:[11]", "socket:[11]", "socket:[99]", children="7 ")
    process(tmp_path, 2, "/dev/null", children="3 ")
    process(tmp_path, 3, children="4 5 ")
    process(tmp_path, 4, "socket:[13]")
    process(tmp_path, 6, "socket:[12]")
    found = read_sockets([1, 2, 6, 8], proc=str(tmp_path))
    assert found == {1: {("127.0.0.1", 42587)}, 2: {("10.0.0.7", 4711)}}


def test_this_process_is_found_by_a_connection_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        own = read_sockets([os.getpid()])[os.getpid()]
        assert {server.getsockname(), client.getsockname()} <= own
    assert network_id(os.getpid()) == network_id(os.getppid()) != ""
    assert network_id(2**22 + 1) == ""


def test_a_look_comes_soon_after_the_start_and_then_ever_more_rarely() -> None:
    age, looks = FIRST_SECONDS, [FIRST_SECONDS]
    while age < 7 * 24 * 3600:
        age = next_look(age)
        looks.append(age)
    assert len([each for each in looks if each <= 60]) <= 10
    assert all(later <= 1.5 * sooner for sooner, later in itertools.pairwise(looks) if later <= 60)
    assert max(later - sooner for sooner, later in itertools.pairwise(looks)) == pytest.approx(600)


def test_what_a_rank_had_stays_known_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {71: frozenset({("10.0.0.7", 5001), ("10.0.0.7", 5000)}), 72: frozenset({("127.0.0.1", 6000)})}
    monkeypatch.setattr(
        worker_evidence, "read_sockets", lambda pids: {pid: tables[pid] for pid in pids if pid in tables}
    )
    monkeypatch.setattr(worker_evidence, "network_id", lambda pid: f"of {pid}")
    clock = FakeClock()
    watch = SocketWatch(clock)
    assert watch.due == clock.monotonic() + FIRST_SECONDS
    watch.look({4: 71, 5: 72})
    assert watch.due > clock.monotonic() + FIRST_SECONDS
    tables[72] = frozenset({("127.0.0.1", 6001)})
    watch.look({5: 72})
    assert watch.network == "of 71"
    assert [(one.rank, one.ends) for one in watch.ranks] == [
        (4, (("10.0.0.7", "5000-5001"),)),
        (5, (("127.0.0.1", "6001"),)),
    ]
    watch.forget(4)
    assert [one.rank for one in watch.ranks] == [5]


DATA = Path(__file__).parents[2] / "data" / "nccl_ras"


def read(name: str) -> RasReport:
    return parse_json((DATA / name).read_text())


def culprits(report: RasReport) -> dict[int, str]:
    return {rank: why for each in report.communicators for rank, why in find_culprits(each).items()}


SILENT = "does not answer NCCL's RAS: its process is stopped or gone"


@pytest.mark.parametrize(
    ("name", "version", "whys"),
    [
        ("json_2.28.9_in_order.json", "2.28.9", {}),
        ("json_2.28.9_missing.txt", "2.28.9", {1: SILENT}),  # lacks a comma
        ("json_2.29_missing.json", "2.29.1", {1: SILENT}),
        ("json_2.28.9_straggler.json", "2.28.9", {1: "has launched AllReduce up to #3, 1 other up to #10"}),
    ],
)
def test_who_holds_up_the_others(name: str, version: str, whys: dict[int, str]) -> None:
    report = read(name)
    assert report.version == version
    assert culprits(report) == whys
    if name == "json_2.29_missing.json":
        assert report.communicators[0].processes[1] == ("172.16.64.245", 1524345)


STRAGGLER = (DATA / "json_2.28.9_straggler.json").read_text()


def of_ranks(*ranks: str, size: str = "2") -> str:
    return f'{{"communicators": [{{"size": {size}, "ranks": [{", ".join(ranks)}]}}]}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", '{"communicators": 7}', "[" * 100_000, '{"a": ' * 100_000, "ERROR: Invalid", "\0"),
        *(STRAGGLER[: int(len(STRAGGLER) * share)] for share in (0.1, 0.5, 0.9)),
        of_ranks('{"rank": 0}', size="1" * 5000),
        of_ranks('{"rank": 1e400}'),
        of_ranks('{"rank": [0]}'),
        of_ranks('{"rank": 0, "collective_counts": {"AllReduce": ' + "9" * 5000 + "}}"),
        of_ranks('{"rank": 0, "host": 7}', '{"rank": "1"}'),
    ],
)
def test_anything_else_is_no_answer(text: str) -> None:
    with pytest.raises(UnreadableReportError):
        parse_json(text)
    (huge,) = parse_json(of_ranks('{"rank": 0}', '{"rank": 9000000000}', size=str((1 << 63) - 1))).communicators
    assert find_culprits(huge) == {}, "a size costs nothing"


def changed(name: str, **status: object) -> RasReport:
    found = json.loads((DATA / name).read_text())
    found["communicators"][0]["ranks"][0]["status"].update(status)
    return parse_json(json.dumps(found))


@pytest.mark.parametrize("status", [{"init_state": 7}, {"destroy_flag": True}, {"abort_flag": True}])
def test_ranks_of_a_communicator_that_is_made_or_destroyed_differ_rightly(status: dict[str, object]) -> None:
    assert not changed("json_2.28.9_straggler.json", **status).communicators[0].trouble


def test_sends_and_receives_may_differ_and_are_progress() -> None:
    comm = Communicator(name="x", size=2, levels={"SendRecv": (Launches(9, 1, (0,)), Launches(5, 1, (1,)))})
    assert not comm.trouble
    more = Communicator(name="x", size=2, levels={"SendRecv": (Launches(9, 1, (0,)), Launches(6, 1, (1,)))})
    assert RasReport(communicators=(comm,)).progress != RasReport(communicators=(more,)).progress


def test_a_rank_that_calls_another_collective() -> None:
    everyone = (0, 1, 3)
    comm = Communicator(
        name="x",
        size=4,
        levels={
            "AllReduce": (Launches(64, 3, everyone), Launches(63, 1, (2,))),
            "AllGather": (Launches(11, 1, (2,)), Launches(10, 3, everyone)),
        },
    )
    assert find_culprits(comm) == {2: "launched AllGather #11 where 3 others launched AllReduce #64"}
