"""Which rank the others wait for, by all ranks' flight recorder dumps. Pure: the same dumps give the same words.

The rules, in order:

1. A group's ranks are those that its configuration names, else those that have called something in it.
2. A rank waits in its first call that is not completed. Where no rank waits (gloo closes what has failed), those
   that had come furthest count as waiting in their last call.
3. In a call that ranks wait in, a rank that has not come to its number *never entered* it. Where more than two thirds
   never did, and none of those waits elsewhere, the ranks that did enter are *alone* in it.
4. Of the calls with one number, those of the minority differ: *another collective*, or *another size or type*. All
   numbers that every dump still has are compared, and the one that is waited in; the first that differs counts. Without
   a majority every rank is named. Sizes are compared in elements, and not where ranks may differ (all_to_all).
5. A rank *did not complete* what the others of its group have completed. gloo's dumps do not show that: what has failed
   looks like what is completed, and who has come to the number that a rank is missing from waited in it, too.
6. A send waits for its receive, and a receive for its send, pair by pair.
7. A rank that is missing in one group and waits in another is no suspect: those are that it waits for. Ranks that wait
   for *each other*, in different groups, are suspects all.
8. A rank that left no dump is a suspect only where the ranks that wait would else wait for none.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct, field

from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.failures.flight_dump import RankDump, Track, numel_of, shape_of, size_of
from hpc_elastic.run.flight_tail import Call

MOST_SUSPECTS = 64
_MOST_SHOWN = 60
_BY_INPUT = frozenset(
    {"all_reduce", "allreduce", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "all_gather",
     "_all_gather_base", "all_gather_single", "allreduce_coalesced", "ALLGATHER_coalesced",
     "all_gather_into_tensor_coalesced"}
)  # fmt: skip
_BY_OUTPUT = frozenset(
    {"scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "REDUCE_SCATTER_coalesced",
     "reduce_scatter_tensor_coalesced"}
)  # fmt: skip


class Reason(str, Enum):
    """Why a rank is a suspect."""

    NEVER_ENTERED = "never_entered"
    ALONE = "alone"
    """Most others never come to what it waits in."""
    OTHER_COLLECTIVE = "other_collective"
    OTHER_SIZE = "other_size"
    NOT_COMPLETED = "not_completed"
    EACH_OTHER = "each_other"
    """It waits for a rank that waits for it."""
    NO_DUMP = "no_dump"


class FlightSuspect(Struct, frozen=True, kw_only=True):
    """A rank that the others wait for."""

    rank: int
    kind: Reason
    reason: str
    """A clause whose subject is the rank: ``never entered all_reduce #6 of group tp_3, which the 3 others wait in``."""
    group: str
    """The group's description, or its name."""
    collective: str
    """What it missed, or called, or waits in: ``all_reduce``."""
    sequence: int
    """The number of that call in its group."""


class GroupState(Struct, frozen=True, kw_only=True):
    """How far the ranks of one group came."""

    group: str
    backend: str
    members: tuple[int, ...]
    completed: int
    """The last collective that all ranks with a dump have completed; -1: none that the dumps still have."""
    last: tuple[tuple[int, int], ...]
    """Rank → the last collective that it entered."""
    waiting: tuple[tuple[int, int], ...]
    """Rank → the collective that it waits in."""


class Analysis(Struct, frozen=True, kw_only=True):
    """What the dumps show together."""

    suspects: tuple[FlightSuspect, ...] = ()
    """The likeliest first."""
    groups: tuple[GroupState, ...] = ()
    says: str = ""
    """What is so where there are no suspects."""


class _Wait(Struct, frozen=True, kw_only=True):
    """Ranks wait in one call for others."""

    group: str
    call: Call
    sequence: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    kind: Reason = Reason.NEVER_ENTERED

    def describe(self) -> str:
        return f"{_named(self.call, self.sequence)} of group {self.group}{_sized(self.call)}"

    def suspect(self, rank: int, kind: Reason, reason: str) -> FlightSuspect:
        return FlightSuspect(
            rank=rank, kind=kind, reason=reason, group=self.group, collective=self.call.name, sequence=self.sequence
        )

    @property
    def order(self) -> tuple[int, str, int]:
        return -len(self.waiting), self.group, self.sequence


