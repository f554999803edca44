"""The rendezvous on real network filesystems, two clients each, by files alone: it meets, loses members, closes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_elastic.rendezvous.handler import FileRendezvousHandler
from hpc_elastic.rendezvous.handler_config import HandlerConfig
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.network_mounts import KINDS, NetworkMounts, missing_prerequisites, require_mounts
from tests.rigs.rendezvous_process import leader, nodes

NODES = 4


def live(filesystem: NetworkMounts, folder: Path) -> list[int]:
    """Meet, lose a member, lose the coordinator, close. Returns who was lost."""
    for path in filesystem.paths:
        (path / "meet").mkdir(mode=0o700, exist_ok=True)
        os.listdir(path)
    settings = RendezvousSettings(
        timeout=120.0,
        last_call_timeout=5.0,
        heartbeat_interval=0.5,
        heartbeat_ttl=3.0 + filesystem.kind.delay,
        poll_interval=0.2,
        doorbell=False,
    )
    configs = [
        HandlerConfig(
            directory=str(filesystem.paths[node % 2] / "meet"),
            run_id="run",
            min_nodes=2,
            max_nodes=NODES,
            settings=settings,
            node=node,
            host=f"n{node}",
        )
        for node in range(NODES)
    ]
    patience = 60 + 5 * settings.heartbeat_ttl
    left = set(range(NODES))
    lost = []
    with nodes(configs, folder) as run:
        times = [run.wait_for_round(left, seconds=patience)]
        for coordinator in (False, True):
            leading = leader(filesystem.paths[0] / "meet")
            victim = leading if coordinator else max(left - {leading})
            run.kill(victim)
            lost.append(victim)
            left.remove(victim)
            times.append(run.wait_for_round(left, seconds=patience))
        versions = {run.said(node)[-1]["version"] for node in left}
        assert versions == {2}, "nobody else was taken for lost"
        handler = FileRendezvousHandler(configs[lost[0]], open_master=lambda: "")
        handler.set_closed()
        times.append(
            run.wait(lambda: all("closed" in run.said(node)[-1] for node in left), "the end", seconds=patience)
        )
    print(f"{filesystem.kind.name}: met, without a member, without the coordinator, closed after {times} s")
    return lost


@pytest.fixture(scope="module")
def outcomes(
    network_mounts: Callable[[str], NetworkMounts], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Future[list[int]]]]:
    """All of them at the same time: they mostly wait."""
    with ThreadPoolExecutor(len(KINDS)) as pool:

        def start(kind: str) -> list[int]:
            return live(network_mounts(kind), tmp_path_factory.mktemp(kind))

        started: dict[str, Future[list[int]]] = {}
        for kind in KINDS:
            if not missing_prerequisites(kind):
                started[kind] = pool.submit(start, kind)
        yield started.__getitem__


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_go_on_without_a_member_and_without_the_coordinator(
    kind: str, outcomes: Callable[[str], Future[list[int]]]
) -> None:
    require_mounts(kind)
    assert len(set(outcomes(kind).result(900))) == 2
