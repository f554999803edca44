"""``--health-checks network``: nodes that meet in a store, real transfers, and a run's start and restart with it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hpc_elastic.agent.health import Meeting
from hpc_elastic.agent.network_check import (
    PROGRAM,
    LinkProbe,
    NetworkCheck,
    NetworkVerdict,
    Time,
    judge_network,
)
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.run.health_limits import Check
from hpc_elastic.store.file_store import FileStore
from tests.rigs.local_run import LocalRun
from tests.rigs.network_nodes import NetworkRun, require_network
from tests.rigs.nfs_emulator import require_fuse

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


def meet(
    root: Path, nodes: Mapping[int, LinkProbe], *, expected: frozenset[int] | None = None, seconds: float = 20.0
) -> dict[int, NetworkVerdict | str]:
    """All of `nodes` take part at once."""
    found: dict[int, NetworkVerdict | str] = {}
    meeting = Meeting(name="start", nodes=expected or frozenset(nodes))

    def take_part(node: int, probe: LinkProbe) -> None:
        check = NetworkCheck(
            FileStore(root, clock=SystemClock()), meeting, node=node, host=f"n{node}", addresses=("127.0.0.1",),
            seconds=seconds, pause=lambda seconds: not threading.Event().wait(seconds),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            found[node] = check.run(probe)

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


def test_a_node_that_does_not_come_is_left_out_and_one_that_comes_late_goes_on_without(tmp_path: Path) -> None:
    root = tmp_path / "store"
    found = meet(root, {node: FakeProbe(node, lambda a, b: 0.1) for node in (0, 2)}, expected=frozenset({0, 1, 2}),
                 seconds=2.0)  # fmt: skip
    assert isinstance(found[0], NetworkVerdict)
    assert found[0].seconds == {0: 0.1, 2: 0.1}
    late = meet(root, {1: FakeProbe(1, lambda a, b: 0.1)}, expected=frozenset({0, 1, 2}))
    assert late == {1: "the other nodes have measured already"}
    alone = meet(tmp_path / "other", {0: FakeProbe(0, lambda a, b: 0.1)}, expected=frozenset({0, 1}), seconds=0.5)
    assert alone[0] == NetworkVerdict(backend="gloo"), "there is nothing to measure"


def test_a_node_that_dies_while_it_measures_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    class Dies(FakeProbe):
        def measure(self, order: Mapping[str, object], seconds: float) -> Time:
            raise OSError("this node is gone")

    probes: dict[int, LinkProbe] = {node: FakeProbe(node, lambda a, b: 0.1) for node in range(3)}
    found = meet(tmp_path / "store", {**probes, 3: Dies(3, lambda a, b: None)}, seconds=8.0)
    assert 3 not in found
    assert isinstance(found[0], NetworkVerdict)
    assert set(found[0].bad) == {3}
    assert not judge_network(found[0], 0)[0].reason


def test_a_probe_that_never_answers_costs_its_node_no_more_than_the_check(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            (found,) = meet(tmp_path / "s", {0: LinkProbe(ours)}, expected=frozenset({0, 1}), seconds=0.2).values()
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
        found = meet(tmp_path / "store", {0: first, 1: second, 2: third}, seconds=120.0)
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


# -- in a run ------------------------------------------------------------------------------------------------------

_TRAINS = """
tell("here")
others_in_round()
wait_for("end")
"""


def test_a_run_that_asks_for_it_measures_at_its_start_and_says_so(tmp_path: Path) -> None:
    options = ["--health-checks", "default,network"]
    with LocalRun(tmp_path, _TRAINS, nodes=2, options=options) as run:
        run.wait_moments("here", count=2, round_index=0)
        run.say("end")
        assert run.finish() == ExitCode.OK
        log = run.log()
        for node in (0, 1):
            assert f"[node{node}] network: " in log
        assert not run.events("health_warning")


_HANGS = """
import hpc_elastic
tell("here")
hpc_elastic.heartbeat(step=1)
if ROUND == 0 and RANK == 1:
    time.sleep(1000)
if ROUND == 0:
    while True:
        hpc_elastic.heartbeat(step=1)
        time.sleep(0.1)
"""


def test_the_network_is_measured_again_after_a_hang_and_not_after_another_failure(tmp_path: Path) -> None:
    options = ["--health-checks", "network", "--section-timeouts", "step:2.5", "--max-restarts", "2"]
    with LocalRun(tmp_path, _HANGS, nodes=2, options=options) as run:
        assert run.finish() == ExitCode.OK
        meetings = {path.name.rpartition("-")[0] for path in (run.attempt().store / "network").glob("*-plan")}
        assert meetings == {"start", "000000"}
        assert sum("network: " in line for line in run.log().splitlines()) == 4


def test_a_slow_node_is_warned_of_and_one_that_reaches_nobody_leaves(tmp_path: Path) -> None:
    require_fuse()
    require_network()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o700)

    def disturb(run: NetworkRun) -> None:
        run.network.slow_down(1, mbit=40)
        run.network.lose_from(4)

    limits = {Check.NETWORK: 40.0}
    with NetworkRun(tmp_path, nodes=6, min_nodes=2, python=str(python), health_checks=limits, before=disturb) as run:
        run.wait_round(count=5)
        (warned,) = run.events("health_warning")
        assert (warned["node"], warned["check"]) == (1, "network")
        assert warned["reason"].startswith("this node's network is slow: 3")
        assert " Mbit/s with n0 and n" in warned["reason"]
        (left,) = run.events("health_check_failed")
        assert left["node"] == 4
        assert left["reason"].startswith("health check failed: no transfer over the network succeeded (with n5: ")
        run.let_workers_end()
        run.wait_for_ends([0, 1, 2, 3, 5])
