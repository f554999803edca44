"""The thread that talks to the shared filesystem for the rendezvous, so that a hung mount never holds up supervision.

It steps one `Participant`: at once when notified or asked, else when the participant says. What it finds goes into a
queue; a byte on a socket pair wakes the main loop. `open_session` puts thread, participant and notifier together.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Set
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import Inbox, Waker, describe_no_descriptor, is_refusal, wait_readable
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rendezvous.membership import BeatPlan, NodeInfo
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.proposals import DecideRestart
from hpc_elastic.rendezvous.schedule import Lease, poll_intervals
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.agent_events import FilesystemRefused
from hpc_elastic.run.events import Note, RunEvent
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import Store, StoreFullError, StoreRefusedError
from hpc_elastic.store.notifier import Notifier

WORTH_TELLING = 1.0
"""Seconds from which on a refusal is an event: a stale handle passes sooner."""
ALONE_SECONDS = 10.0
"""Seconds of refusal here and none at a peer, after which it is this node's own problem."""


class Refusal(Struct, frozen=True, kw_only=True):
    error: str
    path: str
    is_own: bool
    """No file could be opened, wherever it lies: the filesystem refused nothing."""
    since: float
    since_ns: int

    def __str__(self) -> str:
        return f"{self.error} ({self.path})" if self.path else self.error

    def to_event(self, now: float, *, over: bool) -> FilesystemRefused | Note:
        if self.is_own:
            reason = f"no file could be opened for {now - self.since:.0f} s: {self}"
            return Note(subject="health_warning", text="descriptors", reason=reason)
        return FilesystemRefused(
            error=self.error, path=self.path, since_ns=self.since_ns, seconds=round(now - self.since, 3), over=over
        )


class RefusalWatch:
    """One participant's knowledge of it, on its monotonic clock. `is_alone` is for any thread."""

    def __init__(self) -> None:
        self.now: Refusal | None = None
        self._peers: frozenset[str] = frozenset()
        self._peer_refused_at = float("-inf")
        self._peer_fine_at = float("-inf")

    def refused(self, error: Exception, now: float, now_ns: int) -> bool:
        """Note a refused access. Returns whether that is the first one of its time."""
        if self.now is not None:
            return False
        cause = error.__cause__ if isinstance(error, StoreFullError) else error
        # Of a link's two names the second one is its own; the first is what it holds.
        path = getattr(cause, "filename2", None) or getattr(cause, "filename", None)
        text = getattr(cause, "strerror", None)
        if isinstance(path, bytes):
            path = path.decode("utf-8", "replace")
        where = str(path) if path else str(error.facts["root"]) if isinstance(error, StoreFullError) else ""
        own = describe_no_descriptor(cause)
        self.now = Refusal(
            error=own or str(text or error),
            path="" if own else where,
            is_own=bool(own),
            since=now,
            since_ns=now_ns,
        )
        return True

    def answered(self) -> Refusal | None:
        """Note a step whose accesses all worked. Returns the refusal that this ends."""
        ended, self.now = self.now, None
        return ended

    def heard(self, beats: Collection[str], refused: Set[str], now: float) -> bool:
        """Take in beats of peers. Returns whether one is refused that was not before: how does this process fare?"""
        if refused:
            self._peer_refused_at = now
        if len(refused) < len(beats):
            self._peer_fine_at = now
        news = bool(refused - self._peers)
        self._peers = (self._peers - frozenset(beats)) | refused
        return news

    def is_alone(self, now: float) -> bool:
        refusal = self.now
        if refusal is None or now - self._peer_fine_at > 3:  # a beat says for 3 s how the filesystem treats a peer
            return False
        return now - max(refusal.since, self._peer_refused_at) >= ALONE_SECONDS


logger = logging.getLogger(__name__)

_FIRST_BACKOFF = 0.05
FULL_SECONDS = 600.0
"""Seconds for which a filesystem that is full, or refuses, is waited for with something to write: as long as a
rendezvous waits by default."""

Message = RoundRecord | RunEvent | Exception


