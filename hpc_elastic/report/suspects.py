"""The ranks to look at where every failure of a round is a symptom: pure, over what is known of the others.

A rank that ended with 0 while the others still needed it is the likeliest one: its sockets closed, and every peer that
was in a collective with it lost a connection. Next come the ranks that differ from the others by what they were doing,
and then the ranks that neither failed nor ended: one of them hung, was late, or was just not as fast as the others to
notice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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
"""The end of an interpreter with torch in it takes at most this on a busy node."""
_HOSTS = 3
_PLURAL = {"it was": "they were", "it is": "they are", "it has": "they have", "its ": "their "}
_SINGULAR = re.compile(r"\bit (?:was|is|has|ended|had|did|never|entered|left)\b|\bits (?=last there|device)")
_SILENT = "it hung, was late, or ended early"


class RanksKnown(NamedTuple):
    failed: Sequence[int]
    ends: Sequence[WorkerEnd]
    activities: Sequence[Activity]
    hosts: Mapping[int, str]
    clocks: Clocks

    def suspects(self, found: Iterable[tuple[int, str]]) -> tuple[Suspect, ...]:
        some = itertools.islice(found, MOST_SUSPECTS)
        return tuple(Suspect(rank=rank, host=self.hosts.get(rank, ""), why=why) for rank, why in some)

    def done(self) -> list[WorkerEnd]:
        return [end for end in self.ends if end.exitcode == 0 and not end.stopped and end.rank not in self.failed]


def find_early_ends(known: RanksKnown, first: Moment) -> tuple[Suspect, ...]:
    return known.suspects(
        (
            end.rank,
            f"it ended with 0 {'at about the same time' if gap < 1_000_000 else f'{seconds_text(gap / 1e9)} before'}"
            f"{_logged(end)}",
        )
        for gap, is_later, end in _ends_with_0(known, first)
        if not is_later
    )


def find_late_ends(known: RanksKnown, first: Moment) -> tuple[Suspect, ...]:
    """The ranks that ended with 0 soon after the first symptom.

    A process that ends closes its sockets, by which its peers fail within milliseconds, long before it has ended.
    """
    return known.suspects(
        (end.rank, f"it ended with 0 at about the same time (seen {seconds_text(-gap / 1e9)} later){_logged(end)}")
        for gap, is_later, end in _ends_with_0(known, first)
        if is_later and -gap <= _TEARDOWN_NS
    )


def _ends_with_0(known: RanksKnown, first: Moment) -> list[tuple[int, bool, WorkerEnd]]:
    """(nanoseconds before the first symptom, whether it is known to have come after it, end); the earliest first."""
    found = []
    for end in known.done():
        moment = known.clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)
        gap = gap_ns(moment, first)
        found.append((gap, gap < 0 and order_of(first, moment) is Order.KNOWN, end))
    return sorted(found, key=lambda one: (-one[0], one[2].rank))


def find_ends_before_hang(hung: WorkerFailure, known: RanksKnown) -> tuple[Suspect, ...]:
    """The ranks that had ended with 0 where all others hung in wait for other ranks; none where most had ended.

    `hung`: the failure that the ranking names; it failed when its last heartbeat came.
    """
    done = known._replace(failed=(hung.global_rank,)).done()
    here = [one for one in known.activities if one.rank not in {end.rank for end in done}]
    if not here or 2 * len(done) > len(known.hosts) or any(one.doing not in WAITS_FOR_RANKS for one in here):
        return ()
    last = known.clocks.of_failure(hung)
    found = []
    for end in done:
        gap = gap_ns(last, known.clocks.moment(end.node, end.ended_ns, uptime_ns=end.ended_uptime_ns)) / 1e9
        when = f"{seconds_text(abs(gap))} {'after' if gap > 0 else 'before'}"
        why = f"it had ended with 0, {when} the last heartbeat of rank {hung.global_rank}{_logged(end)}"
        found.append((end.rank, why))
    return known.suspects(sorted(found))


def find_left_behind(known: RanksKnown) -> tuple[Suspect, ...]:
    """The ranks that waited for others where most ranks of the round had ended with 0: they call a collective that most
    do not."""
    done, size = {end.rank for end in known.done()}, len(known.hosts)
    waiting = [one for one in known.activities if one.doing in WAITS_FOR_RANKS and one.rank not in done]
    if not size or not waiting or 2 * len(done) <= size:
        return ()
    others = f"the {len(done)} others had" if len(done) + len(waiting) == size else f"{len(done)} ranks had"
    return known.suspects(
        (one.rank, f"it was {one.where} when {others} ended with 0: they do not call that") for one in waiting
    )


def find_silent(known: RanksKnown) -> tuple[Suspect, ...]:
    """The ranks that neither failed nor ended, until they were stopped."""
    ended = {end.rank for end in known.ends if not end.stopped}
    doing = {activity.rank: activity for activity in known.activities if activity.doing is not Doing.UNKNOWN}
    alike = {rank for rank, activity in doing.items() if is_with_the_others(activity, known.activities)}
    silent = sorted(known.hosts.keys() - set(known.failed) - ended - alike)
    return known.suspects(
        (rank, f"it did not fail; it was {doing[rank].where}" if rank in doing else _SILENT) for rank in silent
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


def of_several(why: str) -> str:
    """A suspect's clause as it reads for several ranks: ``they ended with 0``."""
    return _SINGULAR.sub(lambda found: _PLURAL.get(found[0], f"they{found[0][2:]}"), why)


def look_at(suspects: Sequence[Suspect]) -> str:
    """A sentence without its end."""
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
