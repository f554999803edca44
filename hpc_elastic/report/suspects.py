"""Which ranks to look at where every failure of a round is a symptom: pure, over what is known of the others.

A rank that ended with 0 while the others still needed it is the likeliest one: its sockets closed, and every peer that
was in a collective with it lost a connection. Next come the ranks that differ from the others by what they were doing,
and then the ranks that neither failed nor ended: one of them hung, was late, or was just not as fast as the others to
notice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from hpc_elastic.base.text import ranges, seconds_text
from hpc_elastic.failures.collectives import WAITS_FOR_RANKS, is_with_the_others
from hpc_elastic.failures.ranking import Moment, Order, Suspect, gap_ns, order_of
from hpc_elastic.failures.worker_failure import LOGGED_BEFORE, WorkerFailure
from hpc_elastic.report.clocks import Clocks
from hpc_elastic.report.history import WorkerEnd
from hpc_elastic.run.activities import Activity, Doing

MOST_SUSPECTS = 16
_TEARDOWN_NS = 5_000_000_000
"""What the end of an interpreter with torch in it takes on a busy node, at most."""
_HOSTS = 3
_PLURAL = {"it was": "they were", "it is": "they are", "it has": "they have", "its ": "their "}
_SINGULAR = re.compile(r"\bit (?:was|is|has|ended|had|did|never|entered|left)\b|\bits (?=last there|device)")
_SILENT = "it hung, was late, or ended early"


def find_early_ends(
    failed: Sequence[int],
    first: Moment,
    *,
    ends: Sequence[WorkerEnd],
    ranks: Mapping[int, str],
    clocks: Clocks,
) -> tuple[Suspect, ...]:
    """The ranks that ended with 0 before the first symptom, the earliest first.

    Args:
        failed: The ranks with a failure.
        first: When the first symptom was seen.
        ends: The round's.
        ranks: The host of every rank of the round, where it is known.
        clocks: What two hosts' times are worth.
    """
    early = []
    for gap, is_later, end in _ends_with_0(failed, first, ends=ends, clocks=clocks):
        if not is_later:
            early.append(Suspect(rank=end.rank, host=ranks.get(end.rank, ""), why=_how_early(gap) + _logged(end)))
    return tuple(early[:MOST_SUSPECTS])


def find_late_ends(
    failed: Sequence[int],
    first: Moment,
    *,
    ends: Sequence[WorkerEnd],
    ranks: Mapping[int, str],
    clocks: Clocks,
) -> tuple[Suspect, ...]:
    """The ranks that ended with 0 soon after the first symptom; arguments as of `find_early_ends`.

    A process that ends closes its sockets, by which its peers fail within milliseconds, long before it has ended.
    """
    late = []
    for gap, is_later, end in _ends_with_0(failed, first, ends=ends, clocks=clocks):
        if is_later and -gap <= _TEARDOWN_NS:
            why = f"it ended with 0 at about the same time (seen {seconds_text(-gap / 1e9)} later){_logged(end)}"
            late.append(Suspect(rank=end.rank, host=ranks.get(end.rank, ""), why=why))
    return tuple(late[:MOST_SUSPECTS])


def _ends_with_0(
    failed: Sequence[int], first: Moment, *, ends: Sequence[WorkerEnd], clocks: Clocks
) -> list[tuple[int, bool, WorkerEnd]]:
    """How long before the first symptom each came, in nanoseconds, and whether it is known to have come after it; the
    earliest first."""
    found = []
    for end in ends:
        if end.exitcode == 0 and not end.stopped and end.rank not in failed:
            moment = clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)
            gap = gap_ns(moment, first)
            found.append((gap, gap < 0 and order_of(first, moment) is Order.KNOWN, end))
    return sorted(found, key=lambda one: (-one[0], one[2].rank))


def find_ends_before_hang(
    hung: WorkerFailure,
    *,
    ends: Sequence[WorkerEnd],
    activities: Sequence[Activity],
    ranks: Mapping[int, str],
    clocks: Clocks,
) -> tuple[Suspect, ...]:
    """The ranks that had ended with 0 where all others hung in wait for other ranks; none where most had ended.

    Args:
        hung: The failure that the ranking names; it failed when its last heartbeat came.
        ends: The round's.
        activities: What the ranks were doing.
        ranks: The host of every rank of the round, where it is known.
        clocks: What two hosts' times are worth.
    """
    done = [end for end in ends if end.exitcode == 0 and not end.stopped and end.rank != hung.global_rank]
    here = [one for one in activities if one.rank not in {end.rank for end in done}]
    if not here or 2 * len(done) > len(ranks) or any(one.doing not in WAITS_FOR_RANKS for one in here):
        return ()
    last = clocks.of_failure(hung)
    found = []
    for end in done:
        gap = gap_ns(last, clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)) / 1e9
        when = f"{seconds_text(abs(gap))} {'after' if gap > 0 else 'before'}"
        why = f"it had ended with 0, {when} the last heartbeat of rank {hung.global_rank}{_logged(end)}"
        found.append(Suspect(rank=end.rank, host=ranks.get(end.rank, ""), why=why))
    return tuple(sorted(found, key=lambda one: one.rank)[:MOST_SUSPECTS])


def find_left_behind(
    failed: Sequence[int],
    *,
    ends: Sequence[WorkerEnd],
    activities: Sequence[Activity],
    ranks: Mapping[int, str],
) -> tuple[Suspect, ...]:
    """The ranks that waited for others where most ranks of the round had ended with 0: they call a collective that most
    do not.

    Args:
        failed: The ranks with a failure.
        ends: The round's.
        activities: What the ranks were doing.
        ranks: The host of every rank of the round, where it is known.
    """
    done = {end.rank for end in ends if end.exitcode == 0 and not end.stopped} - set(failed)
    waiting = [one for one in activities if one.doing in WAITS_FOR_RANKS and one.rank not in done]
    if not ranks or not waiting or 2 * len(done) <= len(ranks):
        return ()
    others = f"the {len(done)} others had" if len(done) + len(waiting) == len(ranks) else f"{len(done)} ranks had"
    return tuple(
        Suspect(
            rank=one.rank,
            host=ranks.get(one.rank, ""),
            why=f"it was {one.where} when {others} ended with 0: they do not call that",
        )
        for one in waiting[:MOST_SUSPECTS]
    )


def find_silent(
    failed: Sequence[int],
    *,
    ends: Sequence[WorkerEnd],
    activities: Sequence[Activity] = (),
    ranks: Mapping[int, str],
) -> tuple[Suspect, ...]:
    """The ranks that neither failed nor ended, until they were stopped.

    Args:
        failed: The ranks with a failure.
        ends: The round's.
        activities: What the ranks were doing.
        ranks: The host of every rank of the round, where it is known.
    """
    ended = {end.rank for end in ends if not end.stopped}
    doing = {activity.rank: activity for activity in activities if activity.doing is not Doing.UNKNOWN}
    alike = {rank for rank, activity in doing.items() if is_with_the_others(activity, activities)}
    silent = sorted(ranks.keys() - set(failed) - ended - alike)
    return tuple(
        Suspect(
            rank=rank,
            host=ranks[rank],
            why=f"it did not fail; it was {doing[rank].where}" if rank in doing else _SILENT,
        )
        for rank in silent[:MOST_SUSPECTS]
    )


def in_order(*groups: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """The suspects of several groups, the likeliest group first; each rank once, with all that is known of it."""
    found: dict[int, Suspect] = {}
    for suspect in itertools.chain(*groups):
        known = found.get(suspect.rank)
        found[suspect.rank] = suspect if known is None else replace(known, why=f"{known.why}; {suspect.why}")
    return tuple(found.values())[:MOST_SUSPECTS]


def _logged(end: WorkerEnd) -> str:
    return f"; {LOGGED_BEFORE}{end.logged}" if end.logged else ""


def _how_early(gap: int) -> str:
    if gap < 1_000_000:
        return "it ended with 0 at about the same time"
    return f"it ended with 0 {seconds_text(gap / 1e9)} before"


def of_several(why: str) -> str:
    """A suspect's clause as it reads for several ranks: ``they ended with 0``."""
    return _SINGULAR.sub(lambda found: _PLURAL.get(found[0], f"they{found[0][2:]}"), why)


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
