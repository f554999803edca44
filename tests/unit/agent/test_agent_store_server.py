"""The port of the workers' store: what is listened on, who is heard there, and what is said when it can't be had."""

from __future__ import annotations

import ipaddress
import pickle
import re
import select
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.agent import store_server
from hpc_elastic.agent.store_server import (
    MOST_RANGES,
    Guard,
    Instruction,
    MasterPortTakenError,
    StoreBindError,
    StoreServer,
    StoreState,
    program,
    ranges_of,
)
from hpc_elastic.base.loop import wait_readable


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(sys.executable, log_path=tmp_path / "log", environ={})
    yield server
    server.close()


def test_a_free_port_is_listened_on_before_anybody_serves_it(server: StoreServer) -> None:
    with pytest.raises(RuntimeError, match="bind"):
        server.serve()
    host, port = server.bind("127.0.0.1", None, guarded=True)
    assert host == "127.0.0.1"
    assert (server.state, server.pid) == (StoreState.BOUND, None)
    assert server.guard is None, "on the loopback nothing is guarded"
    socket.create_connection((host, port), timeout=5).close()


def test_a_fixed_port_is_used_again_while_its_old_connections_linger(server: StoreServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server.bind("127.0.0.1", port)
    for _ in range(3):
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        assert server.bind("127.0.0.1", port) == ("127.0.0.1", port)
        client.close()


def test_releasing_ends_every_copy_of_the_socket_and_may_be_repeated(server: StoreServer) -> None:
    """The process that serves may be stuck in the kernel, its copy with it."""
    server.release()
    _, port = server.bind("127.0.0.1", None)
    with server._listener.dup():
        server.release()
        server.release()
        assert server.state is StoreState.IDLE
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_named(server: StoreServer, address: str) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MasterPortTakenError, match=f"port {port} of {address} is in use.*--master-port") as caught:
            server.bind(address, port)
    assert caught.value.port == port
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert server.state is StoreState.IDLE


def test_an_address_of_another_machine_is_refused(server: StoreServer) -> None:
    with pytest.raises(StoreBindError, match=r"192\.0\.2\.1.*--master-addr") as caught:
        server.bind("192.0.2.1", None)
    assert type(caught.value) is StoreBindError


def test_a_guarded_port_is_had_by_one_program_and_again_in_each_round(server: StoreServer) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MasterPortTakenError):
            server.bind("no-such-host.invalid", port, guarded=True)
    for _ in range(3):
        server.bind("no-such-host.invalid", port, guarded=True)
        server.guard.admit([])
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass  # it lingers
    server.release()
    assert server.guard is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)


