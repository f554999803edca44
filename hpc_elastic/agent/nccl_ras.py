"""A client of NCCL's RAS (2.28.7 and newer), which every process that uses NCCL serves, for all processes of the job.

A text protocol at NCCL_RAS_ADDR, of which NCCL's own client is src/ras/client.cc. A server may be slow, another
program's, run's or user's, or gone in the middle of its answer: each question takes bounded time and memory. Each agent
gives its workers an address of its own, unless the user has.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.workers.sockets import Address

ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
_PORTS = range(20000, 28000)
"""NCCL's own default is 28028, and Linux gives ports above to outgoing connections."""
_CONNECT_SECONDS = 2.0
_RAS_SECONDS = 5
_ANSWER_SECONDS = 20.0
_BYTES_PER_RANK, _MOST_BYTES = 64 << 10, 64 << 20
"""An answer's room: 90 communicators of each rank; and the most of any."""
_LIBRARY = r"\S*/libnccl\.so\S*"
_NUMBERS = r"(\d+)\.(\d+)\.(\d+)"


class NotOursError(HpcElasticError):
    template = "{address} is not this run's: {why}"


def choose_address(given: Mapping[str, str]) -> str:
    """A port that nobody can guess; empty: the user set one, or wants none."""
    if given.get(ADDRESS_VARIABLE) or given.get(ENABLE_VARIABLE) == "0":
        return ""
    for _ in range(32):
        port = _PORTS[int.from_bytes(os.urandom(4), "big") % len(_PORTS)]
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"
    return ""


def parse_address(text: str) -> Address | None:
    """``host:port``, ``[::1]:port``; None: it is something else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


def ask_ras(address: Address, *, world_size: int, why_not_ours: Callable[[socket.socket], str]) -> str:
    """Ask for the state of all communicators, in bounded time and memory; returns JSON.

    `why_not_ours`, of the connection: why the other end is no process of this run; empty: it is one. Raises `OSError`
    where nobody listens or answers in time, and `NotOursError`.
    """
    most = min(_MOST_BYTES, _BYTES_PER_RANK * world_size)
    deadline = time.monotonic() + _CONNECT_SECONDS
    shown = f"{address[0]}:{address[1]}"
    with socket.create_connection(address, timeout=_CONNECT_SECONDS) as connection:
        buffer = bytearray()

        def line_after(command: str) -> str:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.sendall(f"{command}\n".encode())
            while b"\n" not in buffer:
                if not _receive(connection, buffer, deadline) or len(buffer) > 4096:
                    raise NotOursError(address=shown, why=f"it answers {bytes(buffer[:80])!r} to {command}")
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            return line.decode("utf-8", "replace").strip()

        if not (line := line_after("CLIENT PROTOCOL 2")).upper().startswith("SERVER PROTOCOL "):
            raise NotOursError(address=shown, why=f"it speaks another protocol ({line[:80]!r})")
        if why := why_not_ours(connection):
            raise NotOursError(address=shown, why=why)
        line_after(f"TIMEOUT {_RAS_SECONDS}")  # one that does not know it has its own
        if (line := line_after("SET FORMAT json")) != "OK":
            raise NotOursError(address=shown, why=f"it answers in no JSON, as NCCL before 2.28.7 ({line[:80]!r})")
        deadline = time.monotonic() + _ANSWER_SECONDS
        connection.settimeout(_CONNECT_SECONDS)
        connection.sendall(b"VERBOSE STATUS\n")
        while _receive(connection, buffer, deadline):
            if len(buffer) > most:
                raise NotOursError(address=shown, why=f"its answer is longer than {most >> 10} KiB")
    return buffer.decode("utf-8", "replace")


def _receive(connection: socket.socket, buffer: bytearray, deadline: float) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("NCCL's RAS did not answer in time")
    connection.settimeout(left)
    data = connection.recv(1 << 16)
    buffer += data
    return bool(data)


def nccl_version(pid: int, *, proc: str = "/proc") -> tuple[int, int, int] | None:
    """The version of the NCCL that a process has loaded, by the names of files; None: it has none, or none shows."""
    try:
        with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as file:
            path = next((found[0] for line in file if (found := re.search(_LIBRARY, line))), "")
        found = re.search(_NUMBERS, os.path.basename(path))
        if path and found is None:  # of a wheel: site-packages/nvidia/nccl/lib/libnccl.so.2
            names = os.listdir(os.path.join(os.path.dirname(path), *[os.pardir] * 3))
            wheels = (re.search(_NUMBERS, name) for name in names if name.startswith("nvidia_nccl"))
            found = next((wheel for wheel in wheels if wheel), None)
    except OSError:
        return None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None
