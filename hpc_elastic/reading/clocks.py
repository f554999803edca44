"""How far the nodes' clocks are apart, as far as it is known: so that what they wrote can stand in one order."""

from __future__ import annotations

from hpc_elastic.reading.event_files import events_named
from hpc_elastic.report.clocks import CLOCK_EVENTS, ClocksBuilder
from hpc_elastic.report.collect_values import integer
from hpc_elastic.report.timeline_clocks import node_offsets
from hpc_elastic.report.timeline_times import NodeTimes
from hpc_elastic.run_paths import AttemptPaths


def clock_offsets_ns(attempt: AttemptPaths) -> dict[int, int]:
    """Node → how far its wall clock is ahead, nanoseconds; a node that is not there is trusted.

    Where the agents measured it, so far; else what the rounds show.
    """
    times: dict[tuple[int, int], NodeTimes] = {}
    clocks = ClocksBuilder()
    for event in events_named(attempt, {*CLOCK_EVENTS, "round_final"}):
        if event["event"] in CLOCK_EVENTS:
            clocks.take(event)
        else:
            node, index, when = (integer(event.get(key)) for key in ("node", "round", "t"))
            if node is not None and index is not None and when is not None:
                times.setdefault((index, node), NodeTimes(round=index, node=node, final_ns=when))
    return {node: offset.offset_ns for node, offset in node_offsets(times.values(), clocks=clocks.build()).items()}


def clock_offsets_us(attempt: AttemptPaths) -> dict[int, int]:
    """The same in microseconds."""
    return {node: offset // 1000 for node, offset in clock_offsets_ns(attempt).items()}
