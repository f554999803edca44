"""The cause of a round's end, apart from failures that only follow from the loss of a member. Pure.

Both are decided when the next round is frozen, or the run is closed: lost members are not known before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

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
