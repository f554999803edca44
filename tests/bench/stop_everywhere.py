"""How long a worker's failure on one node takes to stop the workers on all others: 8 real agents, each with a network
namespace and an emulated NFS mount of its own.

From the failing worker's SIGKILL to the death of the last worker elsewhere, both as the kernel tells them. The workers
end on SIGTERM at once: what is measured is the news' way, not the workers'.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs.network_nodes import NetworkRun
from tests.rigs.network_nodes.network import unavailable
from tests.rigs.network_nodes.nodes import seconds_to_stop
from tests.rigs.nfs_emulator import MountSettings, emulator

NODES = 8
GOAL = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row."""

    title: str
    mount: MountSettings
    conf: Mapping[str, str] = field(default_factory=dict)
    goal: float = GOAL
    """Seconds, of the median."""


VARIANTS = (
    Variant(title="NFS, caches of 3 s", mount=MountSettings()),
    Variant(title="NFS, caches of 60 s", mount=MountSettings(attributes=60.0, directories=60.0)),
    Variant(
        title="listings trusted for 60 s, whatever is opened",
        mount=MountSettings(attributes=60.0, directories=60.0, revalidation="time"),
    ),
    Variant(title="NFS, caches of 3 s; `doorbell=off`", mount=MountSettings(), conf={"doorbell": "off"}, goal=3.0),
)


def why_not() -> str | None:
    """Why it can't be measured on this machine, or None."""
    return unavailable() or emulator.unavailable()


def measure(variant: Variant, rounds: int) -> list[float]:
    """Seconds, one for each round; in each the worker of another node fails."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        NetworkRun(Path(folder), nodes=NODES, mount_settings=variant.mount, conf=variant.conf) as run,
    ):
        index = run.wait_round(count=NODES)
        for count in range(rounds):
            found.append(seconds_to_stop(run, index, (count * 3) % NODES, within=30))
            index = run.wait_round(count=NODES, after=index)
    return found


def table(found: Mapping[str, Sequence[float]]) -> list[str]:
    """As lines of a Markdown table."""
    lines = [
        f"| a worker's death → that of the last worker on {NODES - 1} other nodes | seconds | goal | met |",
        "| --- | --- | --- | --- |",
    ]
    for variant in VARIANTS:
        values = found.get(variant.title)
        if values:
            middle = statistics.median(values)
            word = "yes" if middle <= variant.goal else "**no**"
            told = f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"
            lines.append(f"| {variant.title} | {told} | ≤ {variant.goal:g} | {word} |")
    return lines
