"""Who sits where, and with which ranks: from the last round's members and the nodes that live to the next round's.

The one place where ranks come from. `assign_ranks` is asked by the coordinator when it freezes a round, and its answer
is in the round's record; every agent reads its own ranks off that with `rank_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_elastic.light_dataclass import dataclass
from hpc_elastic.rendezvous.state import Member


def assign_ranks(previous: Sequence[Member], live: Sequence[Member], *, max_nodes: int) -> tuple[Member, ...]:
    """Choose and order the members of a round.

    A node that was a member keeps its slot (also when a new agent came from there); a slot whose node is gone is
    filled from the nodes that were not members: with one that brings as many workers, so that the rank block stays,
    where there is one, and of several with the lowest node index. What stays empty is closed up in slot order, and who
    is left comes behind while there is room. The first round is in node order.

    Args:
        previous: The last round's members in slot order; empty before the first round.
        live: The nodes that want to be in, at most one for each node index, in any order. The index is the place in
            Slurm's order, which is topology; spares are at its end.
        max_nodes: No more than so many become members.

    Returns:
        The members in slot order: the position is the group rank, and `rank_layout` gives the global ones.
    """
    by_node = {member.node: member for member in live}
    slots: list[Member | None] = [by_node.pop(member.node, None) for member in previous[:max_nodes]]
    newcomers = [by_node[node] for node in sorted(by_node)]
    if not any(slots):
        return tuple(newcomers[:max_nodes])
    for index, slot in enumerate(slots):
        if slot is None and newcomers:
            size = previous[index].local_world_size
            alike = (place for place, member in enumerate(newcomers) if member.local_world_size == size)
            slots[index] = newcomers.pop(next(alike, 0))
    taken = [slot for slot in slots if slot is not None]
    return tuple(taken + newcomers[: max_nodes - len(taken)])


def replacements(previous: Sequence[Member], members: Sequence[Member]) -> list[tuple[Member, Member]]:
    """Whose place was taken by whom: (gone, come) in slot order.

    Args:
        previous: As for `assign_ranks`.
        members: What it returned.
    """
    were, are = {member.node for member in previous}, {member.node for member in members}
    gone = [member for member in previous if member.node not in are]
    come = [member for member in members if member.node not in were]
    return list(zip(gone, come, strict=False)) if were & are else []


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """One node's place in a round."""

    group_rank: int
    group_world_size: int
    first_rank: int
    local_world_size: int
    world_size: int

    @property
    def global_ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_world_size)


def rank_layout(members: Sequence[Member], uid: str) -> RankLayout:
    """The place of `uid` among `members`: global ranks are contiguous, each node with its own number of workers.

    Args:
        members: A round's, in slot order.
        uid: One of theirs.
    """
    group_rank = next(index for index, member in enumerate(members) if member.uid == uid)
    return RankLayout(
        group_rank=group_rank,
        group_world_size=len(members),
        first_rank=sum(member.local_world_size for member in members[:group_rank]),
        local_world_size=members[group_rank].local_world_size,
        world_size=sum(member.local_world_size for member in members),
    )
