"""Describes what a process group's ranks did, by their dumps of the flight recorder, and who is a suspect. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter

from msgspec import Struct, field

from hpc_elastic.base.text import ranks_text
from hpc_elastic.failures.flight_dump import COALESCED, RankDump, Track, numel_of, shape_of, size_of
from hpc_elastic.run.activities import AwaitedCall


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


_MOST_SHOWN = 60
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
    """The ranks whose call differs from most others' (or all), at the first number at which any does."""
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
