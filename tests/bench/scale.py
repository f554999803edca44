"""What the rendezvous of 8 to 8192 nodes asks of a file server, and how long it takes, in simulated time.

`scale_world` says what is real and what is a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.spec import RendezvousSettings
from tests.bench.table import Number
from tests.model.scale_world import Node, World, failure

SPREAD = 0.1
"""Seconds within which all nodes start."""
_MOST_OPERATIONS = 60
_MOST_SECONDS = {1024: 2.0, 8192: 10.0}
_MOST_STEADY = {1024: 150.0, 8192: 500.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times in simulated seconds; operations of all nodes and the supervisor, per node."""

    first_operations: float
    """From the start of the agents to all in the first round."""
    first_seconds: float
    next_operations: float
    """From one worker's failure to all in the next round."""
    next_seconds: float
    next_calls: tuple[int, int]
    """The coordinator's system calls for files in that time, and the most of another node."""
    steady: float
    """Operations a second of all together while workers run."""
    lost_operations: float
    """From the coordinator's death to all others in the next round."""
    lost_seconds: float


class _Run:
    def __init__(self, nodes: int, *, doorbell: bool = True) -> None:
        self.settings = RendezvousSettings(min_nodes=1, max_nodes=nodes, expected_nodes=nodes, doorbell=doorbell)
        self.world, self._nodes = World(self.settings, doorbell=doorbell), nodes
        self._began = (0.0, 0)

    def start(self) -> None:
        world = self.world
        world.start(OBSERVER_NODE, at=0.0)
        for index in range(self._nodes):
            world.start(index, at=SPREAD * index / self._nodes)
        world.begin_beats()
        self.begin()
        world.run(lambda: len(world.agents()) == self._nodes, seconds=2 * SPREAD)

    def begin(self) -> None:
        self._began = (self.world.now, self.world.server.operations)

    def until_final(self, after: int, *, limit: float) -> tuple[float, float]:
        """Until all agents that live are in one round after number `after`: seconds and operations since `begin`."""
        world = self.world

        def final() -> bool:
            # The rounds that ended before are compared last: most nodes are asked most of the time.
            return len(world.agents()) > 0 and all(max(node.final_at, default=-1) > after for node in world.agents())

        assert world.run(final, seconds=limit), f"no round after {after} within {limit:g} s: {world.newest()}"
        seconds = max(max(node.final_at.values()) for node in world.agents()) - self._began[0]
        return seconds, (world.server.operations - self._began[1]) / self._nodes

    def steady(self) -> float:
        """Operations a second: of one whole cycle of looks and heartbeats, the first one left out."""
        intervals, doorbell = poll_intervals(self.settings), self.world.doorbell
        cycle = max(60.0, intervals.heartbeat_connected if doorbell else intervals.heartbeat)
        self.world.run(seconds=(1.2 if doorbell else 1.6) * cycle)
        before = self.world.server.operations
        self.world.run(seconds=cycle)
        return (self.world.server.operations - before) / cycle


def simulate(nodes: int) -> Measured:
    run = _Run(nodes)
    with run.world as world:
        run.start()
        first_seconds, first_operations = run.until_final(-1, limit=120)
        steady = run.steady()
        victim = world.agents()[nodes // 2]
        run.begin()
        for node in world.nodes:
            node.client.calls = 0
        victim.ask(lambda: _fail(victim))
        next_seconds, next_operations = run.until_final(0, limit=120)
        coordinator = next(node for node in world.agents() if node.info.uid == world.newest().leader)
        others = max(node.client.calls for node in world.nodes if node is not coordinator)
        next_calls = (coordinator.client.calls, others)
        world.run(seconds=3 * poll_intervals(run.settings).silence)  # all are in touch again
        run.begin()
        coordinator.alive = False
        lost_seconds, lost_operations = run.until_final(1, limit=600)
        assert world.newest().status is Status.FINAL
        assert len(world.newest().members) == nodes - 1, "nobody else was taken for lost"
    return Measured(
        first_operations=first_operations,
        first_seconds=first_seconds,
        next_operations=next_operations,
        next_seconds=next_seconds,
        next_calls=next_calls,
        steady=steady,
        lost_operations=lost_operations,
        lost_seconds=lost_seconds,
    )


def files_alone(nodes: int) -> float:
    """`Measured.steady` where no packets come through."""
    run = _Run(nodes, doorbell=False)
    with run.world:
        run.start()
        run.until_final(-1, limit=900)
        return run.steady()


def _fail(node: Node) -> None:
    node.participant.claims.report_failure(0, failure(node.info.node))
    node.participant.claims.sum_up_failures(0, failure(node.info.node))


def measure(*, quick: bool) -> list[Number]:
    """Minutes, for 8192 nodes."""
    rows = []
    for nodes in (8, 64) if quick else (8, 64, 1024, 8192):
        found, of = simulate(nodes), f"{nodes} nodes"
        for what, value, unit, goal in (
            ("start → final, operations per node", found.first_operations, "", _MOST_OPERATIONS),
            ("failure → next round, operations per node", found.next_operations, "", _MOST_OPERATIONS),
            ("start → final", found.first_seconds, "s", _MOST_SECONDS.get(nodes)),
            ("failure → next round", found.next_seconds, "s", None),
            ("coordinator dies → next round", found.lost_seconds, "s", None),
            ("operations a second while workers run", found.steady, "", _MOST_STEADY.get(nodes)),
        ):
            rows.append(Number(title=f"{of}: {what}", unit=unit, values=[value], goal=goal))
        if nodes <= 1024:
            rows.append(Number(title=f"{of}: the same, no packets", unit="", values=[files_alone(nodes)]))
    return rows
