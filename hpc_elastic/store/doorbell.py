"""The bell: small authenticated datagrams that say "look at the files now" or "I am alive", and nothing else.

Every decision is in the files. A lost ring costs the wait for the next poll; a lost beat makes nobody lost, since a
silent node is asked through the files; a forged or repeated datagram is dropped and counted; and where no packet gets
through the same program runs on polling alone. The payload is JSON with the sender's uid, what it is, a counter that
only grows, and the address that it was sent to, so that the receiver learns by which of its own addresses others reach
it; an HMAC-SHA256 with the run's secret stands before it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass

MAX_DATAGRAM = 512
_MAC_BYTES = 32

Address = tuple[str, int]
"""IPv4 address in dotted form, and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What valid datagrams said."""

    rung: bool
    """Somebody wants this participant to look now."""
    alive: frozenset[str]
    """Uids of the senders, of rings too."""


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
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], int] = {}
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
        self._send("ring", addresses)

    def beat(self, addresses: Iterable[Address]) -> None:
        """Tell each of `addresses` that this participant lives. From any thread."""
        self._send("beat", addresses)

    def _send(self, kind: str, addresses: Iterable[Address]) -> None:
        for address in addresses:
            with self._lock:
                self._count += 1
                count = self._count
            body = json.dumps({"u": self._uid, "k": kind, "c": count, "to": address[0]}, separators=(",", ":")).encode()
            try:
                self._socket.sendto(self._mac(body) + body, address)
            except OSError:
                continue

    def drain(self) -> Heard:
        """Take in all waiting datagrams."""
        rung, alive = False, set()
        for _ in range(1000):  # a flood must not keep the owner from its work
            try:
                data = self._socket.recv(MAX_DATAGRAM)
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error for something we sent
            accepted = self._accept(data)
            if accepted is None:
                self.rejected += 1
                continue
            sender, kind = accepted
            alive.add(sender)
            rung = rung or kind == "ring"
        return Heard(rung=rung, alive=frozenset(alive))

    def _accept(self, data: bytes) -> tuple[str, str] | None:
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        try:
            said = json.loads(body)
            sender, kind, count, to = str(said["u"]), str(said["k"]), int(said["c"]), str(said["to"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        # Each kind has its own newest: a ring that a beat overtook must still ring.
        if kind not in ("ring", "beat") or count <= self._newest.get((sender, kind), 0):
            return None  # repeated; an honest one that was overtaken by its like is no loss
        self._newest[sender, kind] = count
        self.reached.setdefault(to)
        return sender, kind

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).digest()

    def close(self) -> None:
        self._socket.close()
