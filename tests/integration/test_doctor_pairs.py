"""Nodes that measure the network in pairs: who takes part, and real transfers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.doctor import pairs
from hpc_elastic.doctor.pairs import PROGRAM, LinkProbe, NetworkVerdict, Time, measure_pairs
from hpc_elastic.doctor.probe_site import ProbeSettings, ProbeSite
from hpc_elastic.store.file_store import FileStore

MIB = 1 << 20
Link = Callable[[int, int], "float | None"]


class FakeProbe(LinkProbe):
    """Its links take as long as the test says."""

    def __init__(self, node: int, link: Link) -> None:
        self._node, self._link = node, link
        self.ranks: list[object] = []

    def ready(self, seconds: float) -> Mapping[str, object] | None:
        return {"backend": "gloo", "gpus": 0, "port": 7000 + self._node}

    def measure(self, order: Mapping[str, object], seconds: float) -> Time:
        self.ranks.append(order["rank"])
        port = order["port"]
        assert isinstance(port, int)
        found = self._link(port - 7000, self._node)
        return Time(why="no route") if found is None else Time(seconds=found, bytes=4 * MIB)


def meet(root: Path, nodes: Mapping[int, LinkProbe], *, world_size: int = 0) -> dict[int, NetworkVerdict | str]:
    """All of `nodes` take part at once."""
    found: dict[int, NetworkVerdict | str] = {}
    clock = SystemClock()

    def take_part(node: int, probe: LinkProbe) -> None:
        site = ProbeSite(
            rank=node, world_size=world_size or len(nodes), node=f"n{node}", folder=root, clock=clock, env={},
            settings=ProbeSettings(python=""), store=FileStore(root, clock=clock),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            found[node] = measure_pairs(site, ("127.0.0.1",), probe)

    threads = [threading.Thread(target=take_part, args=item) for item in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_all_come_to_the_same_verdict(tmp_path: Path) -> None:
    probes = {node: FakeProbe(node, lambda a, b, node=node: None if 1 in (a, b, node) else 0.1) for node in range(4)}
    found = meet(tmp_path / "store", probes)
    assert found[0] == found[1] == found[2] == found[3]
    assert isinstance(found[0], NetworkVerdict)
    assert set(found[0].bad) == {1}
    assert [len(probe.ranks) for probe in probes.values()] == [2, 2, 2, 2]
    assert {rank for probe in probes.values() for rank in probe.ranks} == {0, 1}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_READY_SECONDS", 0.5)
    monkeypatch.setattr(pairs, "_ROUND_SECONDS", 0.5)


@pytest.mark.usefixtures("hurried")
def test_a_node_that_does_not_come_is_left_out_and_one_that_comes_late_goes_on_without(tmp_path: Path) -> None:
    found = meet(tmp_path, {node: FakeProbe(node, lambda a, b: 0.1) for node in (0, 2)}, world_size=3)
    assert isinstance(found[0], NetworkVerdict)
    assert found[0].seconds == {0: 0.1, 2: 0.1}
    late = meet(tmp_path, {1: FakeProbe(1, lambda a, b: 0.1)}, world_size=3)
    assert late == {1: "this node came too late for it"}


@pytest.mark.usefixtures("hurried")
def test_a_node_that_dies_while_it_measures_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    class Dies(FakeProbe):
        def measure(self, order: Mapping[str, object], seconds: float) -> Time:
            raise OSError("this node is gone")

    probes: dict[int, LinkProbe] = {node: FakeProbe(node, lambda a, b: 0.1) for node in range(3)}
    found = meet(tmp_path / "store", {**probes, 3: Dies(3, lambda a, b: None)})
    assert 3 not in found
    assert isinstance(found[0], NetworkVerdict)
    assert set(found[0].bad) == {3}


@pytest.mark.usefixtures("hurried")
def test_a_probe_that_never_answers_costs_its_node_no_more_than_the_check(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            (found,) = meet(tmp_path, {0: LinkProbe(ours)}, world_size=2).values()
        assert found == "the workers' interpreter did not start the probe in time"
        assert LinkProbe(ours).measure({}, 0.1) == Time(why="the process that measures has ended")


# -- real transfers ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def probe(python: list[str]) -> Iterator[LinkProbe]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen([*python, str(PROGRAM)], stdin=theirs, env={"GLOO_SOCKET_IFNAME": "lo"})
        try:
            yield LinkProbe(ours)
        finally:
            ours.close()
            process.wait(30)  # the end of the socket ends it


@pytest.mark.parametrize(("python", "backend"), [([sys.executable], "gloo"), ([sys.executable, "-S"], "tcp")])
def test_three_nodes_measure_each_pair(tmp_path: Path, python: list[str], backend: str) -> None:
    with probe(python) as first, probe(python) as second, probe(python) as third:
        found = meet(tmp_path / "store", {0: first, 1: second, 2: third})
    verdict = found[0]
    assert isinstance(verdict, NetworkVerdict)
    assert (verdict.backend, verdict.failed, dict(verdict.bad)) == (backend, (), {})
    assert sorted(verdict.seconds) == [0, 1, 2]
    assert verdict.bytes == 4 * MIB


def test_a_partner_that_is_not_there_or_hangs_is_an_answer_with_the_reason() -> None:
    with probe([sys.executable, "-S"]) as one, socket.create_server(("127.0.0.1", 0)) as silent:
        one.ready(30.0)
        port = silent.getsockname()[1]
        order = {"rank": 1, "addresses": ["127.0.0.1"], "port": port, "backend": "tcp", "gpus": 0, "token": "t"}
        late = one.measure(order, 1.0)
        assert (late.seconds, late.why) == (None, "127.0.0.1: timed out")
        silent.close()
        assert one.measure(order, 1.0).why == "127.0.0.1: Connection refused"
        assert one.measure({**order, "rank": 0}, 0.5).why == "the other node did not connect"
