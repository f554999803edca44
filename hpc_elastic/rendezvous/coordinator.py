"""The coordinator's decisions: from what it sees to the next record of the log, or none. Pure.

`next_proposal` looks at the round's status, and then at facts of which the first that holds decides. Under a preemption
notice no round begins: all workers saved, or time is over → close. Otherwise silent nodes are named as suspects, to be
asked whether they live (`failure_detector`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from hpc_elastic.base.text import first_of, ranges
from hpc_elastic.failures.ranking import ALL_ALIKE
from hpc_elastic.rendezvous.cluster_view import ClusterView
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.proposals import (
    SYMPTOM,
    DecideRestart,
    Proposal,
    assign_ranks,
    explained_failures,
    files_hang,
    first_failure,
    newest_per_node,
    propose,
    propose_close,
    replacements,
    whole_segments,
)
from hpc_elastic.rendezvous.state import (
    MEASURE_SECONDS,
    Member,
    NodeFailure,
    RoundEvent,
    RoundRecord,
    RunNotice,
    Status,
    agreed_step,
    host_of,
    node_of,
    supersedes,
)
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings

_MOST_NAMES = 8
HEARD_PATIENCE = 6.0
"""Seconds for which no round begins after a signal that may mean the job's end: by then its meaning is known."""
SETTLE_SECONDS = 2.5
"""Seconds from one node's report of a complete checkpoint until the other nodes, which still write theirs, must have
reported that: an agent looks at its workers once a second."""


def next_proposal(view: ClusterView, settings: RendezvousSettings, decide_restart: DecideRestart) -> Proposal | None:
    status = view.record.status
    proposal = None
    if view.record.notice is not None and status is not Status.CLOSED:
        proposal = _under_notice(view, view.record.notice, settings)
    elif status is Status.JOINABLE:
        # Workers that Slurm's signal has ended (proctrack/linuxproc) must not be started for the moments that are left.
        undecided = bool(view.record.heard) and view.since_status < HEARD_PATIENCE
        proposal = None if undecided else _while_joinable_after_loss(view, settings, decide_restart)
    elif status is Status.FROZEN:
        proposal = _while_frozen(view, settings)
    elif status is Status.FINAL:
        proposal = _while_final(view, settings)
    else:
        return None
    if proposal is not None and proposal.event is RoundEvent.CLOSE:
        proposal = _with_the_dead(view, proposal)
    suspects = _suspects(view, lost=proposal.record.lost if proposal is not None else view.record.lost)
    if proposal is not None:
        return replace(
            proposal,
            record=replace(proposal.record, suspects=suspects),
            left=_left(view),
            gone=view.gone,
            stale=view.stale,
        )
    if suspects == view.record.suspects:
        return None
    return propose(view.record, RoundEvent.ASK, _describe_suspects(view, suspects), suspects=suspects)


def _with_the_dead(view: ClusterView, proposal: Proposal) -> Proposal:
    """All dead nodes count as lost, so that no process waits until their agents deregister; a spare only here: once
    lost it would not be asked any more, and not count as dead."""
    known = {**{uid: info.node for uid, info in view.joined.items()}, **{m.uid: m.node for m in view.record.members}}
    here = {node for uid, node in known.items() if uid not in view.dead}
    dead = {uid: node for uid, node in known.items() if uid in view.dead and node not in here}
    seated = {member.node for member in view.record.members}
    return replace(
        proposal,
        record=replace(proposal.record, lost=tuple(sorted({*proposal.record.lost, *dead.values()}))),
        dead_spares=tuple(sorted(uid for uid, node in dead.items() if node not in seated)),
    )


def _suspects(view: ClusterView, *, lost: Sequence[int]) -> tuple[str, ...]:
    """One that does not answer stays a suspect until a record says that it is lost: not asked any more, it would not
    count as dead any more either."""
    members = {m.uid for m in view.record.members if m.node not in lost}
    joined = {uid for uid in view.joined if uid not in view.dead or node_of(uid) not in lost}
    asked = (set(view.record.suspects) | view.silent | view.stale.keys()) - view.answered
    return tuple(sorted(asked & (members | joined)))


