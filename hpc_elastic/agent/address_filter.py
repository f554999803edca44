"""Filter the addresses that a TCP port serves: the kernel decides as a connection begins.

Two sockets listen at one port (SO_REUSEPORT), and a classic BPF program decides which of them gets a connection
(socket(7), SO_ATTACH_REUSEPORT_CBPF, since Linux 4.5). A filter on the socket itself (SO_ATTACH_FILTER) asks for
CAP_NET_ADMIN since June 2026 (Linux commit 5d39580f68e6). Nodes do not publish their IPv6 addresses: all are served.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import socket
import struct
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

MOST_RANGES = 200
"""Most ranges in one program, for which the kernel may allow 20 KiB (net.core.optmem_max)."""
MOST_REFUSALS = 256
"""Connections that are logged and closed at once; later ones are left to wait."""
Range = tuple[int, int]
_LOOPBACK = (127 << 24, (128 << 24) - 1)
_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD, _EQUAL, _GREATER, _AT_LEAST, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
_PROTOCOL = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_SOURCE = 0xFFF00000 + 12  # SKF_NET_OFF, and where an IPv4 header has the source
_IPV4 = 0x0800
_REFUSED, _SERVED = 0, 1  # which of the two sockets, in the order in which they listen
Instruction = tuple[int, int, int, int]
"""A BPF instruction, linux/filter.h's ``sock_filter``: code, jump if true, jump if false, constant."""


def ranges_of(addresses: Iterable[str], *, most: int = MOST_RANGES) -> list[Range]:
    """`most` ranges at most that hold the loopback and `addresses`, and as few others as that allows. IPv4 alone."""
    found: set[Range] = {_LOOPBACK}
    for address in addresses:
        try:
            number = int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big")
        except OSError:
            continue
        if not _LOOPBACK[0] <= number <= _LOOPBACK[1]:
            found.add((number, number))
    ordered = sorted(found)
    gaps = sorted((after[0] - before[1], index) for index, (before, after) in enumerate(itertools.pairwise(ordered), 1))
    kept = sorted(index for gap, index in gaps[max(0, len(gaps) - (most - 1)) :] if gap > 1)
    starts = [0, *kept]
    return [(ordered[start][0], ordered[end - 1][1]) for start, end in zip(starts, [*kept, len(ordered)], strict=True)]


def program(ranges: Sequence[Range]) -> list[Instruction]:
    """Serve IPv4 sources in one of `ranges` (in order, apart), and all that is not IPv4."""
    found = [(_LOAD, 0, 0, _PROTOCOL), (_EQUAL, 1, 0, _IPV4), (_RETURN, 0, 0, _SERVED), (_LOAD, 0, 0, _SOURCE)]
    for first, last in ranges:
        found += [
            (_AT_LEAST, 1, 0, first),
            (_RETURN, 0, 0, _REFUSED),
            (_GREATER, 1, 0, last),
            (_RETURN, 0, 0, _SERVED),
        ]
    return [*found, (_RETURN, 0, 0, _REFUSED)]


class Guard:
    def __init__(self, first: socket.socket, bind_beside: Callable[[int], socket.socket]) -> None:
        """Takes over `first`, which is bound. Raises `OSError` where the kernel can't do that (a sandbox)."""
        self._refusing = first
        try:
            self._refusing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._refusing.setblocking(False)
            self._refusing.listen(1)
            self._choose([(_RETURN, 0, 0, _REFUSED)])
            self.listener = bind_beside(self._refusing.getsockname()[1])
        except BaseException:
            self._refusing.close()
            raise
        self._strangers: set[str] = set()
        self._refusals = 0

    def fileno(self) -> int:
        return self._refusing.fileno()

    @property
    def has_refused_enough(self) -> bool:
        """A flood of connections must not keep the agent busy: `refuse` does nothing then."""
        return self._refusals >= MOST_REFUSALS

    def admit(self, addresses: Iterable[str] | None) -> None:
        """Serve these addresses and this host itself alone; None: all. For any thread; once closed, it does nothing."""
        try:
            if addresses is None:
                logger.info("the workers' TCPStore serves every address: the addresses of some nodes are not known")
                self._choose([(_RETURN, 0, 0, _SERVED)])
            else:
                own = self.listener.getsockname()[0]
                self._choose(program(ranges_of([*addresses, own])))
        except OSError:
            pass  # closed: this round is over

    def refuse(self) -> list[str]:
        found = []
        while not self.has_refused_enough:
            try:
                connection, address = self._refusing.accept()
            except OSError:
                break
            connection.close()
            self._refusals += 1
            if address[0] not in self._strangers:
                self._strangers.add(address[0])
                found.append(str(address[0]))
        return found

    def close(self) -> None:
        """After the listening socket: alone, that one would serve everybody."""
        self._refusing.close()

    def _choose(self, instructions: Sequence[Instruction]) -> None:
        raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in instructions))
        program_of = struct.pack("@HP", len(instructions), ctypes.addressof(raw))
        self._refusing.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program_of)
