"""The bell: one authenticated datagram that says "look at the files now", and nothing else.

Every decision is in the files. A lost ring costs the wait for the next poll, a forged or repeated one is dropped and
counted, and where no packet gets through the same program runs on polling alone. The payload is JSON with the sender's
uid, a counter that only grows, and the address that it was sent to, so that the receiver learns by which of its own
addresses others reach it; an HMAC-SHA256 with the run's secret stands before it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Iterable

MAX_DATAGRAM = 512
_MAC_BYTES = 32

Address = tuple[str, int]
"""IPv4 address in dotted form, and port."""


class Doorbell:
    """One participant's datagram socket."""

    def __init__(self, *, secret: bytes, run_uid: str, uid: str, host: str, port: int = 0) -> None:
        """Bind.

        Args:
            secret: The run's; from a 0600 file.
            run_uid: Mixed into every code: rings of another run don't verify.
            uid: This participant's.
            host: The address to bind: ``127.0.0.1`` on one machine, ``0.0.0.0`` across nodes.
            port: 0 takes a free one.
        """
        self._key = hashlib.sha256(secret + b"\0" + run_uid.encode()).digest()
        self._uid = uid
        self._count = 0
        self._newest: dict[str, int] = {}
        self.rejected = 0
        self.reached: dict[str, None] = {}
        """This host's own addresses at which a valid ring from another participant arrived, first one first."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind((host, port))

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def fileno(self) -> int:
        return self._socket.fileno()

    def ring(self, addresses: Iterable[Address]) -> None:
        """Tell each of `addresses` to look now. Never blocks, never raises: polling is the fallback."""
        for address in addresses:
            self._count += 1
            body = json.dumps({"u": self._uid, "c": self._count, "to": address[0]}, separators=(",", ":")).encode()
            try:
                self._socket.sendto(self._mac(body) + body, address)
            except OSError:
                continue

    def drain(self) -> bool:
        """Take in all waiting datagrams. Returns whether one of them was a valid ring."""
        rung = False
        for _ in range(1000):  # a flood must not keep the owner from its work
            try:
                data = self._socket.recv(MAX_DATAGRAM)
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error for something we sent
            if self._accept(data):
                rung = True
            else:
                self.rejected += 1
        return rung

    def _accept(self, data: bytes) -> bool:
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return False
        try:
            ring = json.loads(body)
            sender, count, to = str(ring["u"]), int(ring["c"]), str(ring["to"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return False
        if count <= self._newest.get(sender, 0):
            return False  # repeated; an honest datagram that was overtaken is no loss, the newer one has rung
        self._newest[sender] = count
        self.reached.setdefault(to)
        return True

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).digest()

    def close(self) -> None:
        self._socket.close()
