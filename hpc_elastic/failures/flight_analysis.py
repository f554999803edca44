"""Finds the rank that the others wait for, by all ranks' flight recorder dumps. Pure: equal dumps give equal words.

The rules, in order:

1. A group's ranks are those that its configuration names, else those that have called something in it.
2. A rank waits in its first call that is not completed. Where no rank waits (gloo closes what has failed), those
   that had come furthest count as waiting in their last call.
3. In a call that ranks wait in, a rank that has not come to its number *never entered* it. Where more than two thirds
   never did, and none of those waits elsewhere, the ranks that did enter are *alone* in it.
4. Of the calls with one number, those of the minority differ: *another collective*, or *another size or type*. All
   numbers that every dump still has are compared, and the one that is waited in; the first that differs counts. Without
   a majority every rank is named. Sizes are compared in elements, and not where ranks may differ (all_to_all).
5. A rank *did not complete* what the others of its group have completed, or is *ahead* of them where most wait. gloo's
   dumps do not show that: what has failed looks like what is completed, and who has come to the number that a rank is
   missing from waited in it, too. A rank *did not start* what all have entered, and most others' devices have begun.
6. A send waits for its receive, and a receive for its send, pair by pair.
7. What was put together (a coalescing manager, a collective of uneven sizes) is one call.
8. A rank that is missing in one group and waits in another is no suspect: those are that it waits for. Ranks that wait
   for *each other*, in different groups, are suspects all.
9. A rank that left no dump is a suspect only where the ranks that wait would else wait for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.failures.flight_dump import GLOO, RankDump, numel_of
from hpc_elastic.failures.flight_groups import (
    ROOTED,
    TO_ALL,
    FlightSuspect,
    GroupState,
    ProcessGroup,
    Reason,
    differing,
    groups_of,
    named,
    sized,
    state_of,
)
from hpc_elastic.run.activities import AwaitedCall

MOST_SUSPECTS = 64
_MOST_SHOWN = 60


class Analysis(Struct, frozen=True, kw_only=True):
    suspects: tuple[FlightSuspect, ...] = ()
    groups: tuple[GroupState, ...] = ()
    says: str = ""


class _Wait(Struct, frozen=True, kw_only=True):
    group: str
    call: AwaitedCall
    sequence: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    kind: Reason

    def describe(self) -> str:
        return f"{named(self.call, self.sequence)} of group {self.group}{sized(self.call)}"

    def suspect(self, rank: int, kind: Reason, reason: str) -> FlightSuspect:
        return FlightSuspect(
            rank=rank, kind=kind, reason=reason, group=self.group, collective=self.call.name, sequence=self.sequence
        )


def analyse(dumps: Iterable[RankDump], *, world_size: int | None = None) -> Analysis:
    """Match the entries of all ranks by group and number, and name the ranks that the others wait for.

    Of several dumps with one rank (two backends) all count. Ranks without one are missing where `world_size` is known.
    """
    known = sorted(dumps, key=lambda dump: dump.rank)
    if not known:
        return Analysis(says="there is no dump")
    groups = groups_of(known, world_size)
    transfers = list(_transfers(known, groups))
    if not any(group.waiting for group in groups) and not transfers:
        for group in groups:
            group.is_live = False
            group.reached = furthest = max(group.last.values(), default=-1)
            if any(last < furthest for last in group.last.values()) or set(group.members) - group.last.keys():
                group.waiting = {rank: last for rank, last in group.last.items() if last == furthest}
    is_live = bool(transfers) or any(group.is_live for group in groups)
    found = [suspect for group in groups for suspect in differing(group)]
    waits = [*(wait for group in groups for wait in _waits(group, known)), *transfers]
    if found:  # what differs explains a rank that ended before it could write a dump
        waits = [wait for wait in waits if wait.kind is not Reason.NO_DUMP]
    found += _who_is_waited_for(waits, groups)
    suspects: dict[int, FlightSuspect] = {}
    for suspect in found:
        suspects.setdefault(suspect.rank, suspect)
    states = tuple(state_of(group) for group in groups)
    chosen = tuple(suspects.values())[:MOST_SUSPECTS]
    return Analysis(suspects=chosen, groups=states, says="" if chosen else _says(groups, is_live=is_live))


def _waits(group: ProcessGroup, dumps: Sequence[RankDump]) -> Iterator[_Wait]:
    by_number: dict[int, list[int]] = {}
    for rank, number in sorted(group.waiting.items()):
        by_number.setdefault(number, []).append(rank)
    with_dump = {dump.rank for dump in dumps}
    for number, waiting in sorted(by_number.items()):
        call = group.call(waiting[0], number)
        assert call is not None
        behind = [rank for rank, last in sorted(group.last.items()) if last < number]
        earlier = [rank for rank, other in sorted(group.waiting.items()) if other < number]
        passed = [
            rank
            for rank, last in group.last.items()
            if (last >= number and rank not in group.waiting) or group.waiting.get(rank, -1) > number
        ]
        silent = [rank for rank in group.members if rank not in with_dump]
        begun = [rank for rank in waiting if group.tracks[rank][1].started >= number]
        missing, kind = behind, Reason.NEVER_ENTERED
        if not missing and earlier:
            continue  # those are suspects, or wait themselves, by the call that they did not complete
        if not missing and 2 * len(begun) > len(waiting) > len(begun):
            missing, kind = [rank for rank in waiting if rank not in begun], Reason.NOT_STARTED
            waiting = begun
        elif not missing and silent:
            missing, kind = silent, Reason.NO_DUMP
        elif not missing and passed and 2 * len(waiting) <= len(group.last) and group.backend != GLOO:
            missing, kind = waiting, Reason.NOT_COMPLETED
            waiting = passed
        elif not missing and passed and group.backend != GLOO and call.name not in ROOTED:
            missing, kind = sorted(passed), Reason.AHEAD
        if missing is behind and group.backend == GLOO:
            waiting = sorted({*waiting, *(rank for rank, last in group.last.items() if last == number)})
        if missing:
            ranks = {"waiting": tuple(waiting), "missing": tuple(missing)}
            yield _Wait(group=group.label, call=call, sequence=number, kind=kind, **ranks)
        if kind is Reason.AHEAD:
            return  # what they wait in now follows from it


def _transfers(dumps: Sequence[RankDump], groups: Sequence[ProcessGroup]) -> Iterator[_Wait]:
    members = {(group.backend, group.name): group.members for group in groups}
    open_calls: dict[tuple[str, str, int, int], dict[str, list[tuple[AwaitedCall, int]]]] = {}
    ranks = {dump.rank for dump in dumps}
    for dump in dumps:
        for (backend, name), track in dump.transfers.items():
            whose = dump.members.get(name) or members.get((backend, name), ())
            for number, at, is_done in zip(track.sequences, track.calls, track.done, strict=True):
                call = dump.calls[at]
                if is_done or call.peers is None:
                    continue
                source, target = (whose[end] if end < len(whose) else end for end in call.peers)
                ends = open_calls.setdefault((backend, name, source, target), {"send": [], "recv": []})
                ends[call.name].append((call, number))
    for (_, name, source, target), ends in sorted(open_calls.items()):
        sends, receives = ends["send"], ends["recv"]
        unlike = (pair for pair in zip(sends, receives, strict=False) if _differ(pair[0][0], pair[1][0]))
        waiting: tuple[int, ...] = ()
        missing: tuple[int, ...] = (source, target)
        if (pair := next(unlike, None)) is not None:
            (call, number), kind = pair[0], Reason.OTHER_SIZE
        elif len(sends) == len(receives):
            continue
        else:
            waiting, missing = ((source,), (target,)) if len(sends) > len(receives) else ((target,), (source,))
            call, number = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
            kind = Reason.NEVER_ENTERED if missing[0] in ranks else Reason.NO_DUMP
        group = call.description or name
        yield _Wait(group=group, call=call, sequence=number, waiting=waiting, missing=missing, kind=kind)


def _differ(send: AwaitedCall, receive: AwaitedCall) -> bool:
    if not send.inputs or not receive.outputs:
        return False
    kinds = send.types[:1], receive.types[:1]
    return numel_of(send)[0] != numel_of(receive)[1] or (all(kinds) and kinds[0] != kinds[1])


def _who_is_waited_for(waits: Sequence[_Wait], groups: Sequence[ProcessGroup]) -> list[FlightSuspect]:
    edges: dict[int, set[int]] = {}
    by_missing: dict[int, list[_Wait]] = {}
    found = []
    for wait in sorted(waits, key=lambda wait: (-len(wait.waiting), wait.group, wait.sequence)):
        if wait.kind is Reason.OTHER_SIZE:
            does = f"in the size or type of the {wait.describe()}"
            for rank, other in zip(wait.missing, reversed(wait.missing), strict=True):
                found.append(wait.suspect(rank, Reason.OTHER_SIZE, f"differs from rank {other} {does}"))
            continue
        for rank in wait.missing:
            by_missing.setdefault(rank, []).append(wait)
        for rank in wait.waiting:
            if wait.kind not in (Reason.NOT_COMPLETED, Reason.NOT_STARTED):
                edges.setdefault(rank, set()).update(wait.missing)
    stuck_nowhere = {rank for rank in by_missing if rank not in edges}
    for wait in waits:
        if (
            wait.kind is Reason.NEVER_ENTERED
            and len(wait.missing) > 2 * len(wait.waiting)
            and stuck_nowhere.issuperset(wait.missing)
        ):
            others = plural(len(wait.missing), "other rank")
            does = f"is in {wait.describe()}, which {others} never entered"
            found += [wait.suspect(rank, Reason.ALONE, does) for rank in wait.waiting]
            stuck_nowhere -= set(wait.missing)
            by_missing = {rank: by_missing[rank] for rank in by_missing.keys() - set(wait.missing)}
    certain = [rank for rank in sorted(stuck_nowhere) if by_missing[rank][0].kind is not Reason.NO_DUMP]
    for rank in certain or sorted(stuck_nowhere):
        found.append(_missing(by_missing[rank][0], rank, groups))
    if not found and by_missing:
        for rank in _cycles(edges):
            wait = next(wait for wait in waits if rank in wait.waiting)
            whom = ranks_text(wait.missing, limit=_MOST_SHOWN)
            verb = "waits" if len(wait.missing) == 1 else "wait"
            does = f"waits in {wait.describe()} for {whom}, which {verb} for it elsewhere"
            found.append(wait.suspect(rank, Reason.EACH_OTHER, does))
    return found


def _cycles(edges: Mapping[int, set[int]]) -> list[int]:
    left = {rank: {other for other in others if other in edges} for rank, others in edges.items()}
    while True:  # what no rank in a circle can be is taken off: a rank that none waits for, or that waits for none
        waited_for = set().union(*left.values()) if left else set()
        keep = {rank for rank, others in left.items() if others and rank in waited_for}
        if keep == left.keys():
            return sorted(keep)
        left = {rank: left[rank] & keep for rank in keep}


def _missing(wait: _Wait, rank: int, groups: Sequence[ProcessGroup]) -> FlightSuspect:
    group = next((group for group in groups if group.label == wait.group), None)
    who = ranks_text(wait.waiting, limit=_MOST_SHOWN)
    if group is not None and {*wait.waiting, *wait.missing} == {*group.members} and len(wait.waiting) > 1:
        who = f"the {len(wait.waiting)} others"
    waits = "waits" if len(wait.waiting) == 1 else "wait"
    if wait.call.peers is not None:
        other = "recv" if wait.call.name == "send" else "send"
        does = f"never entered the {other} for the {wait.describe()}, which rank {wait.waiting[0]} waits in"
    elif wait.kind is Reason.NOT_COMPLETED:
        does = f"entered {wait.describe()} and did not complete it, which {who} {_have(wait.waiting)}"
    elif wait.kind is Reason.AHEAD:
        does = f"has completed {wait.describe()}, which {who} {waits} in"
    elif wait.kind is Reason.NOT_STARTED:
        does = f"entered {wait.describe()} and its device did not begin it, which {who} {_have(wait.waiting)}"
    else:
        does = f"never entered {wait.describe()}, which {who} {waits} in"
    if wait.kind is Reason.NO_DUMP:
        does = f"left no dump, and {who} {waits} in {wait.describe()}"
    elif wait.kind in (Reason.NEVER_ENTERED, Reason.AHEAD):
        does += _its_last(wait, rank, groups)
    return wait.suspect(rank, wait.kind, does)


def _its_last(wait: _Wait, rank: int, groups: Sequence[ProcessGroup]) -> str:
    group = next((group for group in groups if group.label == wait.group and rank in group.tracks), None)
    if group is None or wait.call.peers is not None:
        return ""
    call = group.call(rank, group.last[rank])
    return f"; its last there was {named(call, group.last[rank])}" if call is not None else ""


def _says(groups: Sequence[ProcessGroup], *, is_live: bool) -> str:
    for group in groups:
        if is_live and group.waiting:
            number = min(group.waiting.values())
            rank = min(rank for rank, at in group.waiting.items() if at == number)
            call = group.call(rank, number)
            assert call is not None
            what = f"{named(call, number)} of group {group.label}"
            if (counts := _unequal(group, call, number)) is not None:
                return f"the ranks' {what} do not fit together: {counts[0]} elements go in, {counts[1]} come out"
            behind = sorted(rank for rank, at in group.waiting.items() if at == number)
            if ahead := sorted(group.last.keys() - set(behind)):
                first, others = (f"{ranks_text(who, limit=_MOST_SHOWN)} {_have(who)}" for who in (ahead, behind))
                return f"{first} completed {what}, which {others} not"
            return (
                f"{ranks_text(behind, limit=_MOST_SHOWN)} entered {what}, and none has completed it: "
                "look at the network and the devices"
            )
    return "no rank waits for another one in a collective"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _unequal(group: ProcessGroup, first: AwaitedCall, number: int) -> tuple[int, int] | None:
    """The elements that all ranks give and take in an all_to_all, where they are not as many."""
    if first.name not in TO_ALL or group.tracks.keys() < set(group.members):
        return None
    calls = [group.call(rank, number) for rank in group.tracks]
    if any(call is None or not call.inputs or not call.outputs for call in calls):
        return None
    counts = [numel_of(call) for call in calls if call is not None]
    given, taken = sum(into for into, _ in counts), sum(out for _, out in counts)
    return (given, taken) if given != taken else None
