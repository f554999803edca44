"""Ranks where every agent says of itself what it brings: pure.

Our own agents know the members of a round from its record (`rendezvous.slots`). An agent behind a rendezvous that it
knows nothing of exchanges these few facts through the round's store instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What one agent says of itself at the start of a round."""

    role: str
    local_world_size: int
    restarts_used: int
    """As it knew them in its last round; 0 for a newcomer."""
    failed: bool
    """Whether one of its workers' failures ended its last round."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> GroupFacts:
        return cls(**json.loads(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker's ranks."""

    global_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


def worker_places(groups: Sequence[GroupFacts], group_rank: int) -> list[WorkerPlace]:
    """The ranks of the workers of one group, by local rank.

    Args:
        groups: All of the round, in the order of group ranks.
        group_rank: Whose.

    Returns:
        Contiguous over all groups in both senses: global ranks over all workers, role ranks over those of one role.
    """
    mine = groups[group_rank]
    before = groups[:group_rank]
    first = sum(group.local_world_size for group in before)
    first_in_role = sum(group.local_world_size for group in before if group.role == mine.role)
    return [
        WorkerPlace(
            global_rank=first + local_rank,
            role_rank=first_in_role + local_rank,
            world_size=sum(group.local_world_size for group in groups),
            role_world_size=sum(group.local_world_size for group in groups if group.role == mine.role),
        )
        for local_rank in range(mine.local_world_size)
    ]


def restarts_after(groups: Sequence[GroupFacts]) -> int:
    """Restarts used when this round starts: one more than before where a worker's failure led to it, on any node."""
    return max(group.restarts_used for group in groups) + int(any(group.failed for group in groups))
