"""Closing a run from outside its participants: whoever creates the next record of the log does it.

Events of a coordinator's decisions. docs/reference/events.md lists them.
"""

from __future__ import annotations

import errno
import os
from types import MappingProxyType
from typing import Any

from hpc_elastic.base.outcome import Outcome
from hpc_elastic.rendezvous.claims import read_claims
from hpc_elastic.rendezvous.coordinator import Proposal, closed_after
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.peers import Peers
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.state import Member, NodeInfo, RoundEvent, RoundRecord, Status, node_of
from hpc_elastic.rendezvous.succession import Move
from hpc_elastic.store.base import Store


def close_run(store: Store, run_id: str, outcome: Outcome, reason: str) -> None:
    """Append the closing record, also where nothing was there yet. The first one to close wins.

    Raises:
        OSError: a passing fault; the call may be repeated.
        RendezvousStateError: the log can't be understood.
    """
    log = RoundLog(store, run_id)
    while True:
        record = log.latest()
        if record is None:
            closed = _closed_at_once(store, outcome, reason)
        elif record.status is Status.CLOSED:
            return
        else:
            closed = closed_after(record, outcome, reason)
        if log.append(closed):
            return


def close_if_last(store: Store, run_id: str) -> None:
    """Close where all that take part, or wait, have said goodbye.

    Each node says its own goodbye before it looks, so at least the last one sees all.
    """
    record = RoundLog(store, run_id).latest()
    if record is None or record.status is Status.CLOSED:
        return
    here, following = read_claims(store, record.round), read_claims(store, record.round + 1)
    everyone = {m.uid for m in record.members} | {*here.get("join", ()), *following.get("join", ())}
    if not everyone <= set(store.list("bye")):
        return
    done = record.status is Status.FINAL and {m.uid for m in record.members} <= set(here.get("done", ()))
    if done:
        close_run(store, run_id, Outcome.SUCCEEDED, "all workers ended with 0")
    else:
        close_run(store, run_id, Outcome.FAILED, "all nodes left")


def _closed_at_once(store: Store, outcome: Outcome, reason: str) -> RoundRecord:
    store.put_if_absent("epoch/id", os.urandom(8).hex())
    epoch = store.get("epoch/id")
    if epoch is None:
        raise OSError(errno.EIO, "the store's epoch can't be read yet")
    return RoundRecord(
        number=1, epoch=epoch, term=1, leader="", round=0, status=Status.CLOSED, outcome=outcome, reason=reason
    )


EVENT_NAMES = MappingProxyType(
    {
        RoundEvent.FREEZE: "round_frozen",
        RoundEvent.CONFIRM: "round_confirmed",
        RoundEvent.REOPEN: "round_opened",
        RoundEvent.ANNOUNCE: "nodes_waiting",
        RoundEvent.ASK: "nodes_asked",
        RoundEvent.HEARD: "signal_heard",
        RoundEvent.NOTICE: "notice_given",
        RoundEvent.AGREE: "step_agreed",
        RoundEvent.CLOSE: "closed",
        RoundEvent.TAKE_OVER: "coordinator_changed",
    }
)


def to_event(proposal: Proposal) -> tuple[str, dict[str, Any]]:
    """An event's name and fields."""
    record = proposal.record
    fields: dict[str, Any] = {
        "round": record.round,
        "reason": proposal.reason,
        "restarts_used": record.restarts_used,
    }
    if proposal.event is RoundEvent.CLOSE and record.outcome is not None:
        fields["outcome"] = record.outcome.value
    if proposal.event is RoundEvent.FREEZE:
        fields["nodes"] = [m.node for m in record.members]
    if proposal.event in (RoundEvent.NOTICE, RoundEvent.AGREE) and record.notice is not None:
        fields["seconds"] = record.notice.seconds
        fields["step"] = record.notice.step if record.notice.step >= 0 else None
    return EVENT_NAMES[proposal.event], fields


def move_event(record: RoundRecord, move: Move) -> tuple[str, dict[str, Any]]:
    """As `to_event`, for what a participant that is not the coordinator did about it."""
    return EVENT_NAMES[move.event], {"round": record.round, "reason": move.why}


def link_event(
    record: RoundRecord, info: NodeInfo, lost: tuple[str, float, float, bool], *, now: float, now_ns: int
) -> tuple[str, dict[str, Any]]:
    """As `to_event`, for packets that did not come through: `FailureDetector.links_lost`."""
    _, since, seconds, over = lost
    again = "" if over else ", and none has since"
    return "link_lost", {
        "round": record.round,
        "node": info.node,
        "host": info.host,
        "since_ns": now_ns - round((now - since) * 1e9),
        "seconds": round(seconds, 3),
        "over": over,
        "reason": f"no packet of it came through for {seconds:.1f} s{again}; it answered through the files",
    }


def consequences(
    before: RoundRecord, proposal: Proposal, peers: Peers, detector: FailureDetector
) -> list[tuple[str, dict[str, Any]]]:
    """What a committed decision means for single nodes: who is lost, who left, and who took whose place.

    Args:
        before: The record that it followed.
        proposal: What was committed.
        peers: Knows the hosts' names.
        detector: Knows who was silent for how long.
    """

    def host(member: Member | None) -> str:
        known = peers.get(member.uid) if member is not None else None
        return known.host if known else ""

    record = proposal.record
    events: list[tuple[str, dict[str, Any]]] = []
    for node, member in newly_lost(before, record):
        fields: dict[str, Any] = {"round": before.round, "node": node, "host": host(member)}
        if node in proposal.left:
            events.append(("node_left", {**fields, "reason": proposal.left[node]}))
            continue
        spare = next((uid for uid in proposal.dead_spares if node_of(uid) == node), None)
        if spare is not None:
            known = peers.get(spare)
            fields["host"] = known.host if known else ""
            events.append(("spare_lost", {**fields, **_silence(detector.last_sign(spare))}))
        elif proposal.event is RoundEvent.CLOSE:
            pass  # its workers were done: the run is closed without it, and not because of it
        elif member is None:
            reason = "it has not come" if before.round == 0 else "it was no member, and nothing is heard of it"
            events.append(("node_missing", {**fields, "reason": reason}))
        else:
            events.append(("node_lost", {**fields, **_silence(detector.last_sign(member.uid))}))
    for node in sorted(proposal.missing):
        events.append(("node_missing", {"round": record.round, "node": node, "host": "", "reason": "it has not come"}))
    for gone, come in proposal.replaced:
        fields = {"round": record.round, "group_rank": record.rank(come.uid), "node": come.node, "host": host(come)}
        fields["reason"] = f"{host(gone) or f'node {gone.node}'} is no member any more, and {host(come) or 'it'} waited"
        events.append(("node_replaced", {**fields, "replaces_node": gone.node, "replaces_host": host(gone)}))
    return events


def _silence(seconds: float) -> dict[str, Any]:
    seconds = max(0.0, seconds)  # a process that was held up counts less than what has passed
    return {"age": round(seconds, 3), "reason": f"no sign of it for {seconds:.1f} s"}


def newly_lost(before: RoundRecord, after: RoundRecord) -> list[tuple[int, Member | None]]:
    """Nodes that `after` calls lost and `before` did not, with what they were in the round."""
    members = {m.node: m for m in before.members}
    return [(node, members.get(node)) for node in sorted(set(after.lost) - set(before.lost))]
