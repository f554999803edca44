"""What the rendezvous of 8 to 8192 nodes asks of a file server, and how long it takes: simulated, and on emulated NFS.

`scale_world` says what is real and what is a model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.rendezvous.schedule import poll_intervals
from hpc_elastic.rendezvous.state import Status
from tests.bench import scale_compare
from tests.bench.scale_plot import Panel
from tests.bench.scale_world import Node, World, failure

SIZES = (8, 64, 1024, 8192)
QUICK_SIZES = (8, 64, 512)
EMULATED_SIZES = (8, 32, 64)
SPREAD = 0.1
"""Seconds within which all nodes start."""
MOST_CAS_OPERATIONS = 1_500_000
MOST_OPERATIONS_PER_NODE = 60
MOST_SECONDS = {1024: 2.0, 8192: 10.0}
MOST_STEADY = {1024: 150.0, 8192: 500.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One number of nodes. Times in simulated seconds; operations of all nodes and the supervisor, per node."""

    nodes: int
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
    datagrams: float
    """A second, of all together, in that time."""
    lost_operations: float
    """From the coordinator's death to all others in the next round."""
    lost_seconds: float
    files_alone: float | None
    """`steady` where no packets come through; None: not measured."""
    compared: scale_compare.Met
    real_seconds: float


class _Run:
    def __init__(self, world: World) -> None:
        self.world = world
        self._began = (0.0, 0)

    def begin(self) -> None:
        self._began = (self.world.now, self.world.server.operations)

    def operations(self) -> int:
        return self.world.server.operations - self._began[1]

    def until_final(self, after: int, *, limit: float) -> float:
        """Until all agents that live are in one round after number `after`. Returns the seconds since `begin`."""
        world = self.world

        def final() -> bool:
            # The rounds that ended before are compared last: most nodes are asked most of the time.
            return len(world.agents()) > 0 and all(max(node.final_at, default=-1) > after for node in world.agents())

        if not world.run(final, seconds=limit):
            record = world.newest()
            raise RuntimeError(f"no round after {after} within {limit:g} s: {record.status}, round {record.round}")
        return max(max(node.final_at.values()) for node in world.agents()) - self._began[0]


