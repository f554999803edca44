"""Notes the TCP sockets of each worker of this node, so that a peer's address in a message can be found to be a rank.

A worker that ends takes its sockets along, and its peers' messages name nothing but one of their addresses. So the
watch looks while the workers live: soon after their start, when process groups are made, and then ever more rarely.
What is not known then is not claimed. A look takes some milliseconds of one node, and nothing leaves the node but where
a round broke by symptoms alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.text import ranges
from hpc_elastic.run.activities import RankSockets
from hpc_elastic.workers.sockets import Address, network_id, read_sockets

FIRST_SECONDS = 3.0
_OFTEN_SECONDS = 60.0
"""Each look is 1.4 times as far from the start as the one before until then; twice as far later."""
_MOST_SECONDS = 600.0
_MOST_PORTS = 1024
"""Most ports of one rank in the event: a full mesh of more ranks is not worth its size."""


def next_look(age: float) -> float:
    return min(age * (1.4 if age < _OFTEN_SECONDS else 2.0), age + _MOST_SECONDS)


class SocketWatch:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self.due = self._began + FIRST_SECONDS
        self._known: dict[int, frozenset[Address]] = {}
        self.network = ""

    def look(self, running: Mapping[int, int]) -> None:
        found = read_sockets(running.values())
        self._known |= {rank: found[pid] for rank, pid in running.items() if pid in found}
        if running and not self.network:
            self.network = network_id(next(iter(running.values())))
        now = self._clock.monotonic()
        self.due = self._began + next_look(max(FIRST_SECONDS, now - self._began))

    def forget(self, rank: int) -> None:
        self._known.pop(rank, None)

    @property
    def ranks(self) -> tuple[RankSockets, ...]:
        return tuple(_of_rank(rank, addresses) for rank, addresses in sorted(self._known.items()))


def _of_rank(rank: int, addresses: frozenset[Address]) -> RankSockets:
    ports: dict[str, list[int]] = {}
    for ip, port in sorted(addresses)[:_MOST_PORTS]:
        ports.setdefault(ip, []).append(port)
    return RankSockets(rank=rank, ends=tuple((ip, ranges(found)) for ip, found in ports.items()))
