"""Names of participants: unique for every agent start, readable, and ordered on one node."""

from __future__ import annotations

import secrets

from hpc_elastic.clock import Clock


def new_uid(node: int, host: str, clock: Clock) -> str:
    """``00003-nid003-18a0c2d1e4f5a6b7-9f3c``: node index, host, this host's time at the start, four random digits."""
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "_" for c in host)[:64]
    return f"{node:05d}-{readable}-{clock.time_ns():016x}-{secrets.token_hex(2)}"


def node_of(uid: str) -> int:
    """The node index in a uid, -1 where it makes no sense."""
    head = uid.partition("-")[0]
    return int(head) if head.isdecimal() else -1


def supersedes(newer: str, older: str) -> bool:
    """Whether `newer` is a later agent of the node that `older` ran on: two times of the same host."""
    if node_of(newer) != node_of(older) or newer == older:
        return False
    return newer.rsplit("-", 2)[-2:] > older.rsplit("-", 2)[-2:]
