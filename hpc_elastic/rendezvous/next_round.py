"""The next round: what ended the last one, which nodes may be in it, and in which order. Pure.

All of it is decided when a round is frozen, or the run is closed: lost members are not known before. `assign_ranks`
orders the members for the round's record, off which each agent reads its own place (`rank_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

from msgspec import Struct

from hpc_elastic.failures.ranking import FailureClass, Ranking, Standing
from hpc_elastic.rendezvous.cluster_view import ClusterView
from hpc_elastic.rendezvous.state import FailureMemory, Member, NodeFailure, RoundRecord, newest_by_node, node_of

SIGN_SECONDS = 1.0
"""Seconds after the first failure in which a member whose loss explains it may still give a sign of life."""
SYMPTOM = FailureClass.SYMPTOM.value
_CLASSES = {one.value: one for one in FailureClass}


class RestartDecision(Struct, frozen=True, kw_only=True):
    go_on: bool
    reason: str
    memory: FailureMemory
    restarts_used: int = 0
    """Restarts used of the budget, with the new round if that is charged."""
    retryable: bool = True
    """Another attempt could end otherwise, where the run does not go on."""
    apart: tuple[int, ...] = ()
    """Nodes that are to be in no further round: all workers there failed alike, and none elsewhere."""


DecideRestart = Callable[[RoundRecord, Sequence[NodeFailure]], RestartDecision]
"""(the joinable record, the last round's failures without those that a lost member explains) → decision."""


def first_failure(failures: Iterable[NodeFailure]) -> NodeFailure:
    """The failure that counts as the cause among those of several nodes: of several hangs the furthest behind."""
    found = list(failures)
    clocks = {failure.clock for failure in found if failure.failure_class != SYMPTOM}
    has_times = len(clocks) == 1 and -1 not in clocks  # else by what they are: no time of one host is another's
    ranking = Ranking(found, partial(_standing, has_times=has_times))
    return ranking.first or ranking.all[0]


def _standing(failure: NodeFailure, *, has_times: bool) -> Standing:
    step, silent = (failure.hang.step, failure.hang.age) if failure.hang is not None else (-1, 0.0)
    standing = Standing(_CLASSES.get(failure.failure_class), step=step, silent=silent, fingerprint=failure.fingerprint)
    if not has_times or failure.failure_class == SYMPTOM:
        return standing
    return standing._replace(
        at_ns=failure.ended_ns,
        printed_ns=failure.printed_ns,
        raised=failure.raised,
        lost_connection=failure.lost_connection,
    )


def explained_failures(view: ClusterView) -> frozenset[str]:
    """The uids whose failures in the round before follow from the loss of a member, or from the stop that a change of
    members asked for.

    A symptom does where any member has gone. Any other failure does, whatever its text, where the member's last sign of
    life came at most `SIGN_SECONDS` after the failure was seen, and the member has not joined since. Excepted are
    failures that name a broken machine, and kills from outside; of the lost node's own, all but these.
    """
    if not view.record.failed:
        return frozenset(view.failures)
    here = {member.uid for member in newest_per_node(view)}
    lost = [member for member in view.record.members if member.uid not in here]
    silent = [member for member in lost if member.uid not in view.joined and member.uid not in view.leaving]

    def follows(uid: str, failure: NodeFailure) -> bool:
        if failure.failure_class == SYMPTOM:
            return bool(lost)
        if failure.failure_class == FailureClass.INFRASTRUCTURE.value and not failure.lost_connection:
            return False
        since = view.since_failed.get(uid, float("inf")) - SIGN_SECONDS
        return any(
            view.since_sign.get(member.uid, 0.0) >= since and (member.node == failure.node) is failure.is_kill
            for member in silent
        )

    return frozenset(uid for uid, failure in view.failures.items() if follows(uid, failure))


def newest_per_node(view: ClusterView) -> list[Member]:
    """The newest live agent of each node that asks to be in the round, and may be."""
    # A node that was given up stays out: taken in, it would break the round at once.
    out = {*view.gone, *view.record.unfit}
    left = (uid for uid in view.joined if uid not in view.dead and uid not in view.leaving and node_of(uid) not in out)
    return [Member(uid, node, view.joined[uid].local_world_size) for node, uid in newest_by_node(left).items()]


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
