"""Which ranks of a process group called something else than the others, by their dumps of the flight recorder. Pure."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping

from hpc_elastic.base.text import ranks_text
from hpc_elastic.failures.flight_dump import COALESCED, RankDump, Track, numel_of, shape_of
from hpc_elastic.failures.flight_groups import FlightSuspect, Group, Reason, named, sized
from hpc_elastic.run.flight_tail import Call

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
_BY_OUTPUT = frozenset({"scatter"})
TO_ALL = frozenset({"all_to_all", "all_to_all_single", "alltoall"})
"""Collectives of which each rank may give every other another size."""


def differing(group: Group) -> list[FlightSuspect]:
    """The ranks whose call differs from the others', at the first number at which any does."""
    if group.reached < 0 or len(group.tracks) < 2:
        return []
    for number in (*_first_difference(group), group.reached):
        calls = {rank: call for rank in group.tracks if (call := group.call(rank, number)) is not None and call.name}
        for kind, key in ((Reason.OTHER_COLLECTIVE, _kind_of), (Reason.OTHER_SIZE, _size_of)):
            values = {rank: key(call) for rank, call in calls.items()}
            if len(set(values.values())) > 1:
                return [_other(group, rank, number, calls, values, kind) for rank in _odd(values)]
    return []


def _other(
    group: Group, rank: int, number: int, calls: Mapping[int, Call], values: Mapping[int, object], kind: Reason
) -> FlightSuspect:
    most = Counter(value for other, value in values.items() if other != rank).most_common(1)[0][0]
    theirs = [other for other, value in values.items() if value == most and other != rank]
    call, other = calls[rank], calls[theirs[0]]
    who = "the others" if len(theirs) == len(values) - 1 and len(theirs) > 1 else ranks_text(theirs, limit=_MOST_SHOWN)
    if kind is Reason.OTHER_COLLECTIVE:
        does = (
            f"called {named(call, number)} of group {group.label}{sized(call)} "
            f"where {who} called {other.name}{sized(other)}"
        )
    else:
        does = (
            f"called {named(call, number)} of group {group.label} with {shape_of(call) or 'nothing'} "
            f"where {who} gave {shape_of(other) or 'nothing'}"
        )
    return FlightSuspect(rank=rank, kind=kind, reason=does, group=group.label, collective=call.name, sequence=number)


def _first_difference(group: Group) -> Iterator[int]:
    """The first number, of those that all dumps still have, with which ranks called different things."""
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
                    seen[id(call)] = tables.setdefault(_signature(call), len(tables))
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
    """Whether it has all numbers of its window, and knows what was called with each."""
    return all(call.name for call in dump.calls) and track.sequences[-1] - track.sequences[0] + 1 == len(
        track.sequences
    )


def _signature(call: Call) -> object:
    """Equal for what may meet in one collective."""
    return _kind_of(call), _size_of(call)


def _kind_of(call: Call) -> object:
    return call.name


def _size_of(call: Call) -> object:
    """What must be equal on all ranks of a collective."""
    name = call.name.removeprefix(COALESCED)
    if name in _BY_OUTPUT:
        return numel_of(call)[1:]
    if name not in _BY_INPUT and name not in _BY_BOTH:
        return ()
    return numel_of(call)[: 2 if name in _BY_BOTH else 1], call.types[:1]


def _odd(values: Mapping[int, object]) -> list[int]:
    """The ranks that have another value than most; all where there is no majority."""
    most, count = Counter(values.values()).most_common(1)[0]
    return sorted(rank for rank, value in values.items() if value != most or 2 * count <= len(values))