def _describe_suspects(view: ClusterView, suspects: Sequence[str]) -> str:
    new = sorted(set(suspects) - set(view.record.suspects))
    if not new:
        return "all that were asked have answered, or are lost"
    silent = ", ".join(_name(node_of(uid), view) for uid in new if uid not in view.stale)
    stale = ", ".join(f"{_name(node_of(uid), view)} ({view.stale[uid]:.0f} s)" for uid in new if uid in view.stale)
    parts = [f"no packets from {silent}: checking whether it is alive"] if silent else []
    if stale:
        parts.append(f"no new heartbeat in the run directory, and no claim to join, from {stale}: checking its files")
    return "; ".join(parts)


def depends_on_missing_claims(view: ClusterView, proposal: Proposal) -> bool:
    """Return whether a claim that caches hide could change the decision: it says that a node has not come."""
    if proposal.event is RoundEvent.FREEZE:
        return bool(proposal.record.lost)
    if proposal.event is RoundEvent.CLOSE:
        return proposal.record.outcome is Outcome.TOO_FEW_NODES
    lost = set(proposal.record.lost) - set(view.record.lost)
    opens = proposal.event is RoundEvent.REOPEN and not view.failures
    return bool(lost) and (opens or proposal.event is RoundEvent.ASK)


def _while_joinable_after_loss(
    view: ClusterView, settings: RendezvousSettings, decide_restart: DecideRestart
) -> Proposal | None:
    """Failures that a lost member explains neither cost a restart nor are the cause."""
    explained = explained_failures(view)
    own = {uid: failure for uid, failure in view.failures.items() if uid not in explained}
    proposal = _while_joinable(replace(view, failures=own), settings, decide_restart)
    if proposal is None or not explained:
        return proposal
    reason = proposal.reason
    if not own and view.record.failed and proposal.event is RoundEvent.FREEZE:
        reason = f"{_describe_nodes(_lost_members(view), view)}; a consequence: {reason}"
    return replace(proposal, reason=reason, explained=tuple(sorted(node_of(uid) for uid in explained)))


def _while_joinable(view: ClusterView, settings: RendezvousSettings, decide_restart: DecideRestart) -> Proposal | None:
    record = view.record
    came = newest_per_node(view)
    present = whole_segments(came, settings.segment)
    here = frozenset(member.node for member in came)
    dead_nodes = {m.node for m in record.members if m.uid in view.dead}
    dead_nodes |= {info.node for uid, info in view.joined.items() if uid in view.dead}
    left = frozenset(_left(view))
    away = (view.gone | frozenset(record.lost) | dead_nodes | left) - here
    awaited = frozenset(range(settings.expected_nodes)) - here - away
    stopping = awaited & {m.node for m in record.members}  # alive, still ending their workers
    enough = len(present) >= settings.min_nodes
    last_call_over = view.since_status >= settings.last_call_timeout
    timed_out = view.since_status >= settings.timeout
    first_choices = awaited & frozenset(range(settings.max_nodes))
    seated = {member.node for member in record.members}
    settled = sum(member.node in seated or not view.joined[member.uid].spare for member in present)
    # Spares must not become members only because the nodes that they are spares for are not here yet.
    is_full = len(present) >= settings.max_nodes and not (first_choices and settled < settings.max_nodes)
    complete = not stopping and (not awaited or is_full or last_call_over)
    if enough and (complete or timed_out):
        if is_full and not last_call_over:
            awaited = first_choices  # spares that nobody has waited for are not missing
        return _freeze(view, settings, decide_restart, present, away, awaited)
    if not settings.give_up:
        return None
    if not enough and not awaited:
        lost = away - view.gone - left
        if not lost or view.is_unsupervised or view.since_lost >= settings.last_call_timeout:
            nobody = ", and no supervisor answers that could start an agent" if lost and view.is_unsupervised else ""
            return propose_close(
                record,
                Outcome.TOO_FEW_NODES,
                f"{len(present)} of at least {settings.min_nodes} nodes are left{_in_segments(settings)}"
                f"{_named(away, view)}{nobody}",
            )
    if timed_out:
        closed = propose_close(
            record,
            Outcome.TOO_FEW_NODES,
            f"{len(awaited) + len(away)} of {settings.expected_nodes} nodes had not joined after "
            f"{settings.timeout:g} s{_named(awaited | away, view)}",
        )
        return replace(closed, missing=awaited)
    needed = {node: why for node, why in _lost_members(view).items() if node in dead_nodes - here - set(record.lost)}
    if needed:  # the launcher starts an agent where a record says that the last one is lost
        said = f"{_describe_nodes(needed, view)}; waiting for it to come back"
        return propose(record, RoundEvent.ASK, said, lost=tuple(sorted({*record.lost, *needed})))
    return None


