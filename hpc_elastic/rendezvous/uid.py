"""Names of participants: unique for every agent start, readable, and ordered on one node."""

from __future__ import annotations

import os

from hpc_elastic.clock import Clock

_TIME_BITS = 48
_TIME_SHIFT = 16
OBSERVER_PLACE = 99999
"""The node index in the uid of a supervisor, which is no node."""


def new_uid(node: int, host: str, clock: Clock, *, start: int = 0) -> str:
    """``00003-nid003-0001f87ab3c4d5e6-9f3c``: node index, host, start, four random digits.

    Args:
        node: Node index.
        host: Its name.
        clock: For the start's last 12 digits: this host's time in units of 65.5 µs.
        start: Its first 4 digits: the how-manyeth agent of the node this is, where somebody counts. A node that comes
            back may have another time than before; this orders its agents first.
    """
    time = clock.time_ns() >> _TIME_SHIFT & (1 << _TIME_BITS) - 1
    started = min(start, 0xFFFF) << _TIME_BITS | time
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "_" for c in host)[:64]
    return f"{node:05d}-{readable}-{started:016x}-{os.urandom(2).hex()}"


def node_of(uid: str) -> int:
    """The node index in a uid, -1 where it makes no sense."""
    head = uid.partition("-")[0]
    return int(head) if head.isdecimal() else -1


def host_of(uid: str) -> str:
    """The host name in a uid, as readable as it was made there; the uid itself where it makes no sense."""
    parts = uid.split("-")
    return "-".join(parts[1:-2]) if len(parts) > 3 else uid


def supersedes(newer: str, older: str) -> bool:
    """Whether `newer` is a later agent of the node that `older` ran on: two starts, or two times, of the same host."""
    if node_of(newer) != node_of(older) or newer == older:
        return False
    return newer.rsplit("-", 2)[-2:] > older.rsplit("-", 2)[-2:]
