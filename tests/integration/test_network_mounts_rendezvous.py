"""The rendezvous on real network filesystems, two clients each, by files alone: it meets, loses members, closes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rigs.chaos.clusters import HandlerCluster
from tests.rigs.chaos.driver import Chaos
from tests.rigs.chaos.places import Place
from tests.rigs.chaos.schedule import COORDINATOR, Action, Kind, Plan, Schedule
from tests.rigs.network_mounts import KINDS, NetworkMounts, missing_prerequisites, require_mounts

NODES = 4


class Mounted(Place):
    """A filesystem that is mounted already; the test looks at it through the first client."""

    def __init__(self, filesystem: NetworkMounts) -> None:
        self._paths = filesystem.paths
        for path in self._paths:
            (path / "meet").mkdir(mode=0o700, exist_ok=True)
            os.listdir(path)

    def mount(self, node: int) -> int:
        return node % len(self._paths)

    def path(self, node: int) -> Path:
        return self._paths[self.mount(node)] / "meet"

    def outside(self) -> Path:
        return self.path(0)


def live(filesystem: NetworkMounts, folder: Path) -> str:
    """Meet, lose a member, lose the coordinator, close. Returns what is wrong with that."""
    ttl = 3.0 + filesystem.kind.delay
    plan = Plan(nodes=NODES, min_nodes=2, bursts=2, ttl=ttl, doorbell=False, closes_itself=False)
    losses = tuple((Action(after=0.0, kind=Kind.LOSE_NODE, node=node),) for node in (NODES - 1, COORDINATOR))
    schedule = Schedule(seed=0, plan=plan, bursts=losses, clocks=(0.0,) * NODES, too_few=False)
    place = Mounted(filesystem)
    chaos = Chaos(schedule, HandlerCluster(folder, place, plan), place)
    complaints = chaos.run()
    assert len(chaos.evidence.injections) == 2 or complaints
    print(f"{filesystem.kind.name}: met, and met again after each loss, in {chaos.evidence.recoveries} s")
    return "\n".join([*complaints, chaos.report()]) if complaints else ""


@pytest.fixture(scope="module")
def outcomes(
    network_mounts: Callable[[str], NetworkMounts], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Future[str]]]:
    """All of them at the same time: they mostly wait."""
    with ThreadPoolExecutor(len(KINDS)) as pool:

        def start(kind: str) -> str:
            return live(network_mounts(kind), tmp_path_factory.mktemp(kind))

        started = {kind: pool.submit(start, kind) for kind in KINDS if not missing_prerequisites(kind)}
        yield started.__getitem__


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_go_on_without_a_member_and_without_the_coordinator(
    kind: str, outcomes: Callable[[str], Future[str]]
) -> None:
    require_mounts(kind)
    assert outcomes(kind).result(900) == ""
