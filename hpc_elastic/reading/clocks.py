"""How far the nodes' clocks are apart, as far as it is known: so that what they wrote can stand in one order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hpc_elastic.events import read_events
from hpc_elastic.report.timeline_clocks import node_offsets
from hpc_elastic.report.timeline_times import NodeTimes
from hpc_elastic.run_paths import AttemptPaths


def clock_offsets_ns(attempt: AttemptPaths) -> dict[int, int]:
    """Node → how far its wall clock is ahead, nanoseconds; a node that is not there is trusted.

    Where the agents measured it, against the clock of the node that most of them measured; else what the rounds show.
    """
    times: dict[tuple[int, int], NodeTimes] = {}
    words: dict[tuple[int, int], tuple[int, int]] = {}
    for event in read_events(attempt.events):
        node, when = _whole(event.get("node")), _whole(event.get("t"))
        if node is None or when is None:
            continue
        if event.get("event") == "round_final":
            index = _whole(event.get("round"))
            if index is not None:
                times.setdefault((index, node), NodeTimes(round=index, node=node, final_ns=when))
        elif event.get("event") == "clock_offset":
            reference, uptime, offset = (_whole(event.get(key)) for key in ("reference", "uptime_ns", "offset_ns"))
            if reference is not None and uptime is not None and offset is not None:
                words[node, reference] = (when - uptime, offset)
    found = {node: offset.offset_ns for node, offset in node_offsets(times.values(), hosts={}, measured={}).items()}
    return found | measured_offsets(words)


def measured_offsets(words: dict[tuple[int, int], tuple[int, int]]) -> dict[int, int]:
    """Node → how far its wall clock is ahead of the reference's.

    Args:
        words: (node, reference) → the node's wall clock less its time since boot, and how far the latter is ahead of
            the reference's; what a node says of itself as the reference is its wall clock alone.
    """
    counts = Counter(reference for node, reference in words if (reference, reference) in words)
    if not counts:
        return {}
    reference = max(counts, key=lambda one: (counts[one], -one))
    own, _ = words[reference, reference]
    return {node: wall - own + offset for (node, of), (wall, offset) in words.items() if of == reference}


def clock_offsets_us(attempt: AttemptPaths) -> dict[int, int]:
    """The same in microseconds."""
    return {node: offset // 1000 for node, offset in clock_offsets_ns(attempt).items()}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
