"""Whose sockets are whose, as the kernel has it."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from pathlib import Path

import pytest

from hpc_elastic.agent import worker_evidence
from hpc_elastic.agent.worker_evidence import FIRST_SECONDS, SocketWatch, next_look
from hpc_elastic.failures.peers import network_id, parse_table, read_sockets
from tests.rigs.fake_clock import FakeClock

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
