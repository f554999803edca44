"""Finds whose address a symptom names, by the sockets of the ranks, and where the chain of lost connections begins.

"Connection closed by peer [10.0.0.7]:41234" says that the owner of that socket went away first, or was gone by itself
through another one. Where the agents knew which rank owned it, each symptom points to a rank, and the chain of them to
the one that no symptom explains. NCCL's watchdog names no address: its lines are the end of a flight recorder's dump.

An agent reads the TCP sockets of processes, by the addresses of their own ends, from /proc, without a privilege and
without torch. One look takes some milliseconds on a full node.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.digests import sha1
from hpc_elastic.base.host_facts import kernel_text
from hpc_elastic.base.text import cut_end, range_bounds
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.run.activities import Activity, AwaitedCall, FlightTail, TailTrack
from hpc_elastic.run.agent_events import RanksObserved

_GLOO = re.compile(r"\[(\d+(?:\.\d+){3}|[0-9a-fA-F:]*:[0-9a-fA-F.:]*)\]:(\d+)")
_NCCL = re.compile(r"(?<=\s)(\w[\w.-]*)<(\d{2,5})>(?=\W|\Z)")
_LOOPBACK = ("127.", "::1")
_LIMIT = 100


class Peer(Struct, frozen=True, kw_only=True):
    of: int
    rank: int
    address: str


def find_peer(text: str) -> str:
    found = _GLOO.search(text) or _NCCL.search(text)
    return cut_end(found[0], _LIMIT) if found else ""


def resolve_peers(
    activities: Iterable[Activity], sockets: Sequence[RanksObserved], *, hosts: Mapping[int, str] | None = None
) -> list[Peer]:
    """Find the ranks behind the addresses in the ranks' messages, as far as each is one rank's alone."""
    networks = {one.rank: part.network for part in sockets for one in part.sockets}
    owners: dict[str, list[tuple[int, int, int]]] = {}  # first port, last port, rank
    for part in sockets:
        for one in part.sockets:
            for ip, ports in one.ends:
                owners.setdefault(ip, []).extend((*bounds, one.rank) for bounds in range_bounds(ports) or ())
    found = []
    for activity in activities:
        ranks = set()
        for host, port in _readings(activity.peer):
            known = {rank for first, last, rank in owners.get(host, ()) if first <= port <= last}
            known = known or {
                rank
                for ends in owners.values()
                for first, last, rank in ends
                if first <= port <= last
                and (hosts or {}).get(rank, "").partition(".")[0] == host.partition(".")[0] != ""
            }
            if host.startswith(_LOOPBACK):
                known = {rank for rank in known if networks[rank] and networks[rank] == networks.get(activity.rank)}
            ranks |= known
        ranks.discard(activity.rank)
        if len(ranks) == 1:
            found.append(Peer(of=activity.rank, rank=ranks.pop(), address=activity.peer))
    return found


def chain_ends(peers: Sequence[Peer], *, failed: Container[int]) -> list[Peer]:
    """The peers with which the chains of lost connections begin: one of `failed` that names no peer is no beginning."""
    points = {peer.of: peer for peer in peers}
    ends: dict[int, Peer] = {}
    for start in peers:
        peer, seen = start, {start.of}
        while peer.rank in points and peer.rank not in seen:
            seen.add(peer.rank)
            peer = points[peer.rank]
        if peer.rank not in seen and peer.rank not in failed:
            ends.setdefault(peer.rank, peer)
    return [ends[rank] for rank in sorted(ends)]


def with_peers(suspects: Sequence[Suspect], ends: Sequence[Peer], *, hosts: Mapping[int, str]) -> tuple[Suspect, ...]:
    known = {suspect.rank: suspect for suspect in suspects}
    first = []
    for peer in ends:
        lost = f"rank {peer.of} lost the connection to it ({peer.address})"
        suspect = known.pop(peer.rank, None)
        if suspect is None:
            first.append(Suspect(rank=peer.rank, host=hosts.get(peer.rank, ""), why=lost))
        else:
            first.append(replace(suspect, why=f"{suspect.why}; {lost}"))
    return (*first, *known.values())


def describe_peers(peers: Sequence[Peer], *, hosts: Mapping[int, str]) -> str:
    """``the peer [10.0.0.7]:41234 of rank 0 is rank 2 (n1)``, of the first one; empty where there is none."""
    if not peers:
        return ""
    peer = peers[0]
    host = f" ({hosts[peer.rank]})" if peer.rank in hosts else ""
    return f"the peer {peer.address} of rank {peer.of} is rank {peer.rank}{host}"


def _readings(address: str) -> list[tuple[str, int]]:
    """The addresses that a printed one may mean: gloo prints the port as it is on the wire (torch 2.2 to 2.13)."""
    if gloo := _GLOO.fullmatch(address):
        port = int(gloo[2])
        swapped = (port & 0xFF) << 8 | port >> 8
        return [(gloo[1], port), (gloo[1], swapped)] if port < 1 << 16 and swapped != port else [(gloo[1], port)]
    host, _, number = address.removesuffix(">").partition("<")
    return [(host, int(number))] if number.isdecimal() else []


_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?")
_STATUS = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?([^\s(\]]+) ?(?:\(([^)\]]*)\) )?Rank \d+\]"
    r"[^\n]{0,300}?\blast enqueued(?: NCCL)? work: (-?\d+),? last completed(?: NCCL)? work: (-?\d+)",
    re.IGNORECASE,
)
_AT_WORK = re.compile(r"\bat (?:NCCL )?work(?: sequence id)?: (\d+)")
_NAMES: Mapping[str, str] = {
    "ALLREDUCE": "all_reduce", "ALLREDUCE_COALESCED": "allreduce_coalesced", "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "_all_gather_base", "ALLGATHER_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip
"""Named as the flight recorder has them; others are the same in small letters."""
_TRANSFERS = ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")
"""Their numbers may be those of sends and receives, which are counted apart."""


def tail_of_words(text: str) -> FlightTail | None:
    works = {int(number): (kind, into, out) for number, kind, into, out in _WORK.findall(text)}
    statuses: dict[str, tuple[str, int, int, int | None]] = {}
    for found in _STATUS.finditer(text):
        name, description, enqueued, completed = found.groups()
        at = _AT_WORK.search(found[0])
        before = statuses.get(name)
        waits = int(at[1]) if at is not None else before[3] if before is not None else None
        statuses[name] = description or "", int(enqueued), int(completed), waits
    calls: list[AwaitedCall] = []
    tracks: list[TailTrack] = []
    for name, (description, enqueued, completed, waits) in statuses.items():
        kind, into, out = works.get(waits, ("", "", "")) if waits is not None else ("", "", "")
        if enqueued < 0 or kind in _TRANSFERS:
            continue
        first = completed + 1 if waits is None else waits
        numbers = sorted({number for number in (completed, first, enqueued) if 0 <= number <= enqueued})
        nameless = AwaitedCall(name="", group=name, description=description, backend="nccl")
        named = replace(
            nameless,
            name=_NAMES.get(kind, kind.lower()),
            inputs=((int(into),),) if into else (),
            outputs=((int(out),),) if out else (),
        )
        at_call = len(calls)
        calls += [nameless, named]
        tracks.append(
            TailTrack(
                group=name,
                backend="nccl",
                sequences=tuple(numbers),
                calls=tuple(at_call + int(number == waits and bool(kind)) for number in numbers),
                done=tuple(int(number <= completed) for number in numbers),
            )
        )
    return FlightTail(calls=tuple(calls), tracks=tuple(tracks), is_of_words=True) if tracks else None


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
