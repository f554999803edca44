"""Records that may follow the newest one, before the log has taken them, and the events that they are reported as.

The coordinator proposes what `coordinator` decides. Any participant may close the run, give a notice of its end, or
report a signal (`RequestsToAll`). The log takes one record of each number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from signal import Signals
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.rendezvous.failure_detector import LostLink
from hpc_elastic.rendezvous.state import (
    Member,
    RoundEvent,
    RoundRecord,
    RunNotice,
    Status,
    host_of,
    next_status,
    node_of,
)
from hpc_elastic.run.coordinator_events import (
    CoordinatorChanged,
    LinkLost,
    NodeLeft,
    NodeLost,
    NodeMissing,
    NodeReplaced,
    NodesAsked,
    NodesWaiting,
    NoticeGiven,
    RoundConfirmed,
    RoundFrozen,
    RoundOpened,
    RunClosed,
    SignalHeard,
    SpareLost,
    StepAgreed,
)
from hpc_elastic.run.events import CoordinatorEvent
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


EVENTS: Mapping[RoundEvent, Callable[..., CoordinatorEvent]] = {
    RoundEvent.FREEZE: RoundFrozen,
    RoundEvent.CONFIRM: RoundConfirmed,
    RoundEvent.REOPEN: RoundOpened,
    RoundEvent.ANNOUNCE: NodesWaiting,
    RoundEvent.ASK: NodesAsked,
    RoundEvent.HEARD: SignalHeard,
    RoundEvent.NOTICE: NoticeGiven,
    RoundEvent.AGREE: StepAgreed,
    RoundEvent.CLOSE: RunClosed,
    RoundEvent.TAKE_OVER: CoordinatorChanged,
}


def to_event(
    event: RoundEvent, record: RoundRecord, reason: str, *, explained: tuple[int, ...] = ()
) -> CoordinatorEvent:
    """The event of `record`, to which `event` led; `explained` as in `Proposal`."""
    fields: dict[str, Any] = {}
    if event in (RoundEvent.CLOSE, RoundEvent.FREEZE):
        fields["explained"] = explained
    if event is RoundEvent.CLOSE:
        fields["outcome"] = record.outcome.value if record.outcome is not None else ""
    elif event is RoundEvent.FREEZE:
        fields["nodes"] = tuple(m.node for m in record.members)
    elif event in (RoundEvent.NOTICE, RoundEvent.AGREE) and record.notice is not None:
        fields["seconds"] = record.notice.seconds
        fields["step"] = record.notice.step if record.notice.step >= 0 else None
    return EVENTS[event](round=record.round, reason=reason, restarts_used=record.restarts_used, **fields)


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
