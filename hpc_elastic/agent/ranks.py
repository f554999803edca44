"""From the member list to the ranks: contiguous, in slot order, each node with its own number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_elastic.rendezvous.state import Member


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


def assign_ranks(members: Sequence[Member], uid: str) -> RankLayout:
    """The place of `uid` among `members`.

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
