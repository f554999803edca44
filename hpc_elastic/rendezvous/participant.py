"""One node's part in the rendezvous, as a machine that is stepped: look, decide, act once, say when to step again.

A step never waits. It may be cut short after any single effect on the store; a later step, of this or of another
participant, goes on from what is there.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

from hpc_elastic.base.clock import Clock
from hpc_elastic.rendezvous.claims import OwnClaims, Sweep, goodbye_key, round_to_join
from hpc_elastic.rendezvous.cluster_view import (
    MOST_PENDING,
    CacheInvalidator,
    ClaimScanner,
    ClusterView,
    PendingNotifications,
)
from hpc_elastic.rendezvous.coordinator import depends_on_missing_claims, next_proposal
from hpc_elastic.rendezvous.failure_detector import FailureDetector, HeartbeatSender, StoreId
from hpc_elastic.rendezvous.membership import (
    BeatPlan,
    NodeInfo,
    Peers,
    RoundLog,
    addresses_of,
    notifier_of,
    record_name,
    record_number,
)
from hpc_elastic.rendezvous.proposals import DecideRestart, Proposal, RequestsToAll, consequences, link_event, to_event
from hpc_elastic.rendezvous.schedule import EARLY, Schedule, poll_intervals
from hpc_elastic.rendezvous.state import RoundEvent, RoundRecord, Status
from hpc_elastic.rendezvous.succession import Ending, Listener, NodesCutOff, Succession
from hpc_elastic.run.control_events import RoundOpened
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import Store
from hpc_elastic.store.notifier import Notifier

logger = logging.getLogger(__name__)

_SETTLES = (RoundEvent.FREEZE, RoundEvent.CLOSE, RoundEvent.AGREE)
"""Events that take all claims into account, also those whose announcement was lost."""
OBSERVER_NODE = -1
"""Node index of a participant that only looks: the supervisor."""


class Refreshed(RunEvent, frozen=True, kw_only=True):
    """Files were read as the server has them. For this process: no log has it."""

    serial: int
    announced: frozenset[str]


class Participant:
    def __init__(
        self,
        *,
        run_id: str,
        store: Store,
        info: NodeInfo,
        settings: RendezvousSettings,
        decide_restart: DecideRestart,
        clock: Clock,
        rng: random.Random,
        listener: Listener,
        notifier: Notifier | None = None,
    ) -> None:
        self._store = store
        self._log = RoundLog(store, run_id)
        self._info = info
        self._settings = settings
        self._decide_restart = decide_restart
        self._clock = clock
        self._listener = listener
        self._notifier = notifier
        self.observes = info.node == OBSERVER_NODE
        now = clock.monotonic()
        self.intervals = poll_intervals(settings)
        self.peers = Peers(store, info, notifier)
        self.detector = FailureDetector(store, settings, self.intervals, clock)
        self._scanner = ClaimScanner(store, info.uid, self.peers, self.detector)
        self._succession = Succession(store, info, settings, self.intervals, self.detector, rng)
        self._schedule = Schedule(self.intervals, rng, now)
        self._early = EARLY * self.intervals.stride
        self._store_id = StoreId(store, run_id, patience=settings.heartbeat_interval)
        self.heartbeat_sender = HeartbeatSender(
            store, info.uid, store_id=self._store_id, settings=settings, intervals=self.intervals, rng=rng, now=now
        )
        self.claims = OwnClaims(store, info.uid)
        """Reports of its agent about its own node; written at the next step."""
        self.to_all = RequestsToAll()
        """Requests of its agent on behalf of all; in the log as soon as that takes them."""
        self._announced = False
        self._wants_in = False
        self._idle_until = 0.0  # until then a member that is in touch with the coordinator has nothing to do
        self.has_unwritten_record = False
        """The filesystem has refused this coordinator's next record, and no newer one is known: steps in which nothing
        is written then don't show that it answers again."""
        self._refresh_serial = 0
        self._has_committed = False  # in the last step: the coordinator knows all listings that the next look needs
        self.record: RoundRecord | None = None
        self._started_at = now
        self._invalidator = CacheInvalidator(store, info.uid, observes=self.observes)
        self.notifications = PendingNotifications()
        """Keys that peers have named: the next look finds them, past the caches that hide them."""
        self.ending = Ending(store, info.uid, listener, clock)
        self._sweep = Sweep(store, info.uid, self.peers, self.claims.made, observes=self.observes, now=now)

    @property
    def looks_when_asked(self) -> bool:
        return self.observes or self.record is None or self.record.status is Status.CLOSED

    @property
    def waits_to_speak(self) -> bool:
        return bool(self.claims or self.to_all) or self._wants_in

    def join(self) -> None:
        self._wants_in = True

    def leave(self, round_index: int, reason: str) -> None:
        self._wants_in = False
        self.claims.leave(round_index, reason)

    def beat_to_files(self) -> None:
        """Rewrite the heartbeat now: an access that no cache answers. The next step finds a missing store."""
        try:
            self.heartbeat_sender.beat_to_files(self._clock.monotonic())
        except FileNotFoundError:
            pass  # the store is doubted now, which the next step looks into

    def refresh(self, serial: int) -> None:
        """Have the next step read the log and all announcements past all caches, and report `Refreshed`."""
        self._refresh_serial = serial

    def note_newest(self, keys: Iterable[str]) -> bool:
        """Take in the newest record's name from beats. Returns whether it is news, and a reason to look."""
        newest = self._newest_number
        self.notifications.add(key for key in keys if record_number(key) > newest)
        return self.notifications.newest_record > newest

    def beats(self) -> BeatPlan:
        """The beats to send each `intervals.beat` seconds: a member's to the coordinator, the coordinator's to all."""
        record = self.record
        if record is None or record.status is Status.CLOSED or self.observes:
            return BeatPlan()
        uids = {m.uid for m in record.members} | self._scanner.joining if self._leads() else {record.leader}
        return self.peers.beat_plan(record, uids - {self._info.uid}, hears=self.detector.hears)

    @property
    def _newest_number(self) -> int:
        return self.record.number if self.record is not None else 0

    def _leads(self) -> bool:
        return self.record is not None and self.record.leader == self._info.uid

    def step(self, *, notified: bool = True) -> float:
        """Look, decide, act. Returns seconds until the next step is due, where no notification comes first.

        Not `notified`: the files are looked at where that is due by itself. Raises OSError: a passing fault, step
        again after a while; StoreError: a lasting one; RendezvousStateError: a record that this program can't read.
        """
        now = self.detector.begin_step()
        self.heartbeat_sender.recheck_if_asked(now)
        plans = self.waits_to_speak
        is_idle = now < self._idle_until - self._early and self._is_connected()
        if is_idle and not (notified or plans):
            self._scanner.paused_for(self.detector.look_at(()))
            return min(self.intervals.stride, self._idle_until - now)
        self._scanner.listed = {}
        if notified and not self.notifications.keys:
            self._scanner.forget()  # nobody said what is new
        if not self._announced:
            notified = self._announce(now)
        self.heartbeat_sender.beat_if_due(
            now, leads=self._leads(), connected=self._is_connected(), look_due=self._schedule.look_due - self._early
        )
        self._schedule.update(idle=self._is_idle())
        looked = self._read_log(now, notified=notified)
        if self.heartbeat_sender.answer_if_asked(self.record, now):
            self._notify_coordinator()
        self._report_links(self.record)
        if cut_off := self._succession.cut_off(self.record, now):
            self._listener.on_event(NodesCutOff(nodes=cut_off))
        said = any([self._flush_claims(), self._join_if_wanted()])
        self._scanner.paused_for(self.detector.look_at(()))
        now = self._clock.monotonic()
        survey = self._schedule.survey_now(now, notified=notified or said)
        announced = self.notifications.keys
        is_known = notified or said or self._has_committed or self._scanner.hears_all(self.record)
        is_known &= self._notifier is not None and len(announced) < MOST_PENDING
        if survey and is_known:
            self._scanner.learn(announced, now=now, most_age=self.intervals.stride)
        elif survey:
            self._scanner.forget()
        requested = None
        if self.record is not None and self.to_all:
            noticed_for = self._clock.monotonic() - self._scanner.noticed_at
            requested = self.to_all.next(self.record, noticed_for=noticed_for)
        progress = self._commit(requested) or self._coordinate(looked=looked, survey=survey)
        if looked or survey:
            seen = self._scanner.claims_seen
            self._invalidator.while_waiting(self.record, seen=seen, now=self._clock.monotonic())
            hides = self._invalidate_what_is_hidden(surveyed=survey)
            self._has_committed = progress and not hides
            progress = progress or hides
        now = self._clock.monotonic()
        self._sweep.step(self.record, joined=self._scanner.joining, now=now)
        if progress:
            self._schedule.hurry(now)
            return 0.0
        closed = self.record is not None and self.record.status is Status.CLOSED
        ending = self.ending.look_interval(self.intervals, observes=self.observes) if closed else None
        wait = self._schedule.wait(
            now, self.record, leads=self._leads(), connected=self._is_connected(), ending=ending, idle=self._is_idle()
        )
        due = min(self.heartbeat_sender.due, float("inf") if closed else self._succession.turn_due)
        until = min(self._schedule.look_due, due, self._succession.next_look)
        self._idle_until = 0.0 if self._leads() or closed else until
        return max(0.0, min(wait, due - now))

    def _invalidate_what_is_hidden(self, *, surveyed: bool) -> bool:
        if self._leads() and not surveyed:
            return False
        hidden = self.notifications.take_hidden(newest=self._newest_number, claims=self._scanner.listed)
        for folder in sorted(hidden):
            self._store.invalidate(folder)
            self._scanner.forget()
        return bool(hidden)

    def _announce(self, now: float) -> bool:
        self.peers.announce()
        later = self._info.node > 0 and self._wants_in and self.intervals.first_look > 0
        if later:  # of many nodes that start together: the notification that the first round is frozen says all
            self.claims.join(0)
            self._schedule.look_later(now)
        self._announced = True
        return not later

    def _is_connected(self) -> bool:
        record = self.record
        return record is not None and self._notifier is not None and self.detector.is_connected(record.leader)

    def _is_idle(self) -> bool:
        record = self.record
        return (
            self._notifier is not None
            and self._schedule.is_idle_allowed
            and self._leads()
            and record is not None
            and record.status is Status.FINAL
            and not record.suspects
            and self._scanner.hears_all(record)
        )

    def _read_log(self, now: float, *, notified: bool) -> bool:
        if self._refresh_serial:
            self.look_past_caches()
            self._store.invalidate("node")
            announced = frozenset(self.peers.all_uids())
            self._listener.on_event(Refreshed(serial=self._refresh_serial, announced=announced))
            self._refresh_serial = 0
        number = self.notifications.newest_record
        news = number > self._newest_number
        if notified and not news and self.notifications.keys and self.record is not None:
            notified = False  # for a record that is known, or for a claim, which the log says nothing about
        if not self._schedule.look_now(now, notified=notified or news, connected=self._is_connected()):
            return False
        self._take_newest(hint=number if news else 0)
        if self._log.went_back:
            self._store_id.check(now)
        return True

    def look_past_caches(self) -> None:
        """Read the newest record as the server has it. May raise as `step` does."""
        self._store.invalidate("log")
        self._take_newest()

    def _take_newest(self, *, hint: int = 0) -> None:
        found = self._log.latest(hint=hint)
        if found is not None and found is not self.record:
            self._take_in(found)

    def _take_in(self, record: RoundRecord) -> None:
        before = self.record
        self._store_id.accept(record.epoch)
        self.record = record
        self.has_unwritten_record = False
        now = self._clock.monotonic()
        if before is None or (before.round, before.status) != (record.round, record.status):
            self._scanner.status_since = now
            if record.status in (Status.FROZEN, Status.FINAL) and record.member(self._info.uid) is not None:
                # The agent must ask for the next round itself: its workers must have ended, and an agent that does not
                # even confirm must not come back, to break round after round. Reset once per state: what the agent
                # asks for in it holds, even where another participant writes a record.
                self._wants_in = False
        if before is None or before.lost != record.lost:
            self._scanner.lost_since = now
        if record.notice is not None and not record.notice.is_given_as(before.notice if before else None):
            self._scanner.noticed_at = now
        if not self._leads():
            self._scanner.forget()
        self._schedule.new_record()
        self.detector.asked(record.suspects, now)
        if before is not None and before.lost != record.lost:
            self.detector.lost(m.uid for m in before.members if m.node in record.lost)
        self._report_links(record)
        if before is not None:
            self._succession.new_record(before, record)
        self._listener.on_record(record)

    def _report_links(self, record: RoundRecord | None) -> None:
        if record is None:
            return
        now, now_ns = self._clock.monotonic(), self._clock.time_ns()
        for link in self.detector.links_lost(to_the_end=record.status is Status.CLOSED):
            if record.leader == self._info.uid:
                self._listener.on_event(link_event(record, link, now=now, now_ns=now_ns))

    def _notify_coordinator(self, about: str = "") -> None:
        if self.record is not None and not self._leads():
            self.peers.notify(addresses_of(self.record.notifier), about)

    def _flush_claims(self) -> bool:
        keys = self.claims.flush()
        for key in keys:
            self._announce_claim(key)
        if (goodbye := goodbye_key(self._info.uid)) in keys and self._leads():
            self.peers.notify_all(goodbye)  # another member has to take over
        return bool(keys)

    def _announce_claim(self, key: str) -> None:
        if self._leads():
            self.notifications.add([key])
        else:
            self._notify_coordinator(key)

    def _join_if_wanted(self) -> bool:
        record = self.record
        target = round_to_join(record, self._info.uid) if self._wants_in else None
        if target is None:
            return False
        claimed = self.claims.join(target)
        if record is not None and (key := self.claims.unannounced_join(target)):
            self._announce_claim(key)
        return claimed

    def _coordinate(self, *, looked: bool, survey: bool) -> bool:
        record = self.record
        if self.observes:
            if record is not None and record.status is Status.CLOSED and looked:
                self.ending.step_of_supervisor(record, self.peers, self.detector)
            return False
        if record is None:
            return self._open_first_round()
        if record.status is Status.CLOSED:
            if looked:
                self.ending.step_of_agent()
            return False
        if record.leader != self._info.uid:
            return self._take_over_if_needed(record, looked=looked)
        if not survey or not self.heartbeat_sender.is_fresh(self._clock.monotonic()):
            return False  # nothing new; or too long without a beat of our own: others may be taking over
        view, proposal = self._survey(record)
        if proposal is not None and proposal.event in _SETTLES and not self._scanner.has_listed_all:
            self._scanner.forget()
            view, proposal = self._survey(record)
        if proposal is not None and depends_on_missing_claims(view, proposal):
            self._invalidator.before_absence(record)
            self._scanner.forget()
            _, proposal = self._survey(record)
        return self._commit(proposal)

    def _survey(self, record: RoundRecord) -> tuple[ClusterView, Proposal | None]:
        view = self._scanner.look(record)
        return view, next_proposal(view, self._settings, self._decide_restart)

    def _open_first_round(self) -> bool:
        now = self._clock.monotonic()
        if now - self._started_at < min(self._info.node, 20) * 0.3 or not self._wants_in:
            return False
        epoch = self._store_id.open()
        self.heartbeat_sender.beat(now)
        self._scanner.prepare(0)
        record = RoundRecord(
            number=1,
            epoch=epoch,
            term=1,
            leader=self._info.uid,
            notifier=notifier_of(self._info),
            round=0,
            status=Status.JOINABLE,
            reason="start",
        )
        self._append(record, RoundOpened(round=0, reason=record.reason, restarts_used=0))
        return True

    def _take_over_if_needed(self, record: RoundRecord, *, looked: bool) -> bool:
        now = self._clock.monotonic()
        move = self._succession.move(record, now, looked=looked, notified_of=self.notifications.keys)
        if move is None:
            return False
        if not move.certain:
            self._store.invalidate("log")
            self._take_newest()
            if self.record is not record:
                return True  # caches hid that another participant has gone on
        now = self._clock.monotonic()
        self._store_id.check(now)  # the coordinator may have gone because of it
        self.heartbeat_sender.beat(now)
        successor = self._succession.successor(record, move, asks=self._notifier is not None)
        if self._append(successor, to_event(move.event, successor, move.why)) and self._leads():
            self._succession.took_over(successor)
        return True

    def _commit(self, proposal: Proposal | None) -> bool:
        before = self.record
        if proposal is None or before is None:
            return False
        record = proposal.record
        events = [
            to_event(proposal.event, record, proposal.reason, explained=proposal.explained),
            *consequences(before, proposal, self.detector.last_sign),
        ]
        if self._append(record, *events) and record.number % 16 == 0:
            self._log.compact()
        return True

    def _append(self, record: RoundRecord, *events: RunEvent) -> bool:
        self.has_unwritten_record = True
        is_first = self._log.append(record)
        self.has_unwritten_record = False
        if not is_first:
            self._scanner.forget()
            self._take_newest()  # another participant has that number: what it wrote holds
            return False
        for event in events:  # before the record: an agent that reads that the run is closed looks at no later event
            self._listener.on_event(event)
        self._take_in(record)
        self.peers.learn(())
        silent = [m.uid for m in record.members if self.detector.is_silent(m.uid)]
        self.peers.notify_all(record_name(record.number), silent=silent)
        return True