def _freeze(
    view: ClusterView,
    settings: RendezvousSettings,
    decide_restart: DecideRestart,
    present: Sequence[Member],
    away: frozenset[int],
    awaited: frozenset[int],
) -> Proposal:
    record = view.record
    decision = decide_restart(record, tuple(view.failures.values()))
    if not decision.go_on:
        return propose_close(
            record, Outcome.FAILED, decision.reason, memory=decision.memory, retryable=decision.retryable
        )
    apart = frozenset(decision.apart)
    set_apart = f"{', '.join(_name(node, view) for node in decision.apart)} ({ALL_ALIKE})"
    if apart:
        present = whole_segments([member for member in present if member.node not in apart], settings.segment)
        if len(present) < settings.min_nodes:
            left = f"{len(present)} of at least {settings.min_nodes} nodes are left{_in_segments(settings)}"
            cause = first_failure(view.failures.values()).message
            reason = f"{left} without {set_apart}: {cause}"
            return propose_close(record, Outcome.FAILED, reason, memory=decision.memory)
    members = assign_ranks(record.members, present, max_nodes=settings.max_nodes, segment=settings.segment)
    replaced = replacements(record.members, members)
    taken = "".join(f"; {_name(come.node, view)} took the place of {_name(gone.node, view)}" for gone, come in replaced)
    places = min(len(record.members) + record.vacant, settings.max_nodes)
    parts = {member.node for member in newest_per_node(view)} - {member.node for member in present} - apart
    without = ", ".join(
        [
            *(_name_and_why(node, view) for node in sorted(awaited | away)),
            *(f"{_name(node, view)} (the rest of a segment)" for node in sorted(parts)),
            *([set_apart] if apart else []),
        ]
    )
    missing = f"; without {without}" if without else ""
    proposal = propose(
        record,
        RoundEvent.FREEZE,
        (decision.reason or record.reason) + taken + missing,
        members=members,
        restarts_used=decision.restarts_used,
        waiting=0,
        vacant=max(0, places - len(members)),
        lost=tuple(sorted(away | awaited)),
        unfit=tuple(sorted({*record.unfit, *apart})),
        memory=decision.memory,
    )
    return replace(proposal, replaced=replaced)


def _while_frozen(view: ClusterView, settings: RendezvousSettings) -> Proposal | None:
    record = view.record
    out = _lost_members(view)
    if not out and view.since_status > 2 * settings.heartbeat_ttl:
        out = {m.node: "did not confirm" for m in record.members if m.uid not in view.acked}
    if out:
        return _reopen(record, _describe_nodes(out, view), lost=out)
    if all(m.uid in view.acked for m in record.members):
        master = view.acked[record.members[0].uid]
        return propose(record, RoundEvent.CONFIRM, f"all {len(record.members)} members confirmed", master=master)
    return None


