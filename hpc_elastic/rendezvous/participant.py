"""One node's part in the rendezvous, as a machine that is stepped: look, decide, act once, say when to step again.

A step reads the log, does what its agent asked for, and, where this node is the coordinator, commits at most what
`coordinator.next_proposal` says. It never waits: a thread with a doorbell drives it in an agent, a loop with a fake
clock in a test. It may be cut short after any single effect on the store; a later step, of this or of another
participant, goes on from what is there.
"""

from __future__ import annotations

import errno
import json
import logging
import random
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from hpc_elastic.clock import Clock
from hpc_elastic.rendezvous.claims import ClaimKind, Claims, claim_key, read_claims, read_confirmed, read_failures
from hpc_elastic.rendezvous.coordinator import (
    Proposal,
    SettleFailures,
    View,
    closed_after,
    next_proposal,
    rests_on_absence,
)
from hpc_elastic.rendezvous.ending import Ending, goodbye_key
from hpc_elastic.rendezvous.life_signs import LifeSigns
from hpc_elastic.rendezvous.peers import Bell, Peers
from hpc_elastic.rendezvous.rung_about import RungAbout, record_name
from hpc_elastic.rendezvous.settings import RendezvousSettings
from hpc_elastic.rendezvous.state import NodeFailure, NodeInfo, Outcome, RoundRecord, Status, decode_record
from hpc_elastic.rendezvous.stirring import Stirring
from hpc_elastic.rendezvous.sweep import Sweep
from hpc_elastic.rendezvous.transitions import RoundEvent
from hpc_elastic.rendezvous.uid import supersedes
from hpc_elastic.store.base import Store, StoreWipedError
from hpc_elastic.store.doorbell import Address
from hpc_elastic.store.lease import Heartbeat
from hpc_elastic.store.record_log import RecordLog

logger = logging.getLogger(__name__)

OBSERVER_NODE = -1
"""Node index of a participant that only looks: the supervisor."""


class Listener(Protocol):
    """Whom a participant tells. Called from within `Participant.step`."""

    def on_record(self, record: RoundRecord) -> None:
        """A newer record is there; records in between may be skipped."""
        ...

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """This node, as coordinator, decided something."""
        ...


