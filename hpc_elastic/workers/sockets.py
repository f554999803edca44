"""The TCP sockets of processes, by the addresses of their own ends: from /proc, without a privilege and without torch.

A process group's message names the peer that is gone by its address. The kernel knows which process has a socket, as
long as it lives: ``/proc/PID/net/tcp`` has every socket of the network namespace with its inode, and ``/proc/PID/fd``
the inodes of one process. One look reads the table once, and one link for each open file of the processes: some
milliseconds on a full node.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable

from hpc_elastic.base.digests import sha1

_LISTENS = 0x0A
_IPV4_MAPPED = b"\0" * 10 + b"\xff\xff"
_DEPTH = 4
"""Of children that are looked into where a worker has no socket itself: a shell script around the training script."""
Address = tuple[str, int]
"""An IP address, of IPv4 where it is one, and a port."""


def read_sockets(pids: Iterable[int], *, proc: str = "/proc") -> dict[int, frozenset[Address]]:
    """The addresses of each process' own ends; a process without any, or one that is gone, is missing. Never raises.

    Args:
        pids: The processes; of one without a socket its children count.
        proc: Where procfs is mounted.
    """
    owned = {pid: inodes for pid in pids if (inodes := _inodes_below(pid, proc))}
    if not owned:
        return {}
    table: dict[int, Address] = {}
    for name in ("tcp", "tcp6"):
        table |= parse_table(_read(f"{proc}/{next(iter(owned))}/net/{name}"))
    found = {pid: frozenset(table[inode] for inode in inodes if inode in table) for pid, inodes in owned.items()}
    return {pid: addresses for pid, addresses in found.items() if addresses}


def network_id(pid: int, *, proc: str = "/proc") -> str:
    """Equal for two processes for which the same loopback address means the same; empty where it can't be read."""
    try:
        name = os.readlink(f"{proc}/{pid}/ns/net")
    except OSError:
        return ""
    boot = _read(f"{proc}/sys/kernel/random/boot_id").strip()
    return sha1(f"{boot} {name}".encode()).hex()[:8] if boot else ""


def serving_socket(connection: socket.socket, *, proc: str = "/proc") -> tuple[int, int] | None:
    """The inode, and its owner's uid, of the socket at the other end of a connection within this host; None: none."""
    ends = connection.getpeername()[:2], connection.getsockname()[:2]
    for name in ("tcp", "tcp6"):
        for line in _read(f"{proc}/self/net/{name}").splitlines()[1:]:
            parts = line.split()
            try:
                found = tuple(
                    (_ip_text(_unpack(ip)), int(port, 16)) for ip, _, port in (x.partition(":") for x in parts[1:3])
                )
                if found == ends and int(parts[9]):
                    return int(parts[9]), int(parts[7])
            except (IndexError, ValueError, OSError):
                continue
    return None


def has_socket(pid: int, inode: int, *, proc: str = "/proc") -> bool:
    """Whether a process of this user has the socket open."""
    return inode in _inodes(pid, proc)


def parse_table(text: str) -> dict[int, Address]:
    """Inode → local address, of ``/proc/net/tcp`` or ``tcp6``; without sockets that listen on any address."""
    found = {}
    for line in text.splitlines()[1:]:
        parts = line.split()
        try:
            address, port = parts[1].split(":")
            inode, state = int(parts[9]), int(parts[3], 16)
            packed = _unpack(address)
            if inode and not (state == _LISTENS and not any(packed)):
                found[inode] = _ip_text(packed), int(port, 16)
        except (IndexError, ValueError, OSError):
            continue
    return found


def _unpack(text: str) -> bytes:
    """Of the kernel's hexadecimal form: words of 32 bits, each in this machine's byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return b"".join(word.to_bytes(4, sys.byteorder) for word in words)


def _ip_text(packed: bytes) -> str:
    if packed[:12] == _IPV4_MAPPED:
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _inodes_below(pid: int, proc: str) -> set[int]:
    generation = [pid]
    for _ in range(_DEPTH):
        inodes = {inode for each in generation for inode in _inodes(each, proc)}
        if inodes:
            return inodes
        generation = [
            int(child) for each in generation for child in _read(f"{proc}/{each}/task/{each}/children").split()
        ]
    return set()


def _inodes(pid: int, proc: str) -> set[int]:
    folder = f"{proc}/{pid}/fd"
    found: set[int] = set()
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
