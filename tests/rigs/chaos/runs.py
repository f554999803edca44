"""One chaotic run from a seed to its judgement: for tests and for the command line alike."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.rigs.chaos.clusters import AgentCluster, Cluster, HandlerCluster
from tests.rigs.chaos.driver import Chaos
from tests.rigs.chaos.judge import known_gaps
from tests.rigs.chaos.places import EmulatedNfs, NetworkFilesystem, Place, SmallDisk, network_kinds
from tests.rigs.chaos.schedule import Kind, Plan, make_schedule
from tests.rigs.network_mounts import KINDS
from tests.rigs.nfs_emulator import MountSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """What makes a run: with the same values it is disturbed in the same way."""

    seed: int
    place: str
    nodes: int = 4
    min_nodes: int = 2
    bursts: int = 3
    ttl: float = 3.0
    doorbell: bool = True
    handlers: bool = False

    def with_seed(self, seed: int) -> ChaosRun:
        """The same with other chances."""
        return replace(self, seed=seed)

    def command(self) -> str:
        """What replays it."""
        words = f"python -m tests.rigs.chaos --seed {self.seed} --place {self.place} --nodes {self.nodes}"
        words += f" --min-nodes {self.min_nodes} --bursts {self.bursts} --ttl {self.ttl:g}"
        return words + (" --handlers" if self.handlers else "") + ("" if self.doorbell else " --no-doorbell")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosResult:
    run: ChaosRun
    complaints: list[str]
    gaps: list[str]
    recoveries: list[float]
    rounds: int
    injections: int
    seconds: float
    report: str

    def summary(self) -> str:
        slowest = max(self.recoveries, default=0.0)
        text = (
            f"seed {self.run.seed} on {self.run.place}: {self.injections} injections, {self.rounds} rounds, "
            f"slowest recovery {slowest:.1f} s, {self.seconds:.0f} s"
        )
        lines = [text, *(f"    known gap: {gap}" for gap in self.gaps)]
        if self.complaints:
            lines += ["  WRONG: " + text for text in self.complaints]
            lines.append(f"  replay: {self.run.command()}")
        return "\n".join(lines)


def _nfs(run: ChaosRun, folder: Path, settings: MountSettings) -> Place:
    return EmulatedNfs(folder, mounts=min(run.nodes, 8), settings=settings)


def _network(kind: str) -> Callable[[ChaosRun, Path], Place]:
    return lambda run, folder: NetworkFilesystem(kind, mounts=min(run.nodes, 3))


PLACES: dict[str, Callable[[ChaosRun, Path], Place]] = {
    "disk": lambda run, folder: SmallDisk(folder),
    "nfs": lambda run, folder: _nfs(run, folder, MountSettings()),
    "nfs-coarse": lambda run, folder: _nfs(run, folder, MountSettings(granularity=1.0, clock_offset=-3600.0)),
    "nfs-ahead": lambda run, folder: _nfs(
        run, folder, MountSettings(attributes=1.0, directories=1.0, clock_offset=3600.0)
    ),
    **{kind: _network(kind) for kind in KINDS},
}
"""By name: ext4; emulated NFS with 3 s caches; the same with times by the second from a server an hour behind; with 1 s
caches, from one an hour ahead; and the real network filesystems."""


def plan_of(run: ChaosRun) -> Plan:
    return Plan(
        nodes=run.nodes,
        min_nodes=run.min_nodes,
        bursts=run.bursts,
        ttl=run.ttl,
        kinds=tuple(kind for kind in _kinds(run.place) if not (run.handlers and kind is Kind.KILL_WORKER)),
        doorbell=run.doorbell,
        closes_itself=not run.handlers,
        kills_per_node=1000 if run.handlers else 3,
    )


def _kinds(place: str) -> tuple[Kind, ...]:
    if place == "disk":
        return SmallDisk.kinds
    return network_kinds(place) if place in KINDS else EmulatedNfs.kinds


def run_chaos(run: ChaosRun, *, say: Callable[[str], None] = lambda _: None, keep: bool = False) -> ChaosResult:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    complaints: list[str] = ["it did not come to a judgement"]
    try:
        with PLACES[run.place](run, folder) as place:
            plan = plan_of(run)
            schedule = make_schedule(run.seed, plan)
            cluster: Cluster = (HandlerCluster if run.handlers else AgentCluster)(folder, place, plan)
            chaos = Chaos(schedule, cluster, place, say=say)
            complaints = chaos.run()
            if keep and complaints:
                with suppress(OSError):  # shutil.Error is one too: of a hung filesystem nothing can be kept
                    shutil.copytree(place.outside(), folder / "kept", symlinks=True)
            evidence = chaos.evidence
            return ChaosResult(
                run=run,
                complaints=complaints,
                gaps=known_gaps(evidence),
                recoveries=evidence.recoveries,
                rounds=1 + max((seen.record.round for seen in evidence.records), default=-1),
                injections=len(evidence.injections),
                seconds=time.monotonic() - began,
                report=chaos.report(),
            )
    finally:
        if keep and complaints:
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
