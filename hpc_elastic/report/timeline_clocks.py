"""Whose wall clock is how far off: so that rows of different hosts can stand on one axis.

Where offsets were measured they are used, with their bounds. Elsewhere clocks are trusted, but for one that contradicts
the others: all nodes learn within a minute at most that a round is final, so a clock that shows that later, or earlier,
in every round by more than that is set wrong by about as much.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpc_elastic.report.clocks import ClockOffset, Clocks
from hpc_elastic.report.timeline_times import NodeTimes

SUSPECT_NS = 90 * 1_000_000_000
"""A node that learns late, behind caches that are trusted for a minute, is not taken for one with a wrong clock."""


def node_offsets(times: Iterable[NodeTimes], *, clocks: Clocks) -> dict[int, ClockOffset]:
    """How far the nodes' wall clocks are off, of one attempt.

    Args:
        times: All nodes' times.
        clocks: What was measured.

    Returns:
        Node index → offset; a node that is not there is trusted.
    """
    found = dict(clocks.offsets)
    rounds: dict[int, dict[int, int]] = {}
    for item in times:
        if item.final_ns is not None:
            known = found.get(item.node)
            rounds.setdefault(item.round, {})[item.node] = item.final_ns - (known.offset_ns if known else 0)
    deviations: dict[int, list[int]] = {}
    for finals in rounds.values():
        if len(finals) < 2:
            continue
        middle = _median_low(finals.values())
        for node, when in finals.items():
            deviations.setdefault(node, []).append(when - middle)
    for node, values in deviations.items():
        least, most = min(values), max(values)
        is_wrong = least > SUSPECT_NS or most < -SUSPECT_NS
        if node not in found and node != clocks.reference and is_wrong and most - least < SUSPECT_NS:
            bound = max(1_000_000_000, most - least)
            found[node] = ClockOffset(offset_ns=_median_low(values), bound_ns=bound, measured=False)
    return found


def _median_low(values: Iterable[int]) -> int:
    """`statistics` takes longer to import than a small run's report to be made."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