class Coordination:
    """Owns the participant: all calls to it happen in this object's thread. Messages are records, events, and what
    ended it."""

    def __init__(
        self,
        make_participant: Callable[[Coordination], Participant],
        *,
        notifier: Notifier | None,
        clock: Clock,
        longest_backoff: float = 5.0,
        beat_interval: float = 1.0,
        lease: Lease | None = None,
    ) -> None:
        """`make_participant` is called in the thread, with its listener. `longest_backoff`: seconds between two tries
        on a filesystem that refuses: no more than between two heartbeats, which may well work on a full disk."""
        self._make_participant = make_participant
        self._notifier = notifier
        self._clock = clock
        self._lease = lease
        self._longest_backoff = longest_backoff
        self._commands: deque[Callable[[Participant], None]] = deque()
        self._messages = Inbox[Message]()
        self._stop = threading.Event()
        self._wake = Waker()
        self._beats_due = BeatPlan()
        self._beat_interval = beat_interval
        self._refusals = RefusalWatch()
        self._thread = threading.Thread(target=self._run, name="coordination", daemon=True)
        self._beats: threading.Thread | None = None
        if notifier is not None:
            self._beats = threading.Thread(target=self._beat, args=(notifier,), name="beats", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._beats is not None:
            self._beats.start()

    def fileno(self) -> int:
        return self._messages.fileno()

    def take(self) -> list[Message]:
        return self._messages.take()

    def ask(self, command: Callable[[Participant], None]) -> None:
        self._commands.append(command)
        self._wake.wake()

    def stop(self, *, within: float) -> bool:
        """Do all that was asked, then end. Returns whether it ended in time; a hung mount may keep it forever."""
        self._stop.set()
        self._wake.wake()
        if self._thread.is_alive():
            self._thread.join(within)
        return not self._thread.is_alive()

    def fail(self, error: Exception) -> None:
        """Hand `error` on as if it had ended the thread, which goes on to write the last claims. For any thread."""
        self._messages.put(error)

    @property
    def refusal(self) -> Refusal | None:
        return self._refusals.now

    def is_refused_alone(self) -> bool:
        return self._refusals.is_alone(self._clock.monotonic())

    def on_record(self, record: RoundRecord) -> None:
        if self._lease is not None:
            self._lease.note(record)
        self._messages.put(record)

    def on_event(self, event: RunEvent) -> None:
        self._messages.put(event)

    def _run(self) -> None:
        participant: Participant | None = None
        backoff = _FIRST_BACKOFF
        full_since: float | None = None
        notified = True
        while True:
            last = self._stop.is_set()
            refused = False
            delay = backoff
            try:
                if participant is None:
                    participant = self._make_participant(self)
                if self._lease is not None and self._lease.wants_look():
                    began = self._clock.monotonic()
                    participant.look_past_caches()
                    self._lease.looked(began)
                asked = bool(self._commands)
                if self._refusals.now is not None:
                    participant.beat_to_files()  # a step may touch no file, and says nothing then
                while self._commands:
                    self._commands[0](participant)
                    self._commands.popleft()  # not before: what a filesystem refuses is tried again
                notified = self._hear(participant) or notified
                delay = participant.step(notified=notified or (asked and participant.looks_when_asked))
                notified = False
                if self._lease is not None:
                    self._lease.stepped(renews=self._notifier is None)
                self._beats_due = participant.beats()
                self._beat_interval = max(self._beat_interval, participant.intervals.beat)
                backoff = _FIRST_BACKOFF
                if not participant.has_unwritten_record:
                    full_since = None
                    self._answered()
            except (OSError, StoreFullError) as error:
                now = self._clock.monotonic()
                if self._refusals.refused(error, now, self._clock.time_ns()):
                    what, why = "the shared filesystem refused", str(error)
                    if (refusal := self._refusals.now) is not None and refusal.is_own:
                        what, why = "no file can be opened, wherever it lies", str(refusal)
                    logger.warning("%s: %s; trying again", what, why)
                backoff = min(self._longest_backoff, backoff * 1.5)
                refused = True
                # What is refused is a write where the disk is full; else it may be a look that nothing depends on.
                waits = isinstance(error, StoreFullError) or participant is None or participant.waits_to_speak
                full_since = (now if full_since is None else full_since) if waits else None
                if full_since is not None and now - full_since > FULL_SECONDS:
                    lasting = StoreRefusedError(seconds=now - full_since, why=self._refusals.now or error)
                    self._messages.put(lasting if is_refusal(error) else error)
                    return
            except HpcElasticError as error:
                self._messages.put(error)
                return
            except Exception as error:  # whatever it is, the main loop must hear of it and end its workers
                logger.exception("the coordination thread failed")
                self._messages.put(error)
                return
            if last and not refused:  # the last claims are tried again until they are written, or `stop` gives up
                return
            notified = self._wait(delay, participant) or notified

    def _answered(self) -> None:
        ended, now = self._refusals.answered(), self._clock.monotonic()
        if ended is not None and now - ended.since >= WORTH_TELLING:
            what = "files can be opened again" if ended.is_own else "the shared filesystem answers again"
            logger.warning("%s, after %.0f s of: %s", what, now - ended.since, ended)
            self._messages.put(ended.to_event(now, over=True))

    def lasting_refusal(self) -> FilesystemRefused | Note | None:
        refusal, now = self._refusals.now, self._clock.monotonic()
        if refusal is None or now - refusal.since < WORTH_TELLING:
            return None
        return refusal.to_event(now, over=False)

    def _wait(self, seconds: float, participant: Participant | None) -> bool:
        """Returns whether a notification came. A beat ends no wait, unless it announces a newer record. But a long wait
        that is nearly over ends with a beat, and is a little longer where none comes: one waking in place of two."""
        slack = 0.1 * seconds if seconds >= 0.5 and self._notifier is not None else 0.0
        deadline = self._clock.monotonic() + seconds + slack
        watched: list[Any] = [self._wake]
        if self._notifier is not None:
            watched.append(self._notifier)
        if self._lease is not None and self._lease.fileno() >= 0:
            watched.append(self._lease)
        while (left := deadline - self._clock.monotonic()) > 0:
            muted = self._notifier.muted_for() if self._notifier is not None else 0.0
            listening = watched if not muted else [one for one in watched if one is not self._notifier]
            ready = wait_readable(listening, min(left, muted) if muted else left)
            if self._wake.fileno() in ready:
                self._wake.drain()
                return False
            if self._lease is not None and self._lease.fileno() in ready:
                return False
            if self._notifier is not None and self._notifier.fileno() in ready:
                if self._hear(participant):
                    return True
                if slack and deadline - self._clock.monotonic() < 2 * slack:
                    return False
        return False

    def _hear(self, participant: Participant | None) -> bool:
        if self._notifier is None:
            return False
        heard = self._notifier.drain()
        news = False
        if participant is not None:
            if heard.muted:
                participant.detector.packets_dropped_for(heard.muted)
            for uid in heard.alive:
                participant.detector.heard([uid], hears_us=heard.hears.get(uid))
            if heard.alive:
                participant.notifications.add(heard.about)
                news = participant.note_newest(heard.newest)
                if self._refusals.heard(heard.hears.keys(), heard.refused, self._clock.monotonic()):
                    # A cache may still answer here: an access that goes to the server shows how this node fares.
                    self._commands.append(lambda p: p.beat_to_files())
                    news = True
        return heard.notified or news

    def _beat(self, notifier: Notifier) -> None:
        """Beat, in a thread of its own: a filesystem that hangs makes no node silent."""
        # Without the other thread the node only seems to live: then let the others find out.
        while not self._clock.wait(self._stop, self._beat_interval) and self._thread.is_alive():
            if self._lease is not None and self._lease.renew():
                self._wake.wake()
            plan = self._beats_due
            refused = self._refusals.now is not None
            notifier.beat(plan.heard, plan.about, hears=True, refused=refused)
            notifier.beat(plan.unheard, plan.about, hears=False, refused=refused)


class RendezvousSession(Struct, frozen=True, kw_only=True):
    info: NodeInfo
    notifier: Notifier | None
    coordination: Coordination


def open_session(
    info: NodeInfo,
    notifier: Notifier | None,
    *,
    run_id: str,
    open_store: Callable[[], Store],
    settings: RendezvousSettings,
    decide_restart: DecideRestart,
    clock: Clock,
    rng: random.Random | None = None,
    lease: Lease | None = None,
) -> RendezvousSession:
    """Put a participant and its thread together. Touches no file: the thread does, once it is started."""
    info = replace(info, port=notifier.port if notifier is not None else 0)

    def make_participant(listener: Coordination) -> Participant:
        return Participant(
            run_id=run_id,
            store=open_store(),
            info=info,
            settings=settings,
            decide_restart=decide_restart,
            clock=clock,
            rng=rng or random.Random(),
            listener=listener,
            notifier=notifier,
        )

    if lease is not None:
        lease.set_intervals(poll_intervals(settings), has_beats=notifier is not None)
    coordination = Coordination(
        make_participant,
        notifier=notifier,
        clock=clock,
        longest_backoff=settings.heartbeat_interval,
        beat_interval=settings.beat_interval,
        lease=lease,
    )
    return RendezvousSession(info=info, notifier=notifier, coordination=coordination)
