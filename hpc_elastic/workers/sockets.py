"""The TCP sockets of processes, by the addresses of their own ends: from /proc, without a privilege and without torch.

A process group's message names the peer that is gone by its address. One look takes some milliseconds on a full node.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

from hpc_elastic.base.digests import sha1
from hpc_elastic.base.host_facts import kernel_text

_LISTENS = 0x0A
_IPV4_MAPPED = b"\0" * 10 + b"\xff\xff"
_DEPTH = 4
"""Children are looked into where a worker has no socket itself: a shell script around the training script."""
Address = tuple[str, int]
"""An IP address, of IPv4 where it is one, and a port."""


def read_sockets(pids: Iterable[int], *, proc: str = "/proc") -> dict[int, frozenset[Address]]:
    """Map each process to the addresses of its own ends; one without any, or that is gone, is missing. Never raises."""
    owned = {pid: inodes for pid in pids if (inodes := _inodes_below(pid, proc))}
    if not owned:
        return {}
    table: dict[int, Address] = {}
    for name in ("tcp", "tcp6"):
        table |= parse_table(kernel_text(f"{proc}/{next(iter(owned))}/net/{name}"))
    found = {pid: frozenset(table[inode] for inode in inodes if inode in table) for pid, inodes in owned.items()}
    return {pid: addresses for pid, addresses in found.items() if addresses}


def network_id(pid: int, *, proc: str = "/proc") -> str:
    """Equal for two processes for which the same loopback address means the same; empty where it can't be read."""
    try:
        name = os.readlink(f"{proc}/{pid}/ns/net")
    except OSError:
        return ""
    boot = kernel_text(f"{proc}/sys/kernel/random/boot_id").strip()
    return sha1(f"{boot} {name}".encode()).hex()[:8] if boot else ""


def serving_socket(connection: socket.socket, *, proc: str = "/proc") -> tuple[int, int] | None:
    """The inode, and its owner's uid, of the socket at the other end of a connection within this host."""
    ends = connection.getpeername()[:2], connection.getsockname()[:2]
    for name in ("tcp", "tcp6"):
        for own, inode, fields in _rows(kernel_text(f"{proc}/self/net/{name}")):
            if inode and own == ends[0] and _address(fields[2]) == ends[1]:
                return inode, int(fields[7])
    return None


_NETLINK_SOCK_DIAG, _BY_FAMILY, _INFO, _DONE_OR_ERROR = 4, 20, 2, (2, 3)
_REQUEST_AND_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")
_INODE_AT, _ATTRIBUTES_AT = 68, 72
_MOVED = struct.Struct("=QQ")
_MOVED_AT = 120
"""Offset in struct tcp_info of the bytes acknowledged and received (Linux 4.2)."""


def moved_bytes() -> dict[int, int]:
    """Inode → bytes that a TCP socket of this network namespace has sent and received; sock_diag(7). ``/proc/PID/io``
    does not count them. Empty where the kernel does not answer.
    """
    found: dict[int, int] = {}
    with (
        suppress(OSError, struct.error),  # no permission, no such kernel
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel,
    ):
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 0xFFFFFFFF)
            size = _HEADER.size + len(wanted)
            kernel.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + wanted)
            for body in _answers(kernel):
                (inode,) = struct.unpack_from("=I", body, _INODE_AT)
                found[inode] = _moved(body)
    return found


def _answers(kernel: socket.socket) -> Iterator[bytes]:
    while True:
        raw, at = kernel.recv(1 << 16), 0
        while at < len(raw):
            size, kind = _HEADER.unpack_from(raw, at)[:2]
            if kind in _DONE_OR_ERROR:
                return
            yield raw[at + _HEADER.size : at + size]
            at += (size + 3) & ~3


def _moved(body: bytes) -> int:
    at = _ATTRIBUTES_AT
    while at < len(body):
        size, kind = struct.unpack_from("=HH", body, at)
        if kind == _INFO:
            return sum(_MOVED.unpack_from(body, at + 4 + _MOVED_AT))
        at += max(4, (size + 3) & ~3)
    return 0


def parse_table(text: str) -> dict[int, Address]:
    """Inode → local address, of ``/proc/net/tcp`` or ``tcp6``; without sockets that listen on any address."""
    listens = f"{_LISTENS:02X}"
    return {
        inode: own
        for own, inode, fields in _rows(text)
        if inode and not (fields[3] == listens and not fields[1].partition(":")[0].strip("0"))
    }


def _rows(text: str) -> Iterator[tuple[Address, int, list[str]]]:
    for line in text.splitlines()[1:]:
        fields = line.split()
        with suppress(IndexError, ValueError, OSError):
            yield _address(fields[1]), int(fields[9]), fields


def _address(text: str) -> Address:
    """The kernel's hexadecimal form: words of 32 bits, each in this machine's byte order."""
    ip, port = text.split(":")
    words = [int(ip[at : at + 8], 16) for at in range(0, len(ip), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words).removeprefix(_IPV4_MAPPED)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)


def _inodes_below(pid: int, proc: str) -> set[int]:
    generation = [pid]
    for _ in range(_DEPTH):
        inodes = {inode for each in generation for inode in socket_inodes(each, proc)}
        if inodes:
            return inodes
        generation = [
            int(child) for each in generation for child in kernel_text(f"{proc}/{each}/task/{each}/children").split()
        ]
    return set()


def socket_inodes(pid: int, proc: str = "/proc") -> set[int]:
    folder = f"{proc}/{pid}/fd"
    found: set[int] = set()
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
