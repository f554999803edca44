"""The doctor's network probe on nodes with a network of their own: a sound one, and one with each fault."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_elastic.base import codec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.doctor.checks import DoctorFinding, Severity
from hpc_elastic.doctor.host import ProbeSettings, ProbeSite
from hpc_elastic.doctor.node_job import (
    PROGRAM,
    BandwidthFacts,
    ProbedNode,
    exchange_data,
    judge_bandwidth,
    judge_network,
)
from hpc_elastic.store.file_store import FileStore
from tests.rigs.network_nodes import Network
from tests.rigs.network_nodes.network import NETNS_FOLDER

ROOT = Path(__file__).resolve().parents[2]
_PROBE = """
import os, sys
from pathlib import Path
from hpc_elastic.base import codec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.doctor.node_job import probe_bandwidth, probe_network
from hpc_elastic.doctor.node_job import ProbedNode
from hpc_elastic.doctor.host import ProbeSettings, ProbeSite
from hpc_elastic.store.file_store import FileStore

rank, count, folder, python = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
clock = SystemClock()
site = ProbeSite(
    rank=rank, world_size=count, node=f"n{rank}", folder=folder, settings=ProbeSettings(python=python), clock=clock,
    store=FileStore(folder / "store", clock=clock), env=os.environ,
)
print(codec.dumps(ProbedNode(node=site.node, network=probe_network(site), bandwidth=probe_bandwidth(site))))
"""
_BOOT = 'hostname "$1"; shift; exec "$@"'


def probe(
    folder: Path, count: int, disturb: Callable[[Network], None] = lambda network: None
) -> dict[str, DoctorFinding]:
    """The findings on `count` nodes, by check."""
    python = folder / "python"  # without torch
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    with Network(count) as network:
        disturb(network)
        processes = []
        for node in range(count):
            argv = ["nsenter", f"--net={NETNS_FOLDER / network.netns(node)}", "unshare", "--uts"]
            argv += ["sh", "-c", _BOOT, "sh"]
            argv += [f"n{node}", sys.executable, "-c", _PROBE, str(node), str(count), str(folder), str(python)]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "1"}
            processes.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE))
        said = [process.communicate(timeout=180)[0] for process in processes]
    facts = [codec.loads(ProbedNode, text) for text in said]
    found = [
        *judge_network({each.node: each.network for each in facts if each.network}),
        # Of one check's, the worst is the first.
        *reversed(list(judge_bandwidth({each.node: each.bandwidth for each in facts if each.bandwidth}))),
    ]
    return {finding.check.removeprefix("network."): finding for finding in found}


def test_a_sound_network(tmp_path: Path) -> None:
    found = probe(tmp_path, 3)
    addresses = "each node reaches each (n0 at 10.77.0.1, n1 at 10.77.0.2, n2 at 10.77.0.3)"
    assert (found["addresses"].level, found["addresses"].found) == (Severity.OK, addresses)
    assert found["clocks"].level is Severity.OK
    assert found["clocks"].found.endswith(" ms apart")
    assert found["bandwidth"].level is Severity.OK
    assert found["bandwidth"].found.endswith(
        "between two nodes by a plain TCP connection, as the workers' Python lacks torch"
    )


def test_a_slow_node(tmp_path: Path) -> None:
    found = probe(tmp_path, 4, lambda network: network.slow_down(2, mbit=40))
    assert found["addresses"].level is Severity.OK
    slow = found["bandwidth"]
    assert slow.level is Severity.WARNING
    assert slow.found.startswith("n2: 3")
    assert " Mbit/s, where the median of 4 nodes is " in slow.found


def test_a_node_that_cannot_be_reached(tmp_path: Path) -> None:
    found = probe(tmp_path, 4, lambda network: network.lose_from(3))
    cut_off = found["addresses"]
    assert cut_off.level is Severity.PROBLEM
    assert "n0 does not reach n3 (10.77.0.4: timed out)" in cut_off.found
    assert found["bandwidth"].level is Severity.PROBLEM
    assert found["bandwidth"].found.startswith("no transfer between n")
    assert found["bandwidth"].way_out.startswith("--exclude n3,")


# -- transfers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def link_probe(python: list[str]) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen([*python, str(PROGRAM)], stdin=theirs, env={"GLOO_SOCKET_IFNAME": "lo"})
        try:
            yield ours
        finally:
            ours.close()
            process.wait(30)  # the end of the socket ends it


def exchange(folder: Path, controls: Sequence[socket.socket]) -> list[BandwidthFacts]:
    clock, count = SystemClock(), len(controls)

    def take_part(rank: int) -> BandwidthFacts:
        site = ProbeSite(
            rank=rank, world_size=count, node=f"n{rank}", folder=folder, clock=clock, env={},
            settings=ProbeSettings(python=""), store=FileStore(folder, clock=clock),
        )  # fmt: skip
        return exchange_data(site, controls[rank])

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(take_part, range(count)))


@pytest.mark.parametrize(("python", "backend"), [([sys.executable], "gloo"), ([sys.executable, "-S"], "tcp")])
def test_three_nodes_exchange_data_with_each_other(tmp_path: Path, python: list[str], backend: str) -> None:
    with link_probe(python) as first, link_probe(python) as second, link_probe(python) as third:
        found = exchange(tmp_path, [first, second, third])
    for rank, done in enumerate(found):
        assert done.backend == backend
        assert {one.node for one in done.transfers} == {f"n{node}" for node in range(3) if node != rank}
        assert all(one.seconds and one.bytes == 4 << 20 for one in done.transfers), done


def test_a_process_that_does_not_start_or_ends_is_an_answer(tmp_path: Path) -> None:
    with link_probe(["/bin/true"]) as ended, pytest.raises(TimeoutError, match="interpreter did not start it in time"):
        exchange(tmp_path, [ended])
    with link_probe([sys.executable, "-S"]) as one, link_probe([sys.executable, "-c", _ONCE]) as other:
        for done in exchange(tmp_path / "other", [one, other]):
            assert done.transfers[0].seconds is None
            assert done.transfers[0].why


_ONCE = """
import socket
socket.socket(fileno=0).send(b'{"backend": "tcp", "gpus": 0, "port": 1}')
"""


def test_a_partner_that_is_not_there_or_hangs_is_an_answer_with_the_reason() -> None:
    def ask(control: socket.socket, **order: object) -> object:
        shown = {"addresses": ["127.0.0.1"], "backend": "tcp", "gpus": 0, "token": "t", **order}
        control.send(json.dumps(shown).encode())
        return json.loads(control.recv(1 << 16))

    with link_probe([sys.executable, "-S"]) as one, socket.create_server(("127.0.0.1", 0)) as silent:
        one.recv(1 << 16)
        port = silent.getsockname()[1]
        assert ask(one, rank=1, port=port, seconds=1.0) == {"why": "127.0.0.1: timed out"}
        silent.close()
        assert ask(one, rank=1, port=port, seconds=1.0) == {"why": "127.0.0.1: Connection refused"}
        assert ask(one, rank=0, port=port, seconds=0.5) == {"why": "the other node did not connect"}
