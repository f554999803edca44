"""Whose wall clock is how far off: so that rows of different hosts can stand on one axis.

Where offsets were measured they are used, with their bounds. Elsewhere clocks are trusted, but for one that contradicts
the others: all nodes learn within a minute at most that a round is final, so a clock that shows that later, or earlier,
in every round by more than that is set wrong by about as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median_low

from hpc_elastic.light_dataclass import dataclass
from hpc_elastic.report.timeline_times import NodeTimes

SUSPECT_NS = 90 * 1_000_000_000
"""A node that learns late, behind caches that are trusted for a minute, is not taken for one with a wrong clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a clock is ahead of the reference."""

    offset_ns: int
    """To be subtracted from its times."""
    bound_ns: int
    """It is off by at most so much more or less."""
    measured: bool = True
    """False: concluded from the rounds."""


def node_offsets(
    times: Iterable[NodeTimes], *, hosts: Mapping[int, str], measured: Mapping[str, ClockOffset]
) -> dict[int, ClockOffset]:
    """The clocks that are known not to be right, of one attempt.

    Args:
        times: All nodes' times.
        hosts: Node index → name.
        measured: Host name → its clock's offset.

    Returns:
        Node index → offset; a node that is not there is trusted.
    """
    found = {node: measured[host] for node, host in hosts.items() if host in measured}
    rounds: dict[int, dict[int, int]] = {}
    for item in times:
        if item.final_ns is not None:
            rounds.setdefault(item.round, {})[item.node] = item.final_ns
    deviations: dict[int, list[int]] = {}
    for finals in rounds.values():
        if len(finals) < 2:
            continue
        middle = median_low(finals.values())
        for node, when in finals.items():
            deviations.setdefault(node, []).append(when - middle)
    for node, values in deviations.items():
        least, most = min(values), max(values)
        is_wrong = least > SUSPECT_NS or most < -SUSPECT_NS
        if node not in found and is_wrong and most - least < SUSPECT_NS:
            bound = max(1_000_000_000, most - least)
            found[node] = ClockOffset(offset_ns=median_low(values), bound_ns=bound, measured=False)
    return found