def test_who_was_refused_is_told_once(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    _, port = server.bind("no-such-host.invalid", None, guarded=True)
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            assert wait_readable(server.watched(), 30)
            server.handle()
            assert client.recv(1) == b""
    assert re.findall(r"TCPStore refused (\S+):", caplog.text) in (["127.0.0.1"], ["::ffff:127.0.0.1"])


LOOPBACK = (127 << 24, (128 << 24) - 1)
ADDRESSES = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


def number(address: str) -> int:
    return int(ipaddress.IPv4Address(address))


def passes(instructions: Sequence[Instruction], *, source: int, protocol: int = 0x0800) -> bool:
    """What the kernel does with a segment."""
    at, value = 0, 0
    while True:
        code, if_true, if_false, constant = instructions[at]
        at += 1
        if code == 0x06:
            return constant != 0
        if code == 0x20:
            value = {0xFFFFF000: protocol, 0xFFF0000C: source}[constant]
        else:
            is_true = {0x15: value == constant, 0x25: value > constant, 0x35: value >= constant}[code]
            at += if_true if is_true else if_false


def test_neighbours_are_one_range_and_what_is_no_ipv4_address_is_left_out() -> None:
    found = ranges_of(["10.0.0.2", "10.0.0.1", "10.0.0.9", "::1", "n1", "127.0.1.1", "10.0.0.2"])
    assert found == [(number("10.0.0.1"), number("10.0.0.2")), (number("10.0.0.9"),) * 2, LOOPBACK]
    assert ranges_of([]) == [LOOPBACK]


def test_too_many_are_held_by_ranges_that_let_in_as_few_others_as_possible() -> None:
    found = ranges_of(["10.0.0.1", "10.0.0.3", "10.0.9.1", "200.0.0.1"], most=4)
    assert found[0] == (number("10.0.0.1"), number("10.0.0.3"))
    assert len(found) == 4


@given(ADDRESSES, st.integers(1, 12), st.integers(0, (1 << 32) - 1))
def test_the_program_passes_all_members_and_none_outside_of_the_ranges(
    members: list[int], most: int, stranger: int
) -> None:
    ranges = ranges_of([str(ipaddress.IPv4Address(each)) for each in members], most=most)
    assert len(ranges) <= most
    code = program(ranges)
    assert all(passes(code, source=each) for each in [*members, LOOPBACK[0], LOOPBACK[1]])
    is_inside = any(first <= stranger <= last for first, last in ranges)
    assert passes(code, source=stranger) == is_inside
    if most > 40:
        assert is_inside == (stranger in members)
    assert passes(code, source=stranger, protocol=0x86DD), "IPv6: nodes don't say which addresses they have"


class Port:
    """A guarded port on all addresses of this host."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        self._family = family
        self.guard = Guard(self._bound(0), lambda port: self._bound(port, shared=True))
        self.listener = self.guard.listener
        self.listener.listen()
        self.listener.settimeout(0.1)
        self.number = self.listener.getsockname()[1]

    def _bound(self, port: int, *, shared: bool = False) -> socket.socket:
        found = socket.socket(self._family)
        if self._family is socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(("", port))
        return found

    def is_served(self, source: str = "127.0.0.1") -> bool:
        with socket.create_connection(("127.0.0.1", self.number), timeout=30, source_address=(source, 0)) as client:
            try:
                self.listener.accept()[0].close()
            except TimeoutError:
                if self.guard.has_refused_enough:
                    return False
                self.guard.refuse()
                assert client.recv(1) == b"", "it is told at once"
                return False
            return True


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "dual stack"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    port = Port(request.param)
    yield port
    port.listener.close()
    port.guard.close()


def test_nobody_is_served_before_it_is_known_who_may_come(port: Port) -> None:
    assert not port.is_served()
    port.guard.admit(["10.0.0.1"])
    assert port.is_served()


def test_only_members_are_served(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_LOOPBACK", (number("127.0.0.5"),) * 2)  # the rest of it are strangers here
    port.guard.admit(["127.0.0.7"])
    assert [port.is_served(f"127.0.0.{last}") for last in (4, 5, 6, 7, 8)] == [False, True, False, True, False]
    port.guard.admit(None)
    assert port.is_served("127.0.0.4")


def test_each_stranger_is_named_once_and_a_flood_is_not_followed(port: Port) -> None:
    def knock() -> list[str]:
        with socket.create_connection(("127.0.0.1", port.number), timeout=30):
            found: list[str] = []
            while not found and not port.guard.has_refused_enough and not select.select([port.guard], [], [], 0.05)[0]:
                pass
            return port.guard.refuse()

    assert len(knock()) == 1
    assert knock() == []
    for _ in range(store_server.MOST_REFUSALS - 2):
        knock()
    assert port.guard.has_refused_enough
    port.guard.admit([])
    assert port.is_served()


def test_the_largest_program_is_one_that_kernels_take(port: Port) -> None:
    numbers = [str(ipaddress.IPv4Address((10 << 24) + 7 * index)) for index in range(5000)]
    assert len(program(ranges_of(numbers))) <= 4 * MOST_RANGES + 5 < 4096
    port.guard.admit(numbers)
    assert port.is_served()


def test_a_port_that_is_closed_admits_nobody_and_says_nothing(port: Port) -> None:
    port.listener.close()
    port.guard.close()
    port.guard.admit(["10.0.0.1"])
    port.guard.admit(None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number), timeout=30)
