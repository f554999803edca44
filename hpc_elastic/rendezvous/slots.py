"""Who sits where: from the last round's members and the nodes that are here to the next member list."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_elastic.rendezvous.state import Member


def assign_slots(previous: Sequence[Member], present: Sequence[Member], *, max_nodes: int) -> tuple[Member, ...]:
    """Choose and order the members of a round.

    A node that was a member keeps its slot (also when a new agent came from there); a slot whose node is gone is
    filled from the nodes that were not members, lowest node index first; what stays empty is closed up in slot order.
    The first round is in node order, which is Slurm's: topology.

    Args:
        previous: The last final round's members in slot order; empty before the first round.
        present: The nodes that joined, at most one per node index, in any order.
        max_nodes: No more than so many become members.

    Returns:
        The members in slot order: the position is the group rank.
    """
    by_node = {member.node: member for member in present}
    slots: list[Member | None] = [by_node.pop(member.node, None) for member in previous[:max_nodes]]
    newcomers = [by_node[node] for node in sorted(by_node)]
    if not any(slots):
        return tuple(newcomers[:max_nodes])
    for index, slot in enumerate(slots):
        if slot is None and newcomers:
            slots[index] = newcomers.pop(0)
    taken = [slot for slot in slots if slot is not None]
    return tuple(taken + newcomers[: max_nodes - len(taken)])
