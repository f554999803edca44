"""Ranks: `assign_ranks` orders a round's members for its record, off which each agent reads its own (`rank_layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msgspec import Struct

from hpc_elastic.rendezvous.state import Member


def assign_ranks(
    previous: Sequence[Member], live: Sequence[Member], *, max_nodes: int, segment: int = 1
) -> tuple[Member, ...]:
    """Choose and order the members of a round.

    A node that was a member keeps its slot (also when a new agent came from there); a slot whose node is gone is filled
    from the nodes that were not members: with one that brings as many workers, so that the rank block stays, where
    there is one, and of several with the lowest node index. Empty slots are closed up in slot order, and the remaining
    nodes come behind while there is room. The first round is in node order.

    With segments all of this holds for whole ones: a segment of which a node is missing is no member at all, and its
    slots go to another whole one.

    `live` has at most one node for each index, which is the place in Slurm's order; spares are at its end. The position
    in the result is the group rank.
    """
    most = max_nodes // segment
    places = list(_by_segment(previous, segment).items())[:most]
    here = {index: found for index, found in _by_segment(live, segment).items() if len(found) == segment}
    slots = [here.pop(index, None) for index, _ in places]
    newcomers = [here[index] for index in sorted(here)]
    if not any(slots):
        return tuple(chain.from_iterable(newcomers[:most]))
    for place, (_, were) in enumerate(places):
        if slots[place] is None and newcomers:
            sizes = _sizes(were)
            alike = (number for number, found in enumerate(newcomers) if _sizes(found) == sizes)
            slots[place] = newcomers.pop(next(alike, 0))
    taken = [slot for slot in slots if slot is not None]
    return tuple(chain.from_iterable(taken + newcomers[: most - len(taken)]))


def whole_segments(live: Sequence[Member], segment: int) -> list[Member]:
    return [m for found in _by_segment(live, segment).values() if len(found) == segment for m in found]


def _by_segment(members: Sequence[Member], segment: int) -> dict[int, list[Member]]:
    found: dict[int, list[Member]] = {}
    for member in members:
        found.setdefault(member.node // segment, []).append(member)
    return {index: sorted(group, key=lambda member: member.node) for index, group in found.items()}


def _sizes(members: Sequence[Member]) -> list[int]:
    return [member.local_world_size for member in members]


def replacements(previous: Sequence[Member], members: Sequence[Member]) -> list[tuple[Member, Member]]:
    """(gone, come) in slot order, for each place that is taken over."""
    were, are = {member.node for member in previous}, {member.node for member in members}
    gone = [member for member in previous if member.node not in are]
    come = [member for member in members if member.node not in were]
    return list(zip(gone, come, strict=False)) if were & are else []


class RankLayout(Struct, frozen=True, kw_only=True):
    group_rank: int
    group_world_size: int
    first_rank: int
    local_world_size: int
    world_size: int

    @property
    def global_ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_world_size)


def rank_layout(members: Sequence[Member], uid: str) -> RankLayout:
    """The place of `uid` among `members`: global ranks are contiguous, each node with its own number of workers."""
    group_rank = next(index for index, member in enumerate(members) if member.uid == uid)
    return layout_of(_sizes(members), group_rank)


def layout_of(sizes: Sequence[int], group_rank: int) -> RankLayout:
    """The place of the node of group rank `group_rank`; `sizes`: workers of each node, by group rank."""
    return RankLayout(
        group_rank=group_rank,
        group_world_size=len(sizes),
        first_rank=sum(sizes[:group_rank]),
        local_world_size=sizes[group_rank],
        world_size=sum(sizes),
    )
