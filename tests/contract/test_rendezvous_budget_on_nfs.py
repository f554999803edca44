"""What a rendezvous asks of a server, counted by the NFS emulator: real mounts, real threads, real packets."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.nfs_emulator import MountSettings, NfsEmulator, require_fuse
from tests.rigs.rendezvous_threads import ThreadNode, all_in_round, run_until

NODES = 8
MOST_PER_NODE = 60


def test_a_round_of_eight_nodes_stays_within_the_budget(tmp_path: Path) -> None:
    """Some 42 to meet and 21 to meet again on an idle machine; each poll more, where it is busy, is one or two."""
    require_fuse()
    settings = RendezvousSettings(min_nodes=NODES, max_nodes=NODES, expected_nodes=NODES)
    (tmp_path / "store").mkdir(mode=0o700)
    caches = MountSettings(attributes=3.0, directories=30.0)
    with NfsEmulator(tmp_path, mounts=NODES, settings=caches) as emulator:
        emulator.reset_counters()
        nodes = [ThreadNode(index, path, settings) for index, path in enumerate(emulator.paths)]
        try:
            run_until(nodes, lambda: all_in_round(nodes, 0), seconds=60)
            assert emulator.counters().total() / NODES <= MOST_PER_NODE, emulator.counters()
            emulator.reset_counters()
            nodes[5].fail()
            run_until(nodes, lambda: all_in_round(nodes, 1), seconds=60)
            assert emulator.counters().total() / NODES <= MOST_PER_NODE / 2, emulator.counters()
        finally:
            for node in nodes:
                node.stop()