class Participant:
    """One node in the rendezvous of one store."""

    def __init__(
        self,
        *,
        run_id: str,
        store: Store,
        info: NodeInfo,
        settings: RendezvousSettings,
        settle: SettleFailures,
        clock: Clock,
        rng: random.Random,
        listener: Listener,
        bell: Bell | None = None,
    ) -> None:
        self._run_id = run_id
        self._store = store
        self._log = RecordLog(store)
        self._info = info
        self._settings = settings
        self._settle = settle
        self._clock = clock
        self._listener = listener
        self._bell = bell
        self._peers = Peers(store, info, bell)
        self._heartbeat = Heartbeat(store, info.uid, interval=settings.heartbeat_interval)
        self._life = LifeSigns(store, settings, clock)
        self._answered_number = 0
        self._claims: deque[tuple[str, str]] = deque()
        self._closing: tuple[Outcome, str] | None = None
        self._wants_in = False
        self._joined_round = -1
        self._epoch: str | None = None
        self._epoch_missing_since: float | None = None
        self._dead: frozenset[str] = frozenset()
        self._seen_joining: frozenset[str] = frozenset()
        self._record: RoundRecord | None = None
        self._started_at = clock.monotonic()
        self._status_since = self._started_at
        self._lost_since = self._started_at
        self._stirring = Stirring(store, info.uid, observes=info.node == OBSERVER_NODE)
        self._claims_seen = 0
        self._rung_about = RungAbout()
        self._listed: dict[int, Claims] = {}
        self._patience = rng.uniform(0.0, 0.1)
        self._ending = Ending(store, info.uid, listener, clock)
        observes = info.node == OBSERVER_NODE
        self._sweep = Sweep(store, info.uid, self._peers, observes=observes, now=self._started_at)

    # -- what the agent asks for; each takes effect at the next step ---------------------------------------------

    def join(self) -> None:
        """Take part in the round that is open, or wait for the next one."""
        self._wants_in = True

    def confirm(self, round_index: int, master: str) -> None:
        """This node is ready for the frozen round; `master` is ``host:port`` from the first slot, else empty."""
        self._claim(round_index, ClaimKind.ACK, {"master": master})

    def report_failure(self, round_index: int, failure: NodeFailure) -> None:
        """A worker of this node failed: the round is over for all, as soon as the coordinator reads it."""
        self._claim(round_index, ClaimKind.FAIL, failure.to_json())

    def sum_up_failures(self, round_index: int, failure: NodeFailure) -> None:
        """What the failures on this node were, once its workers have ended and the evidence is written.

        To be said before `join`: the coordinator settles a round's failures when the next one is frozen.
        """
        self._claim(round_index, ClaimKind.SUM, failure.to_json())

    def report_done(self, round_index: int) -> None:
        """All workers of this node ended with 0."""
        self._claim(round_index, ClaimKind.DONE, {})

    def leave(self, round_index: int, reason: str) -> None:
        """This node takes itself out."""
        self._wants_in = False
        self._claim(round_index, ClaimKind.LEAVE, {"reason": reason[:300]})

    def give_up_node(self, node: int) -> None:
        """The launcher will bring no further agent to `node`."""
        self._claims.append((f"gone/{node:05d}", "gone"))

    def say_goodbye(self) -> None:
        """This node's agent ends now, and leaves nothing running."""
        self._claims.append((goodbye_key(self._info.uid), "bye"))

    def see_to_the_end(self, turn: int) -> None:
        """The run is closed: find out whether somebody writes the verdict and gives the allocation back, or do it here.

        The listener hears ``end_seen_to``, or ``end_is_ours`` where the supervisor does not take it up in time.

        Args:
            turn: 0 for the first who may step in; each further one waits longer.
        """
        self._ending.begin(turn)

    def close(self, outcome: Outcome, reason: str) -> None:
        """End the run for all, as soon as the log takes it. The first one to close wins."""
        self._closing = self._closing or (outcome, reason)

    def _claim(self, round_index: int, kind: ClaimKind, value: Mapping[str, Any]) -> None:
        key = claim_key(round_index, kind, self._info.uid)
        self._claims.append((key, json.dumps(value, separators=(",", ":"))))

    def heard(self, uids: Iterable[str]) -> None:
        """Datagrams of these have come in: they live."""
        self._life.heard(uids)

    def was_deaf(self, seconds: float) -> None:
        """Datagrams may have been lost in a flood of invalid ones: nobody was silent for that time."""
        self._life.was_deaf(seconds)

    def rung_about(self, keys: Iterable[str]) -> None:
        """Somebody rang, and said what it wrote: the next step looks past the caches where they hide it."""
        self._rung_about.add(keys)

    def beat_addresses(self) -> list[Address]:
        """To whom this participant is to say, every second, that it lives: the coordinator; the coordinator to all."""
        record = self._record
        if record is None or record.status is Status.CLOSED or self._info.node == OBSERVER_NODE:
            return []
        if record.leader != self._info.uid:
            return self._peers.addresses([record.leader])
        return self._peers.addresses({m.uid for m in record.members} | self._seen_joining)

    # -- the machine ---------------------------------------------------------------------------------------------

    @property
    def record(self) -> RoundRecord | None:
        """The newest record seen."""
        return self._record

    def step(self) -> float:
        """Look, decide, act.

        Returns:
            Seconds until the next step is due, where no ring comes first.

        Raises:
            OSError: a passing fault of the filesystem: step again after a while.
            StoreError: a lasting one. StoreWipedError: the store is not the one that was joined.
            RendezvousStateError: the log holds a record that this program can't read.
        """
        now = self._life.begin_step()
        self._listed = {}
        if self._epoch is None:
            self._announce(now)
        if self._heartbeat.age(now) >= self._settings.heartbeat_interval:
            self._check_epoch(now)
        next_beat = self._heartbeat.beat_if_due(now)
        self._read_log()
        self._answer_if_asked(now)
        self._flush_claims()
        self._join_if_wanted()
        progress = self._close_if_asked() or self._coordinate()
        self._stirring.while_waiting(self._record, seen=self._claims_seen, now=self._clock.monotonic())
        self._sweep.step(self._record, joined=self._seen_joining, now=self._clock.monotonic())
        if progress or self._stir_what_is_hidden():
            return 0.0
        return max(0.0, min(next_beat, self._poll_delay()))

    def _stir_what_is_hidden(self) -> bool:
        """Returns whether to look again at once."""
        newest = self._record.number if self._record is not None else 0
        hidden = self._rung_about.take_hidden(newest=newest, claims=self._listed)
        for folder in sorted(hidden):
            self._store.stir(folder)
        return bool(hidden)

    def _announce(self, now: float) -> None:
        """Before anything else is claimed: who this is, and that it lives."""
        self._heartbeat.beat_if_due(now)
        self._peers.announce()
        mine = secrets.token_hex(8)
        self._store.put_if_absent("epoch/id", mine)
        epoch = self._store.get("epoch/id")
        if epoch is None:
            raise OSError(errno.EIO, "the store's epoch can't be read yet")
        self._epoch = epoch

    def _check_epoch(self, now: float) -> None:
        epoch = self._store.get("epoch/id")
        if epoch is None:
            # A stale handle or directory entry reads the same for a moment: it has to last.
            if self._epoch_missing_since is None:
                self._epoch_missing_since = now
            if now - self._epoch_missing_since < self._settings.heartbeat_interval:
                raise OSError(errno.ESTALE, "the store's epoch can't be found")
        else:
            self._epoch_missing_since = None
        if epoch != self._epoch:
            why = "was removed" if epoch is None else f"was replaced (epoch {epoch}, was {self._epoch})"
            raise StoreWipedError(root=self._run_id, why=f"it {why} while the run was going on")

    def _read_log(self) -> None:
        found = self._log.latest()
        if found is None or (self._record is not None and found.number <= self._record.number):
            return
        self._take_in(decode_record(found.number, found.value, run_id=self._run_id))

    def _take_in(self, record: RoundRecord) -> None:
        before = self._record
        if record.epoch != self._epoch:
            raise StoreWipedError(root=self._run_id, why=f"its log is of epoch {record.epoch}, not {self._epoch}")
        self._record = record
        now = self._clock.monotonic()
        if before is None or (before.round, before.status) != (record.round, record.status):
            self._status_since = now
            if record.status in (Status.FROZEN, Status.FINAL) and record.member(self._info.uid) is not None:
                # The next round needs the agent's word: its workers must have ended, and one that does not even
                # confirm must not come back by itself, to break round after round. Asked once per state: what the
                # agent says in it holds, whoever else writes a record.
                self._wants_in = False
        if before is None or before.lost != record.lost:
            self._lost_since = now
        self._life.asked(record.suspects, now)
        if before is not None and before.leader != record.leader:
            self._life.forget(record.leader)  # what it said before it was coordinator was not meant for all
        self._listener.on_record(record)

    def _answer_if_asked(self, now: float) -> None:
        """The coordinator has not heard this node for a while: show by the files that it lives."""
        record = self._record
        if record is not None and self._info.uid in record.suspects and record.number > self._answered_number:
            self._heartbeat.beat_now(now)
            self._answered_number = record.number
            self._peers.ring(record.leader)

    def _flush_claims(self) -> None:
        key = ""
        while self._claims:
            key, value = self._claims[0]
            self._store.put_if_absent(key, value)
            self._claims.popleft()
        if key and self._record is not None:
            self._peers.ring(self._record.leader, key)

    def _join_if_wanted(self) -> None:
        record = self._record
        if not self._wants_in or record is None or record.status is Status.CLOSED:
            return
        if record.status is Status.JOINABLE:
            target = record.round
        elif record.member(self._info.uid) is None:
            target = record.round + 1
        else:
            return
        if target <= self._joined_round:
            return
        key = claim_key(target, ClaimKind.JOIN, self._info.uid)
        self._store.put_if_absent(key, "in")
        self._joined_round = target
        self._peers.ring(record.leader, key)

    def _close_if_asked(self) -> bool:
        if self._closing is None or self._record is None:
            return False
        if self._record.status is Status.CLOSED:
            self._closing = None
            return False
        outcome, reason = self._closing
        proposal = Proposal(event=RoundEvent.CLOSE, record=closed_after(self._record, outcome, reason), reason=reason)
        self._commit(proposal)
        return True

    def _poll_delay(self) -> float:
        record = self._record
        if record is None:
            return 0.02 if self._info.node <= 0 else 0.1
        if record.status is Status.CLOSED and self._info.node == OBSERVER_NODE and not self._ending.all_departed:
            return 0.1
        if record.status is Status.CLOSED and self._ending.awaits:
            return 0.05
        if record.status in (Status.JOINABLE, Status.FROZEN) and record.leader == self._info.uid:
            return min(0.25, self._settings.poll_interval)
        return self._settings.poll_interval

    # -- coordinating --------------------------------------------------------------------------------------------

    def _coordinate(self) -> bool:
        """Commit what is to be committed. Returns whether something was, or was lost to another."""
        record = self._record
        if self._info.node == OBSERVER_NODE:
            if record is not None and record.status is Status.CLOSED:
                self._ending.step_of_supervisor(record, self._peers)
            return False
        if record is None:
            return self._open_first_round()
        if record.status is Status.CLOSED:
            self._ending.step_of_agent()
            return False
        if record.leader != self._info.uid:
            return self._take_over_if_needed(record)
        if self._heartbeat.age(self._clock.monotonic()) > 0.6 * self._settings.heartbeat_ttl:
            return False  # too long without a beat of our own: others may be taking over
        view = self._look(record)
        proposal = next_proposal(view, self._settings, self._settle)
        if proposal is not None and rests_on_absence(view, proposal):
            self._stirring.before_absence(record)
            proposal = next_proposal(self._look(record), self._settings, self._settle)
        if proposal is None:
            return False
        self._commit(proposal)
        return True

    def _open_first_round(self) -> bool:
        if self._clock.monotonic() - self._started_at < min(self._info.node, 20) * 0.3 or not self._wants_in:
            return False
        assert self._epoch is not None
        record = RoundRecord(
            number=1, epoch=self._epoch, term=1, leader=self._info.uid, round=0, status=Status.JOINABLE, reason="start"
        )
        self._append(record, "round_opened", {"round": 0, "reason": "start", "restarts_used": 0})
        return True

    def _take_over_if_needed(self, record: RoundRecord) -> bool:
        me = self._info.uid
        suspects = record.suspects
        if supersedes(me, record.leader):
            why = "the coordinator's node has a new agent"
        else:
            why = self._why_take_over(record)
            if not why:
                return False
            self._store.stir("log")
            self._read_log()
            if self._record is not record:
                return True  # caches hid that somebody has gone on
            if self._bell is not None:
                # A roll call: this node has heard none of the others, and whoever died with the coordinator is to be
                # missed soon. The old one may live, cut off from here alone: it stays in if it answers.
                suspects = tuple(sorted({m.uid for m in record.members} - {me}))
                self._look_at(list(suspects))  # what their cells say before they are asked
            self._life.forget(record.leader)
        successor = record.successor(term=record.term + 1, leader=me, suspects=suspects)
        logger.info("taking over as coordinator: %s", why)
        self._append(successor, "coordinator_changed", {"round": record.round, "reason": why})
        return True

    def _why_take_over(self, record: RoundRecord) -> str:
        """Why this node should, or nothing."""
        self._look_at([record.leader])
        turn = self._turn(record) * 0.2 + self._patience
        unchanged = self._life.unchanged(record.leader)
        silent = self._life.silence(record.leader)
        if unchanged > self._settings.heartbeat_ttl + turn:
            return f"the coordinator {record.leader} has not changed its heartbeat for {unchanged:.1f} s"
        if silent is not None and silent > self._settings.beat_silence + turn:
            return f"no word from the coordinator {record.leader} for {silent:.1f} s"
        return ""

    def _turn(self, record: RoundRecord) -> int:
        for index, member in enumerate(record.members):
            if member.uid == self._info.uid:
                return min(index, 20)
        return 20 + min(self._info.node, 20)

    def _look(self, record: RoundRecord) -> View:
        """Collect what a decision needs: two listings, and one read per node that matters."""
        here = read_claims(self._store, record.round)
        joinable = record.status is Status.JOINABLE
        beside = record.round - 1 if joinable else record.round + 1
        other = read_claims(self._store, beside) if beside >= 0 else {}
        self._listed = {record.round: here, beside: other}
        self._claims_seen = sum(map(len, (*here.values(), *other.values())))
        joined = (here if joinable else other).get("join", [])
        failed_round, failed = (beside, other) if joinable else (record.round, here)
        uids = {m.uid for m in record.members} | set(joined)
        self._peers.learn(uids)
        self._look_at(sorted(uids - {self._info.uid}))
        self._seen_joining = frozenset(joined)
        dead = frozenset(uid for uid in uids if self._life.is_dead(uid))
        if dead - self._dead:
            self._lost_since = self._life.mark
        self._dead = dead
        return View(
            record=record,
            joined={uid: node for uid in joined if (node := self._peers.get(uid)) is not None},
            acked=read_confirmed(self._store, record, here.get("ack", ())),
            failures=read_failures(self._store, failed_round, failed),
            done=frozenset(here.get("done", ())),
            leaving=dict.fromkeys(here.get("leave", ()), "left"),
            gone=frozenset(int(n) for n in self._store.list("gone") if n.isdecimal()),
            dead=dead,
            silent=frozenset(uid for uid in uids if self._life.is_silent(uid)),
            answered=self._life.answered(record.suspects),
            names=self._peers.names(),
            since_status=self._life.mark - self._status_since,
            since_lost=self._life.mark - self._lost_since,
        )

    def _look_at(self, uids: Iterable[str]) -> None:
        gap = self._life.look_at(uids)
        self._status_since += gap
        self._lost_since += gap

    def _commit(self, proposal: Proposal) -> None:
        record = proposal.record
        before = self._record
        fields: dict[str, Any] = {"round": record.round, "reason": proposal.reason}
        name = {
            RoundEvent.FREEZE: "round_frozen",
            RoundEvent.CONFIRM: "round_confirmed",
            RoundEvent.REOPEN: "round_opened",
            RoundEvent.ANNOUNCE: "nodes_waiting",
            RoundEvent.ASK: "nodes_asked",
            RoundEvent.CLOSE: "closed",
            RoundEvent.TAKE_OVER: "coordinator_changed",
        }[proposal.event]
        fields["restarts_used"] = record.restarts_used
        if proposal.event is RoundEvent.CLOSE and record.outcome is not None:
            fields["outcome"] = record.outcome.value
        if proposal.event is RoundEvent.FREEZE:
            fields["nodes"] = [m.node for m in record.members]
        if self._append(record, name, fields) and before is not None:
            for node in sorted(set(record.lost) - set(before.lost)):
                uid = next((m.uid for m in before.members if m.node == node), None)
                known = self._peers.get(uid) if uid else None
                host = known.host if known else ""
                age = round(self._life.unchanged(uid), 3) if uid else None
                self._listener.on_event("node_lost", {"round": before.round, "node": node, "host": host, "age": age})
            if record.number % 16 == 0:
                self._log.compact()

    def _append(self, record: RoundRecord, event: str, fields: Mapping[str, Any]) -> bool:
        if not self._log.append(record.number, record.to_json()):
            self._read_log()  # somebody else has that number: what they wrote holds
            return False
        self._listener.on_event(event, fields)
        self._take_in(record)
        self._peers.learn(())
        self._peers.ring_all(record_name(record.number))
        return True
