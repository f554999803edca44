"""The notifier: small authenticated datagrams that say "look at the files now" or "I am alive", and nothing else.

Every decision is in the files. A lost notification costs the wait for the next poll; a lost beat makes no node lost,
since a silent one is asked through the files. Where no packet gets through, the same program runs on polling alone.

A datagram is an HMAC-SHA256 with the run's secret, and `_Said` as JSON.

After `MOST_REJECTED` invalid datagrams within `PERIOD` seconds the notifier is muted until that time is over, so that a
flood takes about one hundredth of a core. No node counts as silent for that time.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import MsgspecError, Struct, field
from msgspec.json import Decoder, Encoder

from hpc_elastic.base.clock import Clock, Offset, PeerClock, SystemClock, uptime_ns
from hpc_elastic.base.codec import Mac, sha256
from hpc_elastic.base.files import read_bytes
from hpc_elastic.errors import UnsafePathError, UsageError


def read_secret(path: Path) -> bytes:
    """The run's secret. UnsafePathError: others could know it; UsageError: it is missing, or too short to be one."""
    anew = "submit the run anew"
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        raise UsageError(
            f"the run's secret {path} is missing; the run directory is damaged: submit the run anew"
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise UnsafePathError(f"the run's secret {path} is not a regular file; {anew}")
    if info.st_uid != os.geteuid():
        raise UnsafePathError(
            f"the run's secret {path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()}); {anew}"
        )
    if info.st_mode & 0o077:
        raise UnsafePathError(
            f"the run's secret {path} is open to other users (mode {stat.S_IMODE(info.st_mode):04o}): "
            f"they can forge packets of this run; {anew}"
        )
    secret = read_bytes(path, limit=4096).strip()
    if len(secret) < 16:
        raise UsageError(f"the run's secret {path} holds {len(secret)} bytes, less than 16; {anew}")
    return secret


logger = logging.getLogger(__name__)

MAX_DATAGRAM = 512
MOST_REJECTED = 500
"""Invalid datagrams that are looked at within one period."""
PERIOD = 0.5
MOST_LOGGED = 16
"""Different (reason, host) that are logged: a forger may make up any number of hosts."""
MOST_FORWARDED = 20
"""Addresses that a notification can carry on."""
_LONGEST_KEY = 120
_LONGEST_FORWARDED_KEY = 40
"""A key's length beside addresses: both have to fit into a datagram."""
_MAC_BYTES = 32
_REASONS = {
    "oversized": f"longer than {MAX_DATAGRAM} bytes",
    "forged": "without this run's code (cut off, forged, or of another run)",
    "garbled": "its contents are invalid",
    "misdirected": "sent to another",
    "repeated": "it was there before, or overtaken by a newer one",
}

Address = tuple[str, int]


_SHORT = {"uid": "u", "kind": "k", "count": "c", "port": "p", "about": "a", "forward": "f", "hears": "h"}
_SHORT |= {"refused": "r", "sent_ns": "t", "ahead_ns": "b"}


class _Said(Struct, kw_only=True, omit_defaults=True, rename=_SHORT):
    uid: str
    """The sender's."""
    kind: Literal["ring", "beat"]
    count: int = 0
    """It only grows."""
    to: str = ""
    """The address that it was sent to, and the port: so the receiver learns by which others reach it."""
    port: int = 0
    about: str = ""
    """The key that was written; of a beat, the newest record's."""
    forward: bytes = b""
    """The addresses to notify in turn, of 6 bytes each."""
    hears: bool = False
    """The sender hears the receiver."""
    refused: bool = False
    """The filesystem refuses the sender."""
    sent_ns: int | None = None
    """The sender's clock, and by how much it may be ahead of the receiver's."""
    ahead_ns: int | None = None


_encode, _decode = Encoder().encode, Decoder(_Said).decode


class ValidDatagrams(Struct):
    notified: bool = False
    alive: set[str] = field(default_factory=set)
    """Uids of the senders, of notifications too."""
    about: set[str] = field(default_factory=set)
    """The keys that were written, by the notifications."""
    newest: set[str] = field(default_factory=set)
    """The keys of the newest records, by the beats."""
    hears: dict[str, bool] = field(default_factory=dict)
    """Sender of a beat → whether it hears this participant."""
    refused: set[str] = field(default_factory=set)
    """Senders whose uid the files refuse."""
    muted: float = 0.0
    """Seconds since the last time for which a flood may have drowned what others sent."""


class Notifier:
    def __init__(self, *, secret: bytes, run_uid: str, uid: str, host: str, clock: Clock | None = None) -> None:
        """Bind to `host`: ``127.0.0.1`` on one machine, ``0.0.0.0`` across nodes. OSError: it can't be bound.

        `run_uid` is mixed into every code: notifications of another run don't verify.
        """
        self._mac = Mac(sha256(secret + b"\0" + run_uid.encode()))
        self._uid = uid
        self._clock = clock or SystemClock()
        self._count = 0
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], int] = {}
        self._clocks: dict[str, PeerClock] = {}
        self._senders: dict[Address, str] = {}
        """Address → the peer that sends from there: an answer about clocks may go there."""
        self.rejections: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()
        self._period_end = 0.0
        self._left = MOST_REJECTED
        self._muted_until: float | None = None
        self.reached: dict[str, None] = {}
        """This host's own addresses at which a valid notification from another participant arrived, first one first."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind((host, 0))
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    @property
    def senders(self) -> frozenset[str]:
        """Addresses that valid datagrams came from. For any thread."""
        return frozenset(host for host, _ in tuple(self._senders))

    def fileno(self) -> int:
        return self._socket.fileno()

    def notify(self, addresses: Iterable[Address], about: str = "", forward: Sequence[Address] = ()) -> None:
        """Ask each of `addresses` to look now. Never blocks, never raises: polling is the fallback.

        `about` is the key that was written, so that they look past their caches for it. They notify `forward` in turn.
        """
        packed = b"".join(socket.inet_aton(host) + port.to_bytes(2, "big") for host, port in forward[:MOST_FORWARDED])
        about = about if len(about) <= (_LONGEST_FORWARDED_KEY if forward else _LONGEST_KEY) else ""
        for address in addresses:
            self._send(_Said(uid=self._uid, kind="ring", about=about, forward=packed), address)

    def beat(
        self, addresses: Iterable[Address], about: str = "", *, hears: bool = False, refused: bool = False
    ) -> None:
        """Send each of `addresses` a heartbeat of this participant. From any thread.

        `about` is the key of the newest record; `hears`: it hears them; `refused`: the filesystem refuses it.
        """
        for address in addresses:
            self._send(_Said(uid=self._uid, kind="beat", about=about, hears=hears, refused=refused), address)

    def _send(self, said: _Said, address: Address) -> None:
        with self._lock:
            self._count += 1
            said.count = self._count
        said.to, said.port = address
        if not said.forward:  # with addresses there is no room
            said.sent_ns = uptime_ns(self._clock)
            known = self._clocks.get(self._senders.get(address, ""))
            said.ahead_ns = known.bound_to_send(said.sent_ns) if known is not None else None
        body = _encode(said)
        try:
            socket.inet_pton(socket.AF_INET, said.to)  # a name would be looked up, which blocks
            self._socket.sendto(self._mac.of(body) + body, address)
        except (OSError, OverflowError, ValueError):
            pass

    def offset_to(self, uid: str) -> Offset | None:
        """Nanoseconds by which this host's clock since its boot is ahead of that of `uid`'s host; None: not known. Any
        thread."""
        known = self._clocks.get(uid)
        return None if known is None else known.offset(uptime_ns(self._clock))

    def travel_from(self, uid: str) -> tuple[int, int] | None:
        """Nanoseconds that packets from there take, as `PeerClock.travel`. Any thread."""
        known = self._clocks.get(uid)
        return None if known is None else known.travel(uptime_ns(self._clock))

    def muted_for(self) -> float:
        """Seconds for which waiting for a datagram makes no sense: there are too many invalid ones."""
        return 0.0 if self._muted_until is None else max(0.0, self._muted_until - self._clock.monotonic())

    def drain(self) -> ValidDatagrams:
        """Take in all waiting datagrams; nothing while `muted_for` says so."""
        now, found = self._clock.monotonic(), ValidDatagrams()
        if self._muted_until is not None:
            if now < self._muted_until:
                return found
            # What came in this time was dropped by the kernel, or drowns in what is in its queue now.
            found.muted = now - self._muted_until + PERIOD
            self._muted_until = None
        if now >= self._period_end:
            self._period_end, self._left = now + PERIOD, MOST_REJECTED
        for _ in range(1000):  # many valid ones must not keep the owner from its work either
            try:
                data, sender_address = self._socket.recvfrom(MAX_DATAGRAM + 1)
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error for something we sent
            accepted = self._accept(data)
            if isinstance(accepted, str):
                self._reject(accepted, sender_address)
                self._left -= 1
                if self._left <= 0:
                    self._muted_until = self._period_end
                    break
                continue
            found.alive.add(accepted.uid)
            if accepted.sent_ns is not None:
                clock = self._clocks.setdefault(accepted.uid, PeerClock())
                clock.received(sent_ns=accepted.sent_ns, received_ns=uptime_ns(self._clock), told_ns=accepted.ahead_ns)
                self._senders[sender_address] = accepted.uid
            if accepted.about:
                (found.about if accepted.kind == "ring" else found.newest).add(accepted.about)
            if accepted.kind == "ring":
                found.notified = True
                parts = [accepted.forward[at : at + 6] for at in range(0, len(accepted.forward) - 5, 6)]
                to = [(socket.inet_ntoa(part[:4]), int.from_bytes(part[4:], "big")) for part in parts]
                self.notify(to, accepted.about)
            else:
                found.hears[accepted.uid] = accepted.hears
                (found.refused.add if accepted.refused else found.refused.discard)(accepted.uid)
        return found

    def _accept(self, data: bytes) -> _Said | str:
        """Returns the reason to reject it where it is not valid."""
        if len(data) > MAX_DATAGRAM:
            return "oversized"
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not self._mac.verifies(mac, body):
            return "forged"
        try:
            said = _decode(body)
        except (MsgspecError, RecursionError):
            return "garbled"
        if said.port != self.port:
            return "misdirected"
        # Each kind has its own newest: a notification that a beat overtook must still notify.
        if said.count <= self._newest.get((said.uid, said.kind), 0):
            return "repeated"  # an honest one that was overtaken by its like is no loss
        self._newest[said.uid, said.kind] = said.count
        self.reached.setdefault(said.to)
        return said

    def _reject(self, reason: str, sender: Address) -> None:
        self.rejections[reason] += 1
        seen = (reason, sender[0])
        if seen in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(seen)
        level = logging.INFO if reason == "repeated" else logging.WARNING  # a network may double a packet
        logger.log(
            level, "dropped a packet from %s: %s; more of the same are only counted", sender[0], _REASONS[reason]
        )

    def log_rejections(self) -> None:
        if self.rejections:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.rejections.items()))
            logger.info("dropped packets in all: %s", counts)

    def close(self) -> None:
        self._socket.close()


def open_notifier(*, secret: bytes, run_uid: str, uid: str, host: str, addresses: Sequence[str]) -> Notifier | None:
    """A notifier, or None where there can be none; `addresses` are those by which others reach this host."""
    why = "this host has no IPv4 address that others could reach"
    if addresses:
        try:
            return Notifier(secret=secret, run_uid=run_uid, uid=uid, host=host)
        except OSError as error:
            why = f"no datagram socket can be bound to {host}: {error.strerror or error}"
    logger.warning("%s; going on without packets, by looking at the files alone, which is slower", why)
    return None
