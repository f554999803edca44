"""The doctor's network probe on nodes with a network of their own: a sound one, and one with each fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.base import codec
from hpc_elastic.doctor.findings import Finding, Level
from hpc_elastic.doctor.network_checks import judge_network
from hpc_elastic.doctor.network_probe import NetworkFacts
from tests.rigs.network_nodes import Network, require_network
from tests.rigs.network_nodes.network import NETNS_FOLDER

ROOT = Path(__file__).resolve().parents[2]
_PROBE = """
import os, sys
from pathlib import Path
from hpc_elastic.base import codec
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.doctor.network_probe import probe_network
from hpc_elastic.doctor.probe_site import ProbeSettings, ProbeSite
from hpc_elastic.store.file_store import FileStore

rank, count, folder, python = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
clock = SystemClock()
site = ProbeSite(
    rank=rank, world_size=count, node=f"n{rank}", folder=folder, settings=ProbeSettings(python=python), clock=clock,
    store=FileStore(folder / "store", clock=clock), env=os.environ, hosts=tuple(f"n{node}" for node in range(count)),
)
print(codec.dumps(probe_network(site)))
"""
_BOOT = 'hostname "$1"; shift; exec "$@"'


def probe(folder: Path, count: int, disturb: Callable[[Network], None] = lambda network: None) -> dict[str, Finding]:
    """The findings on `count` nodes, by check."""
    require_network()
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
    facts = {f"n{node}": codec.loads(NetworkFacts, text) for node, text in enumerate(said)}
    return {finding.check.removeprefix("network."): finding for finding in judge_network(facts)}


def test_a_sound_network(tmp_path: Path) -> None:
    found = probe(tmp_path, 3)
    addresses = "each node reaches each (n0 at 10.77.0.1, n1 at 10.77.0.2, n2 at 10.77.0.3)"
    assert (found["addresses"].level, found["addresses"].found) == (Level.OK, addresses)
    assert found["datagrams"].level is Level.OK
    assert found["clocks"].level is Level.OK
    assert found["clocks"].found.startswith("at most 0 ms apart")
    assert found["bandwidth"].level is Level.OK
    assert found["bandwidth"].found.endswith(
        "between two nodes by a plain TCP connection, as the workers' Python lacks torch"
    )
    # The namespaces have no name service.
    assert found["nodes-names"].found.startswith("n0 has no address on n0")


def test_datagrams_that_are_lost_and_a_slow_node(tmp_path: Path) -> None:
    def disturb(network: Network) -> None:
        network.drop_datagrams(1, 0.3)
        network.slow_down(2, mbit=40)

    found = probe(tmp_path, 4, disturb)
    assert found["addresses"].level is Level.OK
    lost = found["datagrams"]
    assert lost.level is Level.WARNING
    assert lost.found.count(" to n1 ") == 3
    assert lost.found.count("were lost") == 3
    slow = found["bandwidth"]
    assert slow.level is Level.WARNING
    assert slow.found.startswith("n2: 3")
    assert "Mbit/s with n3 and n" in slow.found


def test_a_node_that_cannot_be_reached(tmp_path: Path) -> None:
    found = probe(tmp_path, 4, lambda network: network.lose_from(3))
    cut_off = found["addresses"]
    assert cut_off.level is Level.PROBLEM
    assert "n0 does not reach n3 (10.77.0.4: timed out)" in cut_off.found
    assert found["datagrams"].level is Level.WARNING
    assert "from n3 to n0 100 of 100 were lost" in found["datagrams"].found
    assert found["bandwidth"].level is Level.PROBLEM
    assert found["bandwidth"].found.startswith("n3: no transfer over the network succeeded (with n2: ")
