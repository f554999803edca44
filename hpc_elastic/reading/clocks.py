"""How far the nodes' clocks are apart, as far as it is known: so that what they wrote can stand in one order."""

from __future__ import annotations

from hpc_elastic.events import read_events
from hpc_elastic.report.timeline_clocks import node_offsets
from hpc_elastic.report.timeline_times import NodeTimes
from hpc_elastic.run_paths import AttemptPaths


def clock_offsets_ns(attempt: AttemptPaths) -> dict[int, int]:
    """Node → how far its clock is ahead of the others, nanoseconds; a node that is not there is trusted."""
    times: dict[tuple[int, int], NodeTimes] = {}
    hosts: dict[int, str] = {}
    for event in read_events(attempt.events):
        if event.get("event") != "round_final":
            continue
        node, index, when = event.get("node"), event.get("round"), event.get("t")
        if isinstance(node, int) and isinstance(index, int) and isinstance(when, int):
            hosts[node] = str(event.get("host"))
            times.setdefault((index, node), NodeTimes(round=index, node=node, final_ns=when))
    offsets = node_offsets(times.values(), hosts=hosts, measured={})
    return {node: offset.offset_ns for node, offset in offsets.items()}


def clock_offsets_us(attempt: AttemptPaths) -> dict[int, int]:
    """The same in microseconds."""
    return {node: offset // 1000 for node, offset in clock_offsets_ns(attempt).items()}
