"""Records that may follow the newest one, before the log has taken them, and the events that they are reported as.

The coordinator proposes what `coordinator` decides. Any participant may close the run, give a notice of its end, or
report a signal (`RequestsToAll`). The log takes one record of each number.

What ended the last round, which nodes may be in the next one, and in which order, is decided when a round is frozen, or
the run is closed: lost members are not known before. `assign_ranks` orders the members for the round's record, off
which each agent reads its own place (`rank_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from signal import Signals
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.failures.ranking import FailureClass, Ranking, Standing
from hpc_elastic.rendezvous.cluster_view import ClusterView
from hpc_elastic.rendezvous.failure_detector import LostLink
from hpc_elastic.rendezvous.state import (
    FailureMemory,
    Member,
    NodeFailure,
    RoundEvent,
    RoundRecord,
    RunNotice,
    Status,
    host_of,
    newest_by_node,
    next_status,
    node_of,
)
from hpc_elastic.run.control_events import (
    LinkLost,
    NodeLeft,
    NodeLost,
    NodeMissing,
    NodeReplaced,
    RoundFrozen,
    RoundOpened,
    RunClosed,
    SpareLost,
)
from hpc_elastic.run.events import CoordinatorEvent, Note
from hpc_elastic.run.paths import Outcome


class Proposal(Struct, frozen=True, kw_only=True):
    event: RoundEvent
    record: RoundRecord
    reason: str
    left: Mapping[int, str] = field(default_factory=dict)
    """Nodes that took themselves out, with their reason."""
    gone: Collection[int] = ()
    stale: Mapping[str, float] = field(default_factory=dict)
    replaced: Sequence[tuple[Member, Member]] = ()
    """(gone, come) for each place that is taken over."""
    missing: Collection[int] = ()
    """Nodes that had not come in time, where this closes the run."""
    explained: tuple[int, ...] = ()
    """Nodes whose failures in the round before follow from the loss of a member."""
    dead_spares: Sequence[str] = ()
    """Uids that waited for a place and are dead, where this closes the run: nobody waits for their goodbye."""


def propose(record: RoundRecord, event: RoundEvent, why: str, /, **changes: Any) -> Proposal:
    """`changes` are the record's other fields. IllegalTransitionError: nothing like it may follow."""
    after = record.successor(status=next_status(record.status, event), **changes)
    return Proposal(event=event, record=after, reason=why)


def propose_close(record: RoundRecord, outcome: Outcome, reason: str, **changes: Any) -> Proposal:
    return propose(record, RoundEvent.CLOSE, reason, outcome=outcome, reason=reason, **changes)


def propose_notice(record: RoundRecord, notice: RunNotice) -> Proposal:
    """The record that carries a preemption notice; a step that was agreed on stays, since some may have saved."""
    if record.notice is not None:
        notice = replace(notice, step=record.notice.step)
    return propose(record, RoundEvent.NOTICE, f"notice {notice.reason}", notice=notice)


class RequestsToAll:
    """The first end holds, the notice that leaves the least time, and a SIGTERM before any other signal."""

    def __init__(self) -> None:
        self._closing: tuple[Outcome, str] | None = None
        self._notice: RunNotice | None = None
        self._heard = ""

    def __bool__(self) -> bool:
        return self._closing is not None or self._notice is not None or bool(self._heard)

    def close(self, outcome: Outcome, reason: str) -> None:
        self._closing = self._closing or (outcome, reason)

    def give_notice(self, notice: RunNotice) -> None:
        """The job is going to be ended; a later notice may only be sooner."""
        if self._notice is None or notice.seconds < self._notice.seconds:
            self._notice = notice

    def heard(self, what: str) -> None:
        """``SIGTERM on n2``; its meaning is the supervisor's to find out."""
        if not self._heard or (_is_end(what) and not _is_end(self._heard)):
            self._heard = what

    def next(self, record: RoundRecord, *, noticed_for: float = 0.0) -> Proposal | None:
        """None where the record says all of them; `noticed_for`: seconds since it gave its notice here."""
        if record.status is not Status.CLOSED:
            if self._closing is not None:
                outcome, reason = self._closing
                return propose_close(record, outcome, reason)
            known = record.notice
            if self._notice is not None and (known is None or self._notice.leaves_less_than(known, since=noticed_for)):
                return propose_notice(record, self._notice)
            # Who knows of a notice may still learn that a preemption begins, which leaves less time.
            knows_as_much = _is_end(record.heard) if _is_end(self._heard) else record.heard or record.notice is not None
            if self._heard and not knows_as_much:
                return propose(record, RoundEvent.HEARD, self._heard, heard=self._heard)
        self._closing = self._notice = None
        self._heard = ""
        return None


def _is_end(heard: str) -> bool:
    return heard.startswith(Signals.SIGTERM.name)


