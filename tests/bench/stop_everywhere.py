"""How long a worker's failure on one node takes to stop the workers on all others: 8 real agents, each with a network
namespace and an emulated NFS mount of its own.

From the failing worker's SIGKILL to the death of the last worker elsewhere, by the kernel's count. The workers end on
SIGTERM at once: what is measured is the news' way, not the workers'.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.bench.table import Number
from tests.rigs.network_nodes import NetworkRun
from tests.rigs.network_nodes.network import unavailable
from tests.rigs.network_nodes.nodes import seconds_to_stop
from tests.rigs.nfs_emulator import MountSettings, emulator

NODES = 8
_LONG = MountSettings(attributes=60.0, directories=60.0)
_TRUSTED = MountSettings(attributes=60.0, directories=60.0, revalidation="time")
_VARIANTS: tuple[tuple[str, MountSettings, dict[str, str], float], ...] = (
    ("NFS, caches of 3 s", MountSettings(), {}, 0.3),
    ("NFS, caches of 60 s", _LONG, {}, 0.3),
    ("listings trusted for 60 s, whatever is opened", _TRUSTED, {}, 0.3),
    ("NFS, caches of 3 s; `doorbell=off`", MountSettings(), {"doorbell": "off"}, 3.0),
)


def measure(*, quick: bool) -> list[Number]:
    """In each round the worker of another node fails; where `quick`, with and without packets. Nothing where this
    machine has no namespaces or FUSE."""
    if why := unavailable() or emulator.unavailable():
        print(f"not measured: {why}", file=sys.stderr)
        return []
    numbers = []
    for title, mount, conf, goal in _VARIANTS[:: 3 if quick else 1]:
        found = []
        with (
            tempfile.TemporaryDirectory(prefix="bench-") as folder,
            NetworkRun(Path(folder), nodes=NODES, mount_settings=mount, conf=conf) as run,
        ):
            index = run.wait_round(count=NODES)
            for count in range(2 if quick else 4):
                found.append(seconds_to_stop(run, index, (count * 3) % NODES, within=30))
                index = run.wait_round(count=NODES, after=index)
        numbers.append(Number(title=title, unit="s", values=found, goal=goal))
    return numbers
