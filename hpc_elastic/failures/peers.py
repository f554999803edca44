"""What the libraries and the kernel say of a rank's peers: whose an address is, and who holds the others up.

"Connection closed by peer [10.0.0.7]:41234" says that the owner of that socket went away first, or was gone by itself
through another one. Where the agents knew which rank owned it, each symptom points to a rank, and the chain of them to
the one that no symptom explains. An agent reads the TCP sockets of processes, by the addresses of their own ends, from
/proc, without a privilege and without torch. One look takes some milliseconds on a full node.

NCCL's RAS (2.28.7 and newer) answers how often each rank of each communicator launched each collective, as the JSON of
its src/ras/client_support.cc, 2.28.7 to 2.31. The counts grow when a rank launches, not when it completes; sends and
receives may differ between ranks that are in order.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.codec import sha1
from hpc_elastic.base.host_facts import kernel_text
from hpc_elastic.base.text import cut_end, plural, range_bounds
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.run.agent_events import RanksObserved
from hpc_elastic.run.progress import Activity

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


_TRANSFERS = frozenset({"SendRecv", "Send", "Recv"})
_UNANSWERED = "does not answer NCCL's RAS: its process is stopped or gone"


class UnreadableReportError(HpcElasticError):
    template = "NCCL's RAS sent {what}"


class Launches(Struct, frozen=True):
    launched: int
    count: int
    ranks: tuple[int, ...] = ()


class Communicator(Struct, frozen=True, kw_only=True):
    name: str
    size: int
    levels: Mapping[str, tuple[Launches, ...]] = field(default_factory=dict)
    """Kind of collective → its levels, the highest first."""
    missing: tuple[int, ...] = ()
    is_settled: bool = True
    """None of its ranks is being made or destroyed: till then they differ rightly."""
    processes: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Rank → the address of its host, and its pid there."""

    @property
    def differing(self) -> dict[str, tuple[Launches, ...]]:
        if not self.is_settled:
            return {}
        return {kind: found for kind, found in self.levels.items() if len(found) > 1 and kind not in _TRANSFERS}

    @property
    def trouble(self) -> object:
        """Equal for two reports where nothing has changed that may hold it up; false where nothing does."""
        found = tuple(sorted(self.differing.items()))
        return (found, self.missing) if found or self.missing else ()


class RasReport(Struct, frozen=True, kw_only=True):
    version: str = ""
    communicators: tuple[Communicator, ...] = ()

    @property
    def progress(self) -> object:
        """Equal for two reports between which nothing was launched."""
        return tuple((each.name, tuple(sorted(each.levels.items()))) for each in self.communicators)


_LACKING_COMMA = r'("nvml_dev": *-?\d+)(\s+"status")'
"""2.28.9 writes each missing rank so."""
_SILENT = ("unresponsive", "considered_dead")
_CHANGING = ("init_state", "finalize_called", "destroy_flag", "abort_flag")
"""Neither 0 nor false while a rank's communicator is made or destroyed."""


class _Rank(Struct):
    rank: int
    host: str = ""
    pid: int = -1
    status: dict[str, bool | int] = {}
    collective_counts: dict[str, int] = {}


class _Communicator(Struct):
    size: int
    ranks: list[_Rank]
    hash: str = ""
    secondary_hash: str = ""
    missing_ranks: list[_Rank] = []


class _Answer(Struct):
    communicators: list[_Communicator]
    nccl_version: str = ""


def parse_json(text: str) -> RasReport:
    text = re.sub(_LACKING_COMMA, r"\1,\2", text[text.find("{") :])
    try:
        found = msgspec.json.decode(text, type=_Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableReportError(what=f"what is no report in JSON ({str(error)[:200]})") from None
    communicators = tuple(_describe(each) for each in found.communicators if each.ranks)
    return RasReport(version=found.nccl_version, communicators=communicators)


def _describe(found: _Communicator) -> Communicator:
    launched: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    # RAS has given memory that was never written: ranks that no communicator has (nccl issue 1762, 2.27.3).
    ranks = [rank for rank in found.ranks if 0 <= rank.rank < found.size]
    for rank in ranks:
        for kind, count in rank.collective_counts.items():
            launched[kind][count].append(rank.rank)
    missing = [rank for rank in found.missing_ranks if 0 <= rank.rank < found.size]
    silent = [rank.rank for rank in missing if any(rank.status.get(name) for name in _SILENT)]
    changes = any(rank.status.get(name) for rank in ranks for name in _CHANGING)
    return Communicator(
        name=f"{found.hash} {found.secondary_hash}",
        size=found.size,
        levels={
            kind: tuple(
                Launches(count, len(who), tuple(sorted(who))) for count, who in sorted(by.items(), reverse=True)
            )
            for kind, by in launched.items()
        },
        missing=tuple(sorted(silent)),
        is_settled=not changes and len(silent) == len(missing),
        processes={rank.rank: (rank.host, rank.pid) for rank in (*ranks, *missing)},
    )


def find_culprits(communicator: Communicator) -> dict[int, str]:
    """Name the ranks that hold up the others, and why: they don't answer, have launched less, or something else.

    Where more than two thirds of the ranks have launched less than a few, these few are ahead: they wait in what the
    others never call.
    """
    found = dict.fromkeys(communicator.missing, _UNANSWERED)
    behind: dict[int, tuple[str, int, int, int]] = {}
    ahead: dict[int, tuple[str, int, int, int]] = {}
    for kind, levels in communicator.differing.items():
        most = max(levels, key=lambda level: (level.count, level.launched))
        usual = most if 3 * most.count > 2 * communicator.size else levels[0]
        for level in levels:
            place = behind if level.launched < usual.launched else ahead
            if level is not usual:
                place |= dict.fromkeys(level.ranks, (kind, level.launched, usual.count, usual.launched))
    for rank in sorted(behind.keys() | ahead.keys()):
        if rank in behind and rank in ahead:
            more, less = ahead[rank], behind[rank]
            why = f"launched {more[0]} #{more[1]} where {plural(less[2], 'other')} launched {less[0]} #{less[3]}"
        elif rank in behind:
            kind, launched, count, usually = behind[rank]
            upto = f"{kind} up to #{launched}" if launched else f"no {kind}"
            why = f"has launched {upto}, {plural(count, 'other')} up to #{usually}"
        else:
            kind, launched, count, _ = ahead[rank]
            why = f"waits in {kind} #{launched}, which {plural(count, 'other')} never launched"
        found.setdefault(rank, why)
    return dict(sorted(found.items()))
