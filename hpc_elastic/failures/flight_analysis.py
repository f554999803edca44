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

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter

from msgspec import Struct, field

from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.failures.flight_dump import COALESCED, GLOO, RankDump, Track, numel_of, shape_of, size_of
from hpc_elastic.run.progress import AwaitedCall

MOST_SUSPECTS = 64
_MOST_SHOWN = 60


class Reason(str, Enum):
    NEVER_ENTERED = "never_entered"
    ALONE = "alone"
    """Most others never come to what it waits in."""
    OTHER_COLLECTIVE = "other_collective"
    OTHER_SIZE = "other_size"
    AHEAD = "ahead"
    NOT_COMPLETED = "not_completed"
    NOT_STARTED = "not_started"
    """Its device has not begun what the others' have."""
    EACH_OTHER = "each_other"
    NO_DUMP = "no_dump"


class FlightSuspect(Struct, frozen=True, kw_only=True):
    rank: int
    kind: Reason
    reason: str
    """A clause whose subject is the rank: ``never entered all_reduce #6 of group tp_3, which the 3 others wait in``."""
    group: str
    collective: str
    sequence: int


class GroupState(Struct, frozen=True, kw_only=True):
    group: str
    backend: str
    members: tuple[int, ...]
    completed: int
    """The last collective that all ranks with a dump have completed; -1: none that the dumps still have."""
    last: tuple[tuple[int, int], ...]
    waiting: tuple[tuple[int, int], ...]


