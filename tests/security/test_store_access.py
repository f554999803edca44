"""Who comes to the workers' TCPStore: what another user of the host can do about its port."""

from __future__ import annotations

import subprocess

import pytest

from tests.rigs.two_users import User

_SERVE = """
import select, socket, sys
from hpc_elastic.agent.store_server import StoreServer
from pathlib import Path
server = StoreServer(sys.executable, log_path=Path("store.log"), environ={})
host, port = server.bind("127.0.0.1" if sys.argv[1] == "loopback" else "no-such-host.invalid", None, guarded=True)
print(port, server.guard is not None, flush=True)
if server.guard is not None:
    server.guard.admit([])
served = []
while not select.select([sys.stdin], [], [], 0)[0]:
    if select.select([server._listener], [], [], 0.02)[0]:
        served.append(server._listener.accept()[0])
        print("served", flush=True)
"""
_JOIN = """
import socket, sys
for shared in (False, True):
    for reused in (False, True):
        with socket.socket() as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reused)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            for address in ("0.0.0.0", "127.0.0.1"):
                try:
                    found.bind((address, int(sys.argv[1])))
                    found.listen()
                    print("joined", address, shared, reused)
                except OSError as error:
                    print(error.strerror)
"""


@pytest.mark.parametrize("where", ["loopback", "all addresses"])
def test_another_user_cant_listen_at_the_stores_port(victim: User, attacker: User, where: str) -> None:
    """Two sockets of the victim's share it (SO_REUSEPORT); a third one would get some of the workers' connections."""
    argv = [victim.interpreter, "-c", _SERVE, where]
    with victim.popen(argv, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        port, guarded = process.stdout.readline().split()
        assert guarded == str(where != "loopback"), "a normal user may have the kernel choose"
        said = attacker.python(_JOIN, port).stdout.splitlines()
        knock = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=30)"
        victim.python(knock)
        served = process.stdout.readline().strip()
        process.communicate("\n")
    assert said == ["Address already in use"] * 8
    assert served == "served"
