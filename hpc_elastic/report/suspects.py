"""Which ranks to look at where every failure of a round is a symptom: pure, over what is known of the others.

A rank that ended with 0 while the others still needed it is the likeliest one: its sockets closed, and every peer that
was in a collective with it lost a connection. Next come the ranks that differ from the others by what they were doing,
and then the ranks that neither failed nor ended: one of them hung, was
late, or was just not as fast as the others to notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpc_elastic.base.text import ranges, seconds_text
from hpc_elastic.failures.collectives import NOTHING, Comparison, is_with_the_others
from hpc_elastic.failures.ranking import Moment, Order, Suspect, gap_ns, order_of
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.history import WorkerEnd
from hpc_elastic.run.activities import Activity, Doing

MOST_SUSPECTS = 16
_HOSTS = 3
_SILENT = "it hung, was late, or ended early"


def find_suspects(
    failed: Sequence[int],
    first: Moment,
    *,
    ends: Sequence[WorkerEnd] = (),
    compared: Comparison = NOTHING,
    activities: Sequence[Activity] = (),
    ranks: Mapping[int, str] | None = None,
    clocks: Clocks,
) -> tuple[Suspect, ...]:
    """The ranks to look at, the likeliest first; empty where all ranks failed in the same way.

    Args:
        failed: The ranks with a symptom.
        first: When the first symptom was seen.
        ends: The round's.
        compared: What the ranks were doing shows together.
        activities: What the ranks were doing.
        ranks: The host of every rank of the round, where it is known.
        clocks: What two hosts' times are worth.
    """
    if compared.is_of_all:
        return ()
    hosts = ranks or {}
    early = []
    for end in ends:
        if end.exitcode == 0 and not end.stopped and end.rank not in failed:
            moment = clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)
            gap = gap_ns(moment, first)
            if gap >= 0 or order_of(first, moment) is not Order.KNOWN:
                early.append((-gap, end.rank))
    found = [Suspect(rank=rank, host=hosts.get(rank, ""), why=_how_early(-behind)) for behind, rank in sorted(early)]
    known = {suspect.rank for suspect in found}
    found += [suspect for suspect in compared.suspects if suspect.rank not in known]
    if found:
        return tuple(found[:MOST_SUSPECTS])
    ended = {end.rank for end in ends if not end.stopped}
    doing = {activity.rank: activity for activity in activities if activity.doing is not Doing.UNKNOWN}
    alike = {rank for rank, activity in doing.items() if is_with_the_others(activity, activities)}
    silent = sorted(hosts.keys() - set(failed) - ended - alike)
    return tuple(
        Suspect(
            rank=rank,
            host=hosts[rank],
            why=f"it did not fail; it was {doing[rank].where}" if rank in doing else _SILENT,
        )
        for rank in silent[:MOST_SUSPECTS]
    )


def _how_early(gap: int) -> str:
    if gap < 1_000_000:
        return "it ended with 0 at about the same time"
    return f"it ended with 0 {seconds_text(gap / 1e9)} before"


def look_at(suspects: Sequence[Suspect]) -> str:
    """One sentence without its end: where to look."""
    first = suspects[0]
    if len(suspects) == 1:
        where = f" on {first.host}" if first.host else ""
        did = f", which did not fail: {first.why}" if first.why == _SILENT else f": {first.why}"
        return f"Look at rank {first.rank}{where}{did}"
    hosts = dict.fromkeys(suspect.host for suspect in suspects if suspect.host)
    where = f" on {', '.join(hosts)}" if len(hosts) <= _HOSTS else f" on {len(hosts)} nodes"
    numbers = ranges([suspect.rank for suspect in suspects]) + (" ..." if len(suspects) == MOST_SUSPECTS else "")
    if first.why == _SILENT:
        return f"Look at ranks {numbers}{where}, which did not fail: one of them hung, was late, or ended early"
    return f"Look at ranks {numbers}{where}, rank {first.rank} first: {first.why}"