class ProcessGroup(Struct, kw_only=True):
    backend: str
    name: str
    label: str = ""
    members: tuple[int, ...] = ()
    tracks: dict[int, tuple[RankDump, Track]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    is_live: bool = True
    """`waiting` is not completed; else (gloo, which closes what has failed) it is where most came to."""
    reached: int = -1
    """The first number that ranks wait in, or waited in at last; -1: this group has no part in it."""

    def call(self, rank: int, sequence: int) -> AwaitedCall | None:
        """The rank's call with this number; None: nothing, or it is gone from the ring."""
        dump, track = self.tracks[rank]
        place = sequence - track.sequences[0]
        if not (0 <= place < len(track.sequences) and track.sequences[place] == sequence):
            try:
                place = track.sequences.index(sequence)
            except ValueError:
                return None
        return dump.calls[track.calls[place]]


def groups_of(dumps: Sequence[RankDump], world_size: int | None) -> list[ProcessGroup]:
    found: dict[tuple[str, str, tuple[int, ...]], ProcessGroup] = {}
    everyone = max([world_size or 0, *(dump.rank + 1 for dump in dumps)])
    named: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps:
        for name, ranks in dump.members.items():
            named.setdefault(name, set()).add(ranks)
    for dump in dumps:
        for (backend, name), track in dump.collectives.items():
            members = dump.members.get(name, ())
            if not members and len(named.get(name, ())) == 1:
                (members,) = named[name]
            group = found.setdefault(
                (backend, name, members), ProcessGroup(backend=backend, name=name, members=members)
            )
            group.tracks[dump.rank] = dump, track
            group.label = group.label or dump.calls[track.calls[0]].description
    for group in found.values():
        group.label = group.label or group.name
        if not group.members and (group.label == "default_pg" or (world_size is not None and group.name in ("", "0"))):
            # gloo writes its ranks under an empty name.
            of_all = max(named.get("", {()}), key=len)
            group.members = of_all if len(of_all) >= len(group.tracks) else tuple(range(everyone))
        if not set(group.members) >= group.tracks.keys():
            group.members = tuple(sorted({*group.members, *group.tracks}))
        for rank, (_, track) in group.tracks.items():
            group.last[rank] = track.sequences[-1]
            if (place := track.done.find(0)) >= 0:
                group.waiting[rank] = track.sequences[place]
        group.reached = min(group.waiting.values(), default=-1)
        absent = [dump.rank for dump in dumps if dump.rank in group.members and dump.rank not in group.tracks]
        group.last |= dict.fromkeys(absent, -1)
    return sorted(found.values(), key=lambda group: (group.label, group.name, group.backend, group.members))


def state_of(group: ProcessGroup) -> GroupState:
    done = [(group.waiting[rank] if rank in group.waiting else last + 1) - 1 for rank, last in group.last.items()]
    return GroupState(
        group=group.label,
        backend=group.backend,
        members=group.members,
        completed=min(done, default=-1),
        last=tuple(sorted(group.last.items())),
        waiting=tuple(sorted(group.waiting.items())),
    )


def named(call: AwaitedCall, number: int) -> str:
    if call.peers is not None:
        source, target = call.peers
        return f"{call.name} from {source} to {target} #{number}"
    return f"{call.name} #{number}".strip()


def sized(call: AwaitedCall) -> str:
    return f" ({size})" if (size := size_of(call)) else ""


ROOTED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter"})
"""Collectives that some ranks may leave before the others have come."""
_BY_BOTH = frozenset(
    {"all_reduce", "allreduce", "allreduce_coalesced", "all_gather", "_all_gather_base", "all_gather_single",
     "all_gather_into_tensor_coalesced"}
)  # fmt: skip
_BY_INPUT = frozenset(
    {"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "reduce_scatter", "_reduce_scatter_base",
     "reduce_scatter_single", "reduce_scatter_tensor_coalesced"}
)  # fmt: skip
TO_ALL = frozenset({"all_to_all", "all_to_all_single", "alltoall"})
"""Collectives of which each rank may give every other another size."""


def differing(group: ProcessGroup) -> list[FlightSuspect]:
    """The ranks whose call differs from most others', at the first number at which any does."""
    if group.reached < 0 or len(group.tracks) < 2:
        return []
    for number in (*_first_difference(group), group.reached):
        calls = {rank: call for rank in group.tracks if (call := group.call(rank, number)) is not None and call.name}
        for kind, key in ((Reason.OTHER_COLLECTIVE, attrgetter("name")), (Reason.OTHER_SIZE, _size_of)):
            values = {rank: key(call) for rank, call in calls.items()}
            if len(set(values.values())) > 1:
                most, count = Counter(values.values()).most_common(1)[0]
                odd = sorted(rank for rank, value in values.items() if value != most or 2 * count <= len(values))
                return [_other(group, rank, number, calls, values, kind) for rank in odd]
    return []


def _other(
    group: ProcessGroup,
    rank: int,
    number: int,
    calls: Mapping[int, AwaitedCall],
    values: Mapping[int, object],
    kind: Reason,
) -> FlightSuspect:
    most = Counter(value for other, value in values.items() if other != rank).most_common(1)[0][0]
    theirs = [other for other, value in values.items() if value == most and other != rank]
    call, other = calls[rank], calls[theirs[0]]
    who = "the others" if len(theirs) == len(values) - 1 and len(theirs) > 1 else ranks_text(theirs, limit=_MOST_SHOWN)
    does = f"called {named(call, number)} of group {group.label}"
    if kind is Reason.OTHER_COLLECTIVE:
        does += f"{sized(call)} where {who} called {other.name}{sized(other)}"
    else:
        does += f" with {shape_of(call) or 'nothing'} where {who} gave {shape_of(other) or 'nothing'}"
    return FlightSuspect(rank=rank, kind=kind, reason=does, group=group.label, collective=call.name, sequence=number)


def _first_difference(group: ProcessGroup) -> Iterator[int]:
    tables: dict[object, int] = {}
    seen: dict[int, int] = {}
    windows: dict[bytes, int] = {}
    tracks = [track for dump, track in group.tracks.values() if _is_comparable(dump, track)]
    first = max((track.sequences[0] for track in tracks), default=0)
    last = min((track.sequences[-1] for track in tracks), default=-1)
    if last < first:
        return
    for rank, (dump, track) in group.tracks.items():
        if _is_comparable(dump, track):
            for call in dump.calls:  # most are the same objects in many ranks' dumps
                if id(call) not in seen:
                    seen[id(call)] = tables.setdefault((call.name, _size_of(call)), len(tables))
            kinds = [seen[id(call)] for call in dump.calls]
            begin = first - track.sequences[0]
            window = array("I", map(kinds.__getitem__, track.calls[begin : begin + last - first + 1]))
            windows.setdefault(window.tobytes(), rank)
    if len(windows) < 2:
        return
    columns = [array("I", raw) for raw in windows]
    place = next(at for at in range(len(columns[0])) if len({column[at] for column in columns}) > 1)
    yield first + place


def _is_comparable(dump: RankDump, track: Track) -> bool:
    window = track.sequences[-1] - track.sequences[0] + 1
    return window == len(track.sequences) and all(call.name for call in dump.calls)


def _size_of(call: AwaitedCall) -> object:
    """It must be equal on all ranks of a collective."""
    name = call.name.removeprefix(COALESCED)
    if name == "scatter":
        return numel_of(call)[1:]
    if name not in _BY_INPUT and name not in _BY_BOTH:
        return ()
    return numel_of(call)[: 2 if name in _BY_BOTH else 1], call.types[:1]


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
    """All of several dumps with one rank count; a rank without one is missing where `world_size` is known."""
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