def _while_final(view: ClusterView, settings: RendezvousSettings) -> Proposal | None:
    record = view.record
    if view.failures:
        first = first_failure(view.failures.values())
        reason = _describe_first(first, view)
        marks = [failure.hang for failure in view.failures.values() if failure.hang is not None]
        hang = min(marks, key=lambda mark: mark.lag, default=None)
        lost = _lost_members(view)
        # A lost node explains the symptoms.
        symptoms = not lost and all(failure.failure_class == SYMPTOM for failure in view.failures.values())
        return _reopen(record, reason, lost=lost, failed=True, hang=hang, symptoms=symptoms)
    lost = _lost_with_work(view)
    if lost:
        return _reopen(record, _describe_nodes(lost, view), lost=lost)
    if all(m.uid in view.done or m.uid in view.dead or m.node in view.gone for m in record.members):
        return propose_close(record, Outcome.SUCCEEDED, "all workers ended with 0")
    if any(m.uid in view.joined for m in record.members):
        return _reopen(record, "a member asked for a new round", lost={}, failed=True)
    out = {*view.gone, *record.unfit}  # one that is unfit may not have read that yet
    waiting = {
        uid: info
        for uid, info in view.joined.items()
        if uid not in view.dead and uid not in view.leaving and info.node not in out
    }
    takes_in, why = decide_growth(view, settings, waiting)
    said = f"{', '.join(_name(node, view) for node in sorted({info.node for info in waiting.values()}))} {why}"
    if takes_in and not view.done:
        return _reopen(record, said, lost={})
    if len(waiting) != record.waiting:
        said = said if waiting else "no node waits any more"
        return propose(record, RoundEvent.ANNOUNCE, said, waiting=len(waiting))
    return None


def _under_notice(view: ClusterView, notice: RunNotice, settings: RendezvousSettings) -> Proposal | None:
    record = view.record
    if record.status is not Status.FINAL:
        return propose_close(record, Outcome.PREEMPTED, f"notice {notice.reason}; no worker was running")
    over = [m for m in record.members if m.uid in view.done or m.uid in view.dead or m.node in view.gone]
    if view.failures:
        final = [failure for failure in view.failures.values() if not failure.retryable]
        first = first_failure(final or view.failures.values())
        return _preempted(record, notice, f"then {_describe_first(first, view)}", retryable=not final)
    lost = _lost_with_work(view)
    if lost:
        return _preempted(record, notice, f"then {_describe_nodes(lost, view)}")
    if len(over) == len(record.members) and not view.kept:
        return propose_close(record, Outcome.SUCCEEDED, "all workers ended with 0")
    heeds = {m.uid: view.noted[m.uid].heeds for m in record.members if m.uid in view.noted}
    running = [m for m in record.members if m.uid not in view.kept and m not in over]
    awaited = [m for m in running if heeds.get(m.uid, True) or not notice.is_agreed]
    if not awaited:
        at = f" (step {notice.step})" if notice.step >= 0 else ""
        saved = f"saved in {view.since_notice:.0f} of {notice.seconds:.0f} s{at}"
        return _preempted(
            record, notice, saved if any(heeds.values()) else "the script does not check for it: not waiting"
        )
    if view.since_notice >= notice.seconds:
        names = first_of([_name(m.node, view) for m in awaited], _MOST_NAMES)
        return _preempted(record, notice, f"{names} had not saved after {notice.seconds:.0f} s")
    missing = [m for m in record.members if m.uid not in view.noted and m not in over]
    patience = min(0.25 * notice.seconds, MEASURE_SECONDS + settings.suspect_answer)
    if notice.is_agreed or (missing and view.since_notice < patience):
        return None
    step = agreed_step(view.noted.values(), spread=min(0.25 * notice.seconds, settings.suspect_answer))
    said = f"all workers save after step {step}" if step >= 0 else "no worker reports its steps: each saves when it can"
    return propose(record, RoundEvent.AGREE, said, notice=replace(notice, step=step))


def _preempted(record: RoundRecord, notice: RunNotice, said: str, *, retryable: bool = True) -> Proposal:
    return propose_close(record, Outcome.PREEMPTED, f"notice {notice.reason}; {said}", retryable=retryable)


