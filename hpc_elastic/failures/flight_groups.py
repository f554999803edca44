"""What one process group's ranks did, by their dumps of the flight recorder, and why one is a suspect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct, field

from hpc_elastic.failures.flight_dump import RankDump, Track, size_of
from hpc_elastic.run.flight_tail import Call


class Reason(str, Enum):
    """Why a rank is a suspect."""

    NEVER_ENTERED = "never_entered"
    ALONE = "alone"
    """Most others never come to what it waits in."""
    OTHER_COLLECTIVE = "other_collective"
    OTHER_SIZE = "other_size"
    AHEAD = "ahead"
    """It has completed what the others wait in."""
    NOT_COMPLETED = "not_completed"
    NOT_STARTED = "not_started"
    """Its device has not begun what the others' have."""
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


class Group(Struct, kw_only=True):
    backend: str
    name: str
    label: str = ""
    members: tuple[int, ...] = ()
    tracks: dict[int, tuple[RankDump, Track]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    is_live: bool = True
    """Whether what `waiting` has is not completed; else (gloo, which closes what has failed) it is where most came to.
    """
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


def groups_of(dumps: Sequence[RankDump], world_size: int | None) -> list[Group]:
    found: dict[tuple[str, str, tuple[int, ...]], Group] = {}
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
            group = found.setdefault((backend, name, members), Group(backend=backend, name=name, members=members))
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


def state_of(group: Group) -> GroupState:
    done = [(group.waiting[rank] if rank in group.waiting else last + 1) - 1 for rank, last in group.last.items()]
    return GroupState(
        group=group.label,
        backend=group.backend,
        members=group.members,
        completed=min(done, default=-1),
        last=tuple(sorted(group.last.items())),
        waiting=tuple(sorted(group.waiting.items())),
    )


def named(call: Call, number: int) -> str:
    if call.peers is not None:
        source, target = call.peers
        return f"{call.name} from {source} to {target} #{number}"
    return f"{call.name} #{number}".strip()


def sized(call: Call) -> str:
    return f" ({size})" if (size := size_of(call)) else ""