def measure(nodes: int, *, files_alone: bool = False) -> Measured:
    """Simulate one run of so many nodes."""
    began = time.monotonic()
    settings = RendezvousSettings(min_nodes=1, max_nodes=nodes, expected_nodes=nodes)
    with World(settings) as world:
        run = _start(world, nodes)
        first_seconds = run.until_final(-1, limit=120)
        first_operations = run.operations()
        steady, datagrams = _steady(world, settings)
        victim = world.agents()[nodes // 2]
        run.begin()
        for node in world.nodes:
            node.client.calls = 0
        victim.ask(lambda: _fail(victim))
        next_seconds = run.until_final(0, limit=120)
        next_operations = run.operations()
        coordinator = next(node for node in world.agents() if node.info.uid == world.newest().leader)
        others = max(node.client.calls for node in world.nodes if node is not coordinator)
        next_calls = (coordinator.client.calls, others)
        world.run(seconds=3 * poll_intervals(settings).silence)  # all are in touch again
        run.begin()
        coordinator.alive = False
        lost_seconds = run.until_final(1, limit=600)
        assert world.newest().status is Status.FINAL
        assert len(world.newest().members) == nodes - 1, "nobody else was taken for lost"
        lost_operations = run.operations()
    return Measured(
        nodes=nodes,
        first_operations=first_operations / nodes,
        first_seconds=first_seconds,
        next_operations=next_operations / nodes,
        next_seconds=next_seconds,
        next_calls=next_calls,
        steady=steady,
        datagrams=datagrams,
        lost_operations=lost_operations / nodes,
        lost_seconds=lost_seconds,
        files_alone=_files_alone(nodes) if files_alone else None,
        compared=scale_compare.meet(
            nodes, spread=SPREAD, most_operations=MOST_CAS_OPERATIONS, steady_seconds=2 * scale_compare.RENEW_SECONDS
        ),
        real_seconds=time.monotonic() - began,
    )


def _start(world: World, nodes: int) -> _Run:
    world.start(OBSERVER_NODE, at=0.0)
    for index in range(nodes):
        world.start(index, at=SPREAD * index / nodes)
    world.begin_beats()
    run = _Run(world)
    run.begin()
    world.run(lambda: len(world.agents()) == nodes, seconds=2 * SPREAD)
    return run


def _steady(world: World, settings: RendezvousSettings) -> tuple[float, float]:
    """Operations and datagrams a second: of one whole cycle of looks and heartbeats, the first one left out."""
    intervals = poll_intervals(settings)
    cycle = max(60.0, intervals.heartbeat_connected if world.doorbell else intervals.heartbeat)
    world.run(seconds=(1.2 if world.doorbell else 1.6) * cycle)
    operations, datagrams = world.server.operations, world.datagrams
    world.run(seconds=cycle)
    return (world.server.operations - operations) / cycle, (world.datagrams - datagrams) / cycle


def _files_alone(nodes: int) -> float:
    settings = RendezvousSettings(min_nodes=1, max_nodes=nodes, expected_nodes=nodes, doorbell=False)
    with World(settings, doorbell=False) as world:
        _start(world, nodes).until_final(-1, limit=900)
        return _steady(world, settings)[0]


def _fail(node: Node) -> None:
    node.participant.claims.report_failure(0, failure(node.info.node))
    node.participant.claims.sum_up_failures(0, failure(node.info.node))


def table(rows: Sequence[Measured]) -> list[str]:
    """As lines of Markdown."""
    lines = [
        "| nodes | operations per node, start → final | the same, failure → next round | start → final | failure → "
        "next round | coordinator dies → next round | operations/s while workers run | the same, no packets "
        "| datagrams/s |",
        "| ---: |" + " ---: |" * 8,
    ]
    for row in rows:
        lines.append(
            f"| {row.nodes} | {_judged(row.first_operations, MOST_OPERATIONS_PER_NODE, 0)} | "
            f"{_judged(row.next_operations, MOST_OPERATIONS_PER_NODE, 0)} | "
            f"{_judged(row.first_seconds, MOST_SECONDS.get(row.nodes), 2, ' s')} | {row.next_seconds:.2f} s | "
            f"{row.lost_seconds:.1f} s | {_judged(row.steady, MOST_STEADY.get(row.nodes), 0)} | "
            f"{'–' if row.files_alone is None else f'{row.files_alone:.0f}'} | {row.datagrams:.0f} |"
        )
    lines += [
        "",
        "Beside it, one document that all change by compare-and-swap, on the same server:",
        "",
        "| nodes | operations per node, start → final | start → final | operations/s for renewals | text read |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cas = row.compared
        done = cas.seconds is not None
        seconds = f"{cas.seconds:.1f} s" if done else f"{cas.joined} nodes are in after {cas.operations} operations"
        lines.append(
            f"| {row.nodes} | {f'{cas.operations / row.nodes:.0f}' if done else '–'} | {seconds} | "
            f"{'–' if cas.steady is None else f'{cas.steady:.0f}'} | {_size(cas.read_bytes)} |"
        )
    return lines


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _judged(value: float, most: float | None, digits: int, unit: str = "") -> str:
    shown = f"{value:.{digits}f}{unit}"
    if most is None:
        return shown
    return f"{shown} (≤ {most:g})" if value <= most else f"**{shown}** (≤ {most:g})"


def panels(rows: Sequence[Measured]) -> list[Panel]:
    """The plot's."""
    met = [row for row in rows if row.compared.seconds is not None]
    return [
        Panel(
            title="file server's operations per node",
            ours=[(row.nodes, row.first_operations) for row in rows],
            theirs=[(row.nodes, row.compared.operations / row.nodes) for row in met],
            low=1,
            high=1000,
            bound=MOST_OPERATIONS_PER_NODE,
        ),
        Panel(
            title="seconds until all run",
            ours=[(row.nodes, row.first_seconds) for row in rows],
            theirs=[(row.nodes, row.compared.seconds) for row in met if row.compared.seconds is not None],
            low=0.1,
            high=100,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """One number of nodes, each with an emulated NFS mount and a thread of its own. Per node, and real seconds."""

    nodes: int
    first_operations: float
    first_seconds: float
    next_operations: float
    next_seconds: float


def emulate(nodes: int) -> Emulated:
    """Count a real round's operations on the NFS emulator. Needs FUSE and root."""
    from tests.rigs.nfs_emulator import MountSettings, NfsEmulator
    from tests.rigs.rendezvous_threads import ThreadNode, all_in_round, run_until

    settings = RendezvousSettings(min_nodes=1, max_nodes=nodes, expected_nodes=nodes)
    caches = MountSettings(attributes=3.0, directories=30.0)
    with tempfile.TemporaryDirectory(prefix="hpc-elastic-bench-") as backing:
        (Path(backing) / "store").mkdir(mode=0o700)
        with NfsEmulator(Path(backing), mounts=nodes, settings=caches) as emulator:
            emulator.reset_counters()
            running = [ThreadNode(index, emulator.paths[index], settings) for index in range(nodes)]
            try:
                first_seconds = run_until(running, lambda: all_in_round(running, 0), seconds=120)
                first = emulator.counters().total()
                emulator.reset_counters()
                running[nodes // 2].fail()
                next_seconds = run_until(running, lambda: all_in_round(running, 1), seconds=120)
                following = emulator.counters().total()
            finally:
                for node in running:
                    node.stop()
    return Emulated(
        nodes=nodes,
        first_operations=first / nodes,
        first_seconds=first_seconds,
        next_operations=following / nodes,
        next_seconds=next_seconds,
    )


def emulated_table(rows: Sequence[Emulated]) -> list[str]:
    """As lines of Markdown."""
    lines = [
        "| nodes | operations per node, start → final | the same, failure → next round | start → final | failure → "
        "next round |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row.nodes} | {_judged(row.first_operations, MOST_OPERATIONS_PER_NODE, 0)} | "
            f"{_judged(row.next_operations, MOST_OPERATIONS_PER_NODE, 0)} | {row.first_seconds:.2f} s | "
            f"{row.next_seconds:.2f} s |"
        )
    return lines


def measure_all(sizes: Sequence[int], progress: Callable[[str], None]) -> list[Measured]:
    """One after the other; without packets too up to a thousand nodes."""
    rows = []
    for nodes in sizes:
        progress(f"rendezvous of {nodes} simulated nodes")
        rows.append(measure(nodes, files_alone=nodes <= 1024))
        progress(f"  {rows[-1].real_seconds:.0f} s")
    return rows


def emulate_all(sizes: Sequence[int], progress: Callable[[str], None]) -> list[Emulated]:
    """One after the other; none where there is no FUSE."""
    from tests.rigs.nfs_emulator import unavailable

    reason = unavailable()
    if reason is not None:
        progress(f"no emulated NFS: {reason}")
        return []
    rows = []
    for nodes in sizes:
        progress(f"rendezvous of {nodes} nodes on emulated NFS")
        rows.append(emulate(nodes))
    return rows