_NOTES: Mapping[RoundEvent, tuple[str, str]] = {
    RoundEvent.CONFIRM: ("round_confirmed", "round {} confirmed by all"),
    RoundEvent.ANNOUNCE: ("nodes_waiting", "round {}: nodes wait"),
    RoundEvent.ASK: ("nodes_asked", "round {}: checking whether nodes are alive"),
    RoundEvent.HEARD: ("signal_heard", "round {}: the supervisor is asked what a signal means"),
    RoundEvent.NOTICE: ("notice_given", "round {}: the job is about to end; workers have {:.0f} s to save"),
    RoundEvent.AGREE: ("step_agreed", "round {}"),
    RoundEvent.TAKE_OVER: ("coordinator_changed", "round {}: this node coordinates now"),
}
"""Subject and text of what people alone read; the round's number and the notice's seconds come into the text."""


def to_event(
    event: RoundEvent, record: RoundRecord, reason: str, *, explained: tuple[int, ...] = ()
) -> CoordinatorEvent | Note:
    """The event of `record`, to which `event` led; `explained` as in `Proposal`."""
    index, used = record.round, record.restarts_used
    if event is RoundEvent.CLOSE:
        outcome = record.outcome.value if record.outcome is not None else ""
        return RunClosed(round=index, outcome=outcome, reason=reason, restarts_used=used, explained=explained)
    if event is RoundEvent.FREEZE:
        nodes = tuple(m.node for m in record.members)
        return RoundFrozen(round=index, reason=reason, restarts_used=used, nodes=nodes, explained=explained)
    if event is RoundEvent.REOPEN:
        return RoundOpened(round=index, reason=reason, restarts_used=used)
    subject, text = _NOTES[event]
    seconds = record.notice.seconds if record.notice is not None else 0.0
    return Note(subject=subject, text=text.format(index, seconds), reason=reason, round=index)


def link_event(record: RoundRecord, lost: LostLink, *, now: float, now_ns: int) -> LinkLost:
    """The event of packets that did not come through. `now` and `now_ns`: the same moment by both clocks."""
    again = "" if lost.over else ", and none has since"
    return LinkLost(
        round=record.round,
        node=node_of(lost.uid),
        host=host_of(lost.uid),
        since_ns=now_ns - round((now - lost.since) * 1e9),
        seconds=round(lost.seconds, 3),
        over=lost.over,
        reason=f"no packet of it came through for {lost.seconds:.1f} s{again}; it answered through the files",
    )


def consequences(before: RoundRecord, proposal: Proposal, last_sign: Callable[[str], float]) -> list[CoordinatorEvent]:
    """The events of a committed decision for single nodes; `last_sign`: uid → seconds since its last sign of life."""
    record = proposal.record
    members = {m.node: m.uid for m in before.members}
    events: list[CoordinatorEvent] = []
    for node in sorted(set(record.lost) - set(before.lost)):
        uid = members.get(node)
        # While nodes come, no member of the round has workers: who is lost had its last ones in the round before.
        host, index = host_of(uid) if uid else "", before.round - (before.status is Status.JOINABLE and uid is not None)
        spare = next((uid for uid in proposal.dead_spares if node_of(uid) == node), None)
        if node in proposal.left:
            events.append(NodeLeft(round=index, node=node, host=host, reason=proposal.left[node]))
        elif spare is not None:
            events.append(SpareLost(round=index, node=node, host=host_of(spare), **_silence(last_sign(spare))))
        elif proposal.event is RoundEvent.CLOSE and before.status is not Status.JOINABLE:
            pass  # its workers were done: the run is closed without it, and not because of it
        elif uid is None:
            reason = "it has not joined" if index == 0 else "it was not a member, and it does not answer"
            events.append(NodeMissing(round=index, node=node, host=host, reason=reason))
        else:
            stale = proposal.stale.get(uid)
            silence = _silence(last_sign(uid) if stale is None else stale)
            if stale is not None:
                silence["reason"] = files_hang(stale)
            if node in proposal.gone:
                silence["reason"] = "no agent is started there any more"
            events.append(NodeLost(round=index, node=node, host=host, **silence))
    for node in sorted(proposal.missing):
        events.append(NodeMissing(round=record.round, node=node, reason="it has not joined"))
    for gone, come in proposal.replaced:
        events.append(
            NodeReplaced(
                round=record.round,
                group_rank=record.rank(come.uid),
                node=come.node,
                host=host_of(come.uid),
                reason=f"{host_of(gone.uid)} is no member any more, and {host_of(come.uid)} waited",
                replaces_node=gone.node,
                replaces_host=host_of(gone.uid),
            )
        )
    return events


def files_hang(seconds: float) -> str:
    """Why a node that is heard counts as lost; `seconds`: its heartbeat's age."""
    return f"its files hang: its beats come, its heartbeat in the run directory has not changed for {seconds:.0f} s"


def _silence(seconds: float) -> dict[str, Any]:
    seconds = max(0.0, seconds)  # a process that was held up counts less than what has passed
    return {"age": round(seconds, 3), "reason": f"no heartbeat for {seconds:.1f} s"}


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