def decide_growth(view: ClusterView, settings: RendezvousSettings, waiting: Mapping[str, NodeInfo]) -> tuple[bool, str]:
    """Decide whether nodes that wait come into a round that goes well, and why; spares only for a lost node.

    CHECKPOINT waits for none any more after `grow_patience` seconds without one; after `suspect_answer` seconds members
    have reported the checkpoints that they had completed before nodes waited.
    """
    here = {info.node: Member(uid, info.node, info.local_world_size) for uid, info in waiting.items()}
    complete = {member.node for member in whole_segments(tuple(here.values()), settings.segment)}
    whole = [info for info in waiting.values() if info.node in complete]
    if here and not whole:
        return False, f"{'wait' if len(here) > 1 else 'waits'} for the rest of a segment"
    waits, as_a_spare = ("wait", "wait as spares") if len(whole) > 1 else ("waits", "waits as a spare")
    if not whole or settings.max_nodes <= len(view.record.members):
        return False, as_a_spare
    if view.record.vacant > 0:
        return True, f"came for {'lost nodes' if len(whole) > 1 else 'a lost node'}"
    if all(info.spare for info in whole):
        return False, as_a_spare
    if settings.grow is GrowPolicy.NOW:
        return True, "came"
    if settings.grow is GrowPolicy.NEVER:
        return False, f"{waits} for a new round to begin (--grow never)"
    idle = min(view.since_saved, view.since_status)
    if idle >= settings.grow_patience and view.since_waiting >= settings.suspect_answer:
        return True, f"came, and no checkpoint was reported for {idle:.0f} s"
    if SETTLE_SECONDS <= view.since_saved < view.since_waiting and not view.is_saving:
        return True, "came, and a checkpoint is complete"
    return False, f"{waits} for the next checkpoint (--grow checkpoint)"


def _in_segments(settings: RendezvousSettings) -> str:
    return f" in whole segments of {settings.segment}" if settings.segment > 1 else ""


def _lost_members(view: ClusterView) -> dict[int, str]:
    out: dict[int, str] = {}
    for member in view.record.members:
        if member.uid in view.leaving:
            out[member.node] = _left_because(view.leaving[member.uid])
        elif member.node not in view.gone and any(supersedes(uid, member.uid) for uid in view.joined):
            out[member.node] = "has a new agent"
        elif member.uid in view.dead:
            out[member.node] = "stopped its heartbeat"
        elif member.node in view.gone:
            out[member.node] = "has no agent any more"
    return out


def _describe_first(first: NodeFailure, view: ClusterView) -> str:
    is_named = first.hang is not None and first.hang.ranks
    return first.message if is_named else f"{first.message} on {_name(first.node, view)}"


def _name(node: int, view: ClusterView) -> str:
    if node in view.names:
        return view.names[node]
    return next((host_of(uid) for uid in view.leaving if node_of(uid) == node), f"node {node}")


def _left(view: ClusterView) -> dict[int, str]:
    here = {info.node for uid, info in view.joined.items() if uid not in view.leaving}
    return {node_of(uid): why for uid, why in view.leaving.items() if node_of(uid) not in here}


def _left_because(why: str) -> str:
    return f"left: {why}" if why else "left"


def _name_and_why(node: int, view: ClusterView) -> str:
    left = _left(view)
    stale = {node_of(uid): files_hang(age) for uid, age in view.stale.items()}
    why = _left_because(left[node]) if node in left else stale.get(node)
    return f"{_name(node, view)} ({why})" if why else _name(node, view)


def _describe_nodes(nodes: Mapping[int, str], view: ClusterView) -> str:
    return "; ".join(f"{_name(node, view)} {why}" for node, why in sorted(nodes.items()))


def _lost_with_work(view: ClusterView) -> dict[int, str]:
    done = {m.node for m in view.record.members if m.uid in view.done}
    return {node: why for node, why in _lost_members(view).items() if node not in done}


def _reopen(record: RoundRecord, reason: str, *, lost: Mapping[int, str], **changes: Any) -> Proposal:
    returned = {node for node, why in lost.items() if why == "has a new agent"}
    return propose(
        record,
        RoundEvent.REOPEN,
        reason,
        round=record.round + 1,
        lost=tuple(sorted((set(record.lost) | set(lost)) - returned)),
        waiting=0,
        reason=reason,
        master="",
        **{"failed": False, "hang": None, "symptoms": False, **changes},
    )


def _named(nodes: frozenset[int], view: ClusterView) -> str:
    """Some nodes by name, others by index: a reason has to stay short."""
    known = view.names.keys() | _left(view).keys()
    unknown = [node for node in nodes if node not in known]
    words = [f"node {ranges(unknown)}"] if unknown else []
    if named := [_name_and_why(node, view) for node in sorted(nodes) if node in known]:
        words.append(first_of(named, _MOST_NAMES))
    return f" (missing: {', '.join(words)})" if words else ""
