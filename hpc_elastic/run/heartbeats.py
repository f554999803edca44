"""The last heartbeats of a node's workers: a file of each node, rewritten now and then, and part of some events."""

from __future__ import annotations

from msgspec import Struct


class RankHeartbeat(Struct, frozen=True, kw_only=True):
    """A worker's last heartbeat."""

    rank: int
    """Global rank."""
    local_rank: int = -1
    step: int | None = None
    section: str = ""
    age: float = 0.0
    """Seconds since the heartbeat, when this was written."""
    count: int = 0
    """Heartbeats in this round so far."""


class NodeHeartbeats(Struct, frozen=True, kw_only=True):
    """``heartbeats/node-<index>.json``: of the round that the node took part in last."""

    node: int
    host: str = ""
    round: int
    written_ns: int
    """By the node's wall clock."""
    ranks: tuple[RankHeartbeat, ...] = ()
