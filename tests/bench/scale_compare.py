"""The other way to meet, for comparison: one document in which everybody enters itself by compare-and-swap.

That is what the c10d rendezvous (one key in a TCPStore) and etcd's do. Here it has the same server: `scale_server`'s
latency and capacity, one operation for a read and one for a compare-and-swap, whose refusal brings the newest text.
As in torch's dynamic rendezvous, who is refused tries again at once, who is in looks every second until all are, and
each node renews its own entry every five seconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.scale_server import Server

ENTRY_BYTES = 60
LOOK_SECONDS = 1.0
RENEW_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """How it went."""

    joined: int
    """Nodes that were in the document at the end."""
    seconds: float | None
    """From the first node's start to the last one's sight of the full document; None: not within the limit."""
    operations: int
    read_bytes: int
    steady: float | None = None
    """Operations a second while everybody renews its entry."""


class _Document:
    def __init__(self) -> None:
        self.version = 0
        self.joined = 0


def meet(nodes: int, *, spread: float, most_operations: int, steady_seconds: float) -> Met:
    """Let so many nodes, started within `spread` seconds, find each other."""
    server, document = Server(), _Document()
    queue: list[tuple[float, int, Callable[[float], None]]] = []
    order = itertools.count()
    seen = 0
    read_bytes = 0
    last = 0.0

    def push(at: float, action: Callable[[float], None]) -> None:
        heapq.heappush(queue, (at, next(order), action))

    def change(at: float, known: int, then: Callable[[float], None], *, joins: bool) -> None:
        def answered(now: float) -> None:
            nonlocal read_bytes
            read_bytes += ENTRY_BYTES * document.joined
            if document.version == known:
                document.version += 1
                document.joined += joins
                then(now)
            else:
                change(now, document.version, then, joins=joins)

        push(server.serve(at, "compare-and-swap"), answered)

    def look(at: float, then: Callable[[float, int], None]) -> None:
        def answered(now: float) -> None:
            nonlocal read_bytes
            read_bytes += ENTRY_BYTES * document.joined
            then(now, document.version)

        push(server.serve(at, "read"), answered)

    def wait(now: float) -> None:
        nonlocal seen, last
        if document.joined == nodes:
            seen, last = seen + 1, max(last, now)
        else:
            push(now + LOOK_SECONDS, lambda at: look(at, lambda after, _: wait(after)))

    for index in range(nodes):
        push(spread * index / nodes, lambda at: look(at, lambda now, known: change(now, known, wait, joins=True)))
    while queue and seen < nodes and server.operations < most_operations:
        at, _, action = heapq.heappop(queue)
        action(at)
    operations, total = server.operations, read_bytes
    if seen < nodes:
        return Met(joined=document.joined, seconds=None, operations=operations, read_bytes=total)

    def renew(at: float) -> None:
        look(at, lambda now, known: change(now, known, lambda done: push(at + RENEW_SECONDS, renew), joins=False))

    queue.clear()
    for index in range(nodes):
        push(last + RENEW_SECONDS * index / nodes, renew)
    end = last + steady_seconds
    while queue and queue[0][0] < end and server.operations < operations + most_operations:
        at, _, action = heapq.heappop(queue)
        action(at)
    passed = min(end, queue[0][0] if queue else end) - last
    return Met(
        joined=nodes,
        seconds=last,
        operations=operations,
        read_bytes=total,
        steady=(server.operations - operations) / passed if passed > 0 else None,
    )