class _Group(Struct, kw_only=True):
    backend: str
    name: str
    label: str = ""
    members: tuple[int, ...] = ()
    tracks: dict[int, tuple[RankDump, Track]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    reached: int = -1
    """The first number that ranks wait in, or waited in at last; -1: this group has no part in it."""

    def call(self, rank: int, sequence: int) -> Call | None:
        """What the rank called with this number; None: nothing, or it is gone from the ring."""
        dump, track = self.tracks[rank]
        place = sequence - track.sequences[0]
        if not (0 <= place < len(track.sequences) and track.sequences[place] == sequence):
            try:
                place = track.sequences.index(sequence)
            except ValueError:
                return None
        return dump.calls[track.calls[place]]


def analyse(dumps: Iterable[RankDump], *, world_size: int | None = None) -> Analysis:
    """Match the entries of all ranks by group and number, and name the ranks that the others wait for.

    Args:
        dumps: One for each rank; of several with one rank (two backends) all count.
        world_size: Where it is known: ranks without a dump are missing.
    """
    known = sorted(dumps, key=lambda dump: dump.rank)
    if not known:
        return Analysis(says="there is no dump")
    groups = _groups(known, world_size)
    if not any(group.waiting for group in groups) and not (transfers := list(_transfers(known, groups))):
        for group in groups:
            furthest = max(group.last.values(), default=-1)
            group.reached = furthest
            if any(last < furthest for last in group.last.values()) or set(group.members) - group.last.keys():
                group.waiting = {rank: last for rank, last in group.last.items() if last == furthest}
        is_live = False
    else:
        transfers = list(_transfers(known, groups))
        is_live = True
    found = [suspect for group in groups for suspect in _differing(group)]
    waits = [*(wait for group in groups for wait in _waits(group, known)), *transfers]
    if found:  # what differs explains a rank that ended before it could write a dump
        waits = [wait for wait in waits if wait.kind is not Reason.NO_DUMP]
    found += _who_is_waited_for(waits, groups)
    suspects: dict[int, FlightSuspect] = {}
    for suspect in found:
        suspects.setdefault(suspect.rank, suspect)
    states = tuple(_state(group) for group in groups)
    chosen = tuple(suspects.values())[:MOST_SUSPECTS]
    return Analysis(suspects=chosen, groups=states, says="" if chosen else _says(groups, is_live=is_live))


def _groups(dumps: Sequence[RankDump], world_size: int | None) -> list[_Group]:
    found: dict[tuple[str, str, tuple[int, ...]], _Group] = {}
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
            group = found.setdefault((backend, name, members), _Group(backend=backend, name=name, members=members))
            group.tracks[dump.rank] = dump, track
            group.label = group.label or dump.calls[track.calls[0]].description or name
    for group in found.values():
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


def _waits(group: _Group, dumps: Sequence[RankDump]) -> Iterator[_Wait]:
    """Who waits for whom in one group."""
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
        missing, kind = behind, Reason.NEVER_ENTERED
        if not missing and earlier:
            continue  # those are suspects, or wait themselves, by the call that they did not complete
        if not missing and silent:
            missing, kind = silent, Reason.NO_DUMP
        elif not missing and passed and 2 * len(waiting) <= len(group.last) and group.backend != "gloo":
            missing, kind = waiting, Reason.NOT_COMPLETED
            waiting = passed
        if missing is behind and group.backend == "gloo":
            waiting = sorted({*waiting, *(rank for rank, last in group.last.items() if last == number)})
        if missing:
            yield _Wait(
                group=group.label,
                call=call,
                sequence=number,
                waiting=tuple(waiting),
                missing=tuple(missing),
                kind=kind,
            )


def _transfers(dumps: Sequence[RankDump], groups: Sequence[_Group]) -> Iterator[_Wait]:
    """Sends that wait for their receives, and the other way round."""
    members = {(group.backend, group.name): group.members for group in groups}
    open_calls: dict[tuple[str, str, int, int], dict[str, list[tuple[Call, int]]]] = {}
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
        if len(sends) == len(receives):
            call, number = sends[0]
            if numel_of(call)[0] != numel_of(receives[0][0])[1] and call.inputs and receives[0][0].outputs:
                yield _wait_of_pair(call, number, (), (source, target), name, kind=Reason.OTHER_SIZE)
            continue
        waits, missing = (source, target) if len(sends) > len(receives) else (target, source)
        call, number = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
        kind = Reason.NEVER_ENTERED if missing in ranks else Reason.NO_DUMP
        yield _wait_of_pair(call, number, (waits,), (missing,), name, kind=kind)


def _wait_of_pair(
    call: Call, number: int, waiting: tuple[int, ...], missing: tuple[int, ...], name: str, *, kind: Reason
) -> _Wait:
    return _Wait(
        group=call.description or name, call=call, sequence=number, waiting=waiting, missing=missing, kind=kind
    )


def _who_is_waited_for(waits: Sequence[_Wait], groups: Sequence[_Group]) -> list[FlightSuspect]:
    """The ends of the chains of ranks that wait for each other."""
    edges: dict[int, set[int]] = {}
    by_missing: dict[int, list[_Wait]] = {}
    found = []
    for wait in sorted(waits, key=lambda wait: wait.order):
        if wait.kind is Reason.OTHER_SIZE:
            found += [_of_pair(wait, rank) for rank in wait.missing]
            continue
        for rank in wait.missing:
            by_missing.setdefault(rank, []).append(wait)
        for rank in wait.waiting:
            if wait.kind is not Reason.NOT_COMPLETED:
                edges.setdefault(rank, set()).update(wait.missing)
    stuck_nowhere = {rank for rank in by_missing if rank not in edges}
    for wait in waits:
        if (
            wait.kind is Reason.NEVER_ENTERED
            and len(wait.missing) > 2 * len(wait.waiting)
            and stuck_nowhere.issuperset(wait.missing)
        ):
            found += [_alone(wait, rank) for rank in wait.waiting]
            stuck_nowhere -= set(wait.missing)
            by_missing = {rank: by_missing[rank] for rank in by_missing.keys() - set(wait.missing)}
    certain = [rank for rank in sorted(stuck_nowhere) if by_missing[rank][0].kind is not Reason.NO_DUMP]
    for rank in certain or sorted(stuck_nowhere):
        found.append(_missing(by_missing[rank][0], rank, groups))
    if not found and by_missing:
        found += [_each_other(rank, waits) for rank in _cycles(edges)]
    return found


def _cycles(edges: Mapping[int, set[int]]) -> list[int]:
    """The ranks that wait for themselves through others."""
    left = {rank: {other for other in others if other in edges} for rank, others in edges.items()}
    while True:  # what no rank in a circle can be is taken off: a rank that none waits for, or that waits for none
        waited_for = set().union(*left.values()) if left else set()
        keep = {rank for rank, others in left.items() if others and rank in waited_for}
        if keep == left.keys():
            return sorted(keep)
        left = {rank: left[rank] & keep for rank in keep}


def _missing(wait: _Wait, rank: int, groups: Sequence[_Group]) -> FlightSuspect:
    who = _who(wait.waiting, wait.missing, wait.group, groups)
    waits = "waits" if len(wait.waiting) == 1 else "wait"
    if wait.call.peers is not None:
        other = "recv" if wait.call.name == "send" else "send"
        does = f"never entered the {other} for the {wait.describe()}, which rank {wait.waiting[0]} waits in"
    elif wait.kind is Reason.NOT_COMPLETED:
        have = "has" if len(wait.waiting) == 1 else "have"
        does = f"entered {wait.describe()} and did not complete it, which {who} {have}"
    else:
        does = f"never entered {wait.describe()}, which {who} {waits} in"
    if wait.kind is Reason.NO_DUMP:
        does = f"left no dump, and {who} {waits} in {wait.describe()}"
    elif wait.kind is Reason.NEVER_ENTERED:
        does += _its_last(wait, rank, groups)
    return wait.suspect(rank, wait.kind, does)


def _its_last(wait: _Wait, rank: int, groups: Sequence[_Group]) -> str:
    group = next((group for group in groups if group.label == wait.group and rank in group.tracks), None)
    if group is None or wait.call.peers is not None:
        return ""
    call = group.call(rank, group.last[rank])
    return f"; its last there was {_named(call, group.last[rank])}" if call is not None else ""


def _alone(wait: _Wait, rank: int) -> FlightSuspect:
    does = f"is in {wait.describe()}, which {plural(len(wait.missing), 'other rank')} never entered"
    return wait.suspect(rank, Reason.ALONE, does)


def _each_other(rank: int, waits: Sequence[_Wait]) -> FlightSuspect:
    wait = next(wait for wait in waits if rank in wait.waiting)
    whom = ranks_text(wait.missing, limit=_MOST_SHOWN)
    verb = "waits" if len(wait.missing) == 1 else "wait"
    does = f"waits in {wait.describe()} for {whom}, which {verb} for it elsewhere"
    return wait.suspect(rank, Reason.EACH_OTHER, does)


def _of_pair(wait: _Wait, rank: int) -> FlightSuspect:
    other = next(one for one in wait.missing if one != rank)
    does = f"differs from rank {other} in the size of the {wait.describe()}"
    return wait.suspect(rank, Reason.OTHER_SIZE, does)


def _differing(group: _Group) -> list[FlightSuspect]:
    """The ranks whose call differs from the others', at the first number at which any does."""
    if group.reached < 0 or len(group.tracks) < 2:
        return []
    for number in (*_first_difference(group), group.reached):
        calls = {rank: call for rank in group.tracks if (call := group.call(rank, number)) is not None}
        for kind, key in ((Reason.OTHER_COLLECTIVE, _kind_of), (Reason.OTHER_SIZE, _size_of)):
            values = {rank: key(call) for rank, call in calls.items()}
            if len(set(values.values())) > 1:
                return [_other(group, rank, number, calls, values, kind) for rank in _odd(values)]
    return []


def _other(
    group: _Group, rank: int, number: int, calls: Mapping[int, Call], values: Mapping[int, object], kind: Reason
) -> FlightSuspect:
    most = Counter(value for other, value in values.items() if other != rank).most_common(1)[0][0]
    theirs = [other for other, value in values.items() if value == most and other != rank]
    call, other = calls[rank], calls[theirs[0]]
    who = "the others" if len(theirs) == len(values) - 1 and len(theirs) > 1 else ranks_text(theirs, limit=_MOST_SHOWN)
    if kind is Reason.OTHER_COLLECTIVE:
        does = f"called {_named(call, number)} of group {group.label} where {who} called {other.name}{_sized(other)}"
    else:
        does = (
            f"called {_named(call, number)} of group {group.label} with {shape_of(call) or 'nothing'} "
            f"where {who} gave {shape_of(other) or 'nothing'}"
        )
    return FlightSuspect(rank=rank, kind=kind, reason=does, group=group.label, collective=call.name, sequence=number)


def _first_difference(group: _Group) -> Iterator[int]:
    """The first number, of those that all dumps still have, with which ranks called different things."""
    tables: dict[tuple[object, object], int] = {}
    windows: dict[bytes, int] = {}
    tracks = [track for _, track in group.tracks.values() if _is_gapless(track)]
    first = max((track.sequences[0] for track in tracks), default=0)
    last = min((track.sequences[-1] for track in tracks), default=-1)
    if last < first:
        return
    for rank, (dump, track) in group.tracks.items():
        if _is_gapless(track):
            kinds = [tables.setdefault((_kind_of(call), _size_of(call)), len(tables)) for call in dump.calls]
            begin = first - track.sequences[0]
            window = array("I", map(kinds.__getitem__, track.calls[begin : begin + last - first + 1]))
            windows.setdefault(window.tobytes(), rank)
    if len(windows) < 2:
        return
    columns = [array("I", raw) for raw in windows]
    place = next(at for at in range(len(columns[0])) if len({column[at] for column in columns}) > 1)
    yield first + place


def _is_gapless(track: Track) -> bool:
    return track.sequences[-1] - track.sequences[0] + 1 == len(track.sequences)


def _kind_of(call: Call) -> object:
    return call.name


def _size_of(call: Call) -> object:
    """What must be equal on all ranks of a collective."""
    into, out = numel_of(call)
    if call.name in _BY_INPUT:
        return into, call.types[:1]
    return (out,) if call.name in _BY_OUTPUT else ()


def _odd(values: Mapping[int, object]) -> list[int]:
    """The ranks that have another value than most; all where there is no majority."""
    most, count = Counter(values.values()).most_common(1)[0]
    return sorted(rank for rank, value in values.items() if value != most or 2 * count <= len(values))


def _state(group: _Group) -> GroupState:
    done = [(group.waiting[rank] if rank in group.waiting else last + 1) - 1 for rank, last in group.last.items()]
    return GroupState(
        group=group.label,
        backend=group.backend,
        members=group.members,
        completed=min(done, default=-1),
        last=tuple(sorted(group.last.items())),
        waiting=tuple(sorted(group.waiting.items())),
    )


def _says(groups: Sequence[_Group], *, is_live: bool) -> str:
    for group in groups:
        if is_live and group.waiting:
            number = min(group.waiting.values())
            rank = min(rank for rank, at in group.waiting.items() if at == number)
            call = group.call(rank, number)
            assert call is not None
            return (
                f"all {plural(len(group.last), 'rank')} of group {group.label} entered {_named(call, number)}, and "
                "none has completed it: look at the network and the devices"
            )
    return "no rank waits for another one in a collective"


def _named(call: Call, number: int) -> str:
    if call.peers is not None:
        source, target = call.peers
        return f"{call.name} from {source} to {target} #{number}"
    return f"{call.name} #{number}"


def _sized(call: Call) -> str:
    return f" ({size})" if (size := size_of(call)) else ""


def _who(waiting: Sequence[int], missing: Sequence[int], label: str, groups: Sequence[_Group]) -> str:
    group = next((group for group in groups if group.label == label), None)
    if group is not None and set(waiting) | set(missing) == set(group.members) and len(waiting) > 1:
        return f"the {len(waiting)} others"
    return ranks_text(waiting, limit=_MOST_SHOWN)
