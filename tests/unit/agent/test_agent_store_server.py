"""Binding the store's port: what is listened on, and what is said when it can't be had."""

from __future__ import annotations

import pickle
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.agent.store_server import MasterPortTakenError, StoreBindError, StoreServer, StoreState
from hpc_elastic.base.loop import wait_readable


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(sys.executable, log_path=tmp_path / "log", environ={})
    yield server
    server.close()


def test_a_free_port_is_listened_on_before_anybody_serves_it(server: StoreServer) -> None:
    host, port = server.bind("127.0.0.1", None)
    assert host == "127.0.0.1"
    assert server.state is StoreState.BOUND
    socket.create_connection((host, port), timeout=5).close()
    assert server.pid is None


def test_an_address_is_listened_on_alone_and_a_name_means_all(server: StoreServer) -> None:
    _, port = server.bind("127.0.0.1", None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    _, port = server.bind("no-such-host.invalid", None)
    socket.create_connection(("127.0.0.2", port), timeout=5).close()


def test_a_fixed_port_is_used_again_while_its_old_connections_linger(server: StoreServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server.bind("127.0.0.1", port)
    for _ in range(3):
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        assert server.bind("127.0.0.1", port) == ("127.0.0.1", port)
        client.close()


def test_releasing_frees_the_port_and_may_be_repeated(server: StoreServer) -> None:
    server.release()
    _, port = server.bind("127.0.0.1", None)
    server.release()
    server.release()
    assert server.state is StoreState.IDLE
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_releasing_ends_every_copy_of_the_socket(server: StoreServer) -> None:
    """The process that serves may be stuck in the kernel, its copy with it."""
    _, port = server.bind("127.0.0.1", None)
    assert server._listener is not None
    with server._listener.dup():
        server.release()
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
    assert not isinstance(caught.value, MasterPortTakenError)


def test_serving_needs_a_port(server: StoreServer) -> None:
    with pytest.raises(RuntimeError, match="bind"):
        server.serve()


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
        assert server.guard is not None
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


def test_on_the_loopback_nothing_is_guarded(server: StoreServer) -> None:
    server.bind("127.0.0.1", None, guarded=True)
    assert server.guard is None
