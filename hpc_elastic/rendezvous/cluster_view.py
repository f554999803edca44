"""The coordinator's view when it decides: the claims on two rounds, and which of their authors live.

It looks past the caches, so that nothing that others wrote stays hidden. A client may trust a folder's listing for
seconds (sshfs, GlusterFS, NFS mounted ``nocto``), or while the folder's time has not changed, which a server may show
by the second: what came within the tick of the last look is not shown. To invalidate the folder in a later tick ends
that for all clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field

from hpc_elastic.rendezvous.claims import (
    GONE,
    ClaimKind,
    ClaimReader,
    Claims,
    Departure,
    FailureReader,
    Ready,
    Saved,
    claim_folder,
    claim_key,
    claims_of,
    read_claim,
)
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.membership import NodeInfo, Peers, record_number
from hpc_elastic.rendezvous.state import NodeFailure, PreemptionStatus, RoundRecord, Status, node_of
from hpc_elastic.store.file_store import Store


class ClusterView(Struct, frozen=True, kw_only=True):
    record: RoundRecord
    joined: Mapping[str, NodeInfo]
    """Claims on this round while it is joinable, on the next one while it is frozen or final."""
    acked: Mapping[str, str]
    """Confirmations of this round; the value is the TCPStore's ``host:port`` from the first slot, else empty."""
    failures: Mapping[str, NodeFailure]
    """Those of the round before while this one is joinable, else of this one."""
    since_failed: Mapping[str, float] = field(default_factory=dict)
    """Uid → seconds since its failure was first seen here."""
    since_sign: Mapping[str, float] = field(default_factory=dict)
    """Uid → seconds since a member's last sign of life, where the round is joinable after a failure."""
    done: frozenset[str]
    """Members whose workers have all ended with 0."""
    leaving: Mapping[str, str]
    gone: frozenset[int]
    """Nodes for which the launcher will bring no further agent."""
    dead: frozenset[str]
    silent: frozenset[str]
    """Participants that were heard on the network before, and are not any more: to be asked through the files."""
    stale: Mapping[str, float] = field(default_factory=dict)
    """Awaited members that are heard, to be asked too: uid → seconds for which its heartbeat has not changed."""
    answered: frozenset[str]
    """Suspects that have rewritten their heartbeat since, or were heard again."""
    names: Mapping[int, str]
    since_status: float
    since_lost: float
    """Seconds since this coordinator last found a node missing; `since_status` where none was."""
    is_unsupervised: bool = False
    """The supervisor's heartbeat has stopped too: nobody starts an agent on a lost node any more. Looked for where a
    node is lost and the round is joinable."""
    since_waiting: float = 0.0
    """Seconds for which nodes have waited while the round is final."""
    since_saved: float = float("inf")
    """Seconds since a checkpoint was complete; infinite where no member has reported one."""
    is_saving: bool = False
    noted: Mapping[str, PreemptionStatus] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    since_notice: float = 0.0
    """Seconds since this coordinator first saw it. Time in which this process was held up counts: the job's goes on."""


class GrowthSigns:
    """One coordinator's, on its monotonic clock. Claims never change: what was read once is not read again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._round = -1
        self._waiting_since: float | None = None
        self._saved_at: dict[tuple[str, str], float] = {}
        """(uid, serial) → when its checkpoint was complete."""
        self._saving: set[tuple[str, str]] = set()
        self._now = 0.0

    def look(self, round_index: int, claims: Claims, *, waiting: bool, now: float) -> None:
        """Take in the listing of a final round's folder at the moment `now`; `waiting`: a node that lives waits."""
        if round_index != self._round:
            self._round, self._waiting_since = round_index, None
            self._saved_at, self._saving = {}, set()
        self._now = now
        if not waiting or self._waiting_since is None:
            self._waiting_since = now if waiting else None
        self._saving = {(uid, serial) for uid, serial, _ in _words(claims, ClaimKind.SAVING)}
        unread = [word for word in _words(claims, ClaimKind.SAVED) if word[:2] not in self._saved_at]
        keys = [claim_key(round_index, ClaimKind.SAVED, uid, serial=serial) for uid, serial, _ in unread]
        for (uid, serial, _), raw in zip(unread, self._store.get_many(keys), strict=True):
            saved = read_claim(Saved, raw)
            self._saved_at[uid, serial] = now - (max(0.0, saved.age) if saved is not None and saved.age < 1e9 else 0.0)

    def paused_for(self, seconds: float) -> None:
        self._now += seconds
        if self._waiting_since is not None:
            self._waiting_since += seconds
        self._saved_at = {key: at + seconds for key, at in self._saved_at.items()}

    @property
    def since_waiting(self) -> float:
        return 0.0 if self._waiting_since is None else self._now - self._waiting_since

    @property
    def since_saved(self) -> float:
        return min((self._now - at for at in self._saved_at.values()), default=float("inf"))

    @property
    def is_saving(self) -> bool:
        return bool(self._saving - self._saved_at.keys())


def _words(claims: Claims, kind: ClaimKind) -> list[tuple[str, str, str]]:
    found = []
    for name, uids in claims.items():
        word, dot, serial = name.partition(".")
        if dot and word == kind.value:
            found += [(uid, serial, name) for uid in uids]
    return found


_MOST_READ = 3
"""Claims of a folder that are read one by one: a listing costs as much as three reads."""


class ClaimScanner:
    def __init__(self, store: Store, uid: str, peers: Peers, detector: FailureDetector) -> None:
        self._store = store
        self._uid = uid
        self._peers = peers
        self._detector = detector
        self._failures = FailureReader(store)
        self._leaving = ClaimReader(store, ClaimKind.LEAVE, Departure)
        self._ready = ClaimReader(store, ClaimKind.ACK, Ready)
        self._growth = GrowthSigns(store)
        self._noted = ClaimReader(store, ClaimKind.NOTED, PreemptionStatus)
        self._dead: frozenset[str] = frozenset()
        self.status_since = detector.mark
        self.lost_since = detector.mark
        self.noticed_at = detector.mark
        self._failed_at: dict[tuple[int, str], float] = {}
        self.joining: frozenset[str] = frozenset()
        self.listed: Mapping[int, Claims] = {}
        self.claims_seen = 0
        self._names: dict[str, set[str]] = {}
        """Folder → what it was last listed with, and the claims that were announced since."""
        self._listed_at = float("-inf")
        self.has_listed_all = False

    def forget(self) -> None:
        """The next look lists all folders."""
        self._names.clear()

    def learn(self, keys: Collection[str], *, now: float, most_age: float) -> None:
        """Read the claims that were announced, where their folders were listed less than `most_age` seconds ago. Claims
        never change while their round is looked at: a listing with those is a newer one, but for lost announcements."""
        folders: dict[str, set[str]] = {}
        for key in keys:
            folder, _, name = key.rpartition("/")
            folders.setdefault(folder, set()).add(name)
        if now - self._listed_at >= most_age:
            self.forget()
        for folder in folders.keys() & self._names.keys():
            new = sorted(folders[folder] - self._names[folder])
            few = len(new) <= _MOST_READ
            if few and None not in self._store.get_many([f"{folder}/{name}" for name in new]):
                self._names[folder].update(new)
            else:
                del self._names[folder]

    def _list(self, folder: str) -> set[str]:
        if folder not in self._names:
            self._names[folder] = set(self._store.list(folder))
        return self._names[folder]

    def paused_for(self, seconds: float) -> None:
        """Add a pause of this process to all ages: no node has aged by it."""
        self.status_since += seconds
        self.lost_since += seconds
        self._failed_at = {key: at + seconds for key, at in self._failed_at.items()}
        self._growth.paused_for(seconds)

    def prepare(self, round_index: int) -> None:
        for folder in (claim_folder(round_index), claim_folder(round_index + 1), GONE):
            self._store.make_folder(folder)

    def hears_all(self, record: RoundRecord | None) -> bool:
        others = {m.uid for m in record.members} | self.joining if record is not None else set()
        return bool(others) and all(self._detector.is_connected(uid) for uid in others if uid != self._uid)

    def look(self, record: RoundRecord) -> ClusterView:
        self.prepare(record.round)
        joinable = record.status is Status.JOINABLE
        beside = record.round - 1 if joinable else record.round + 1
        folders = {claim_folder(record.round), claim_folder(beside), GONE}
        self._names = {folder: names for folder, names in self._names.items() if folder in folders}
        self.has_listed_all = not self._names
        if self.has_listed_all:
            self._listed_at = self._detector.mark
        here = claims_of(self._list(claim_folder(record.round)))
        other = claims_of(self._list(claim_folder(beside))) if beside >= 0 else {}
        self.listed = {record.round: here, beside: other}
        self.claims_seen = sum(map(len, (*here.values(), *other.values())))
        joined = (here if joinable else other).get("join", [])
        failed_round, failed = (beside, other) if joinable else (record.round, here)
        uids = {m.uid for m in record.members} | set(joined)
        gone = frozenset(int(n) for n in self._list(GONE) if n.isdecimal())
        away = gone | set(record.lost) | {node_of(uid) for uid in (*joined, *here.get("leave", ()))}
        awaited = [m.uid for m in record.members if joinable and m.node not in away]
        self._detector.wait_for(awaited, waited=self._detector.mark - self.status_since)
        self._peers.learn(uids)
        self.paused_for(self._detector.look_at(sorted(uids - {self._uid})))
        self.joining = frozenset(joined)
        dead = frozenset(uid for uid in uids if self._detector.is_dead(uid))
        if dead - self._dead:
            self.lost_since = self._detector.mark
        self._dead = dead
        if record.status is Status.FINAL:
            self._growth.look(record.round, here, waiting=not dead.issuperset(joined), now=self._detector.mark)
        failures = self._failures.read(failed_round, failed)
        known, mark = self._failed_at, self._detector.mark
        self._failed_at = {(failed_round, uid): known.get((failed_round, uid), mark) for uid in failures}
        acked: dict[str, str] = {}
        if record.status is Status.FROZEN:
            # The first slot has confirmed when the content of its claim can be read: no node can start without it.
            acked = dict.fromkeys((uid for uid in here.get("ack", ()) if uid != record.members[0].uid), "")
            ready = self._ready.read(record.round, here, without=acked)
            acked |= {uid: claim.master for uid, claim in ready.items()}
        supervisor = self._peers.observer() if joinable and record.lost else None
        is_unsupervised = supervisor is not None and bool(self._detector.overdue([supervisor], closely=True))
        return ClusterView(
            record=record,
            joined={uid: node for uid in joined if (node := self._peers.get(uid)) is not None},
            acked=acked,
            failures=failures,
            since_failed={uid: mark - at for (_, uid), at in self._failed_at.items()},
            since_sign={m.uid: self._detector.last_sign(m.uid) for m in record.members if joinable and failures},
            done=frozenset(here.get("done", ())),
            leaving=dict.fromkeys(here.get("leave", ()), "")
            | {uid: leave.reason for uid, leave in self._leaving.read(record.round, here).items()},
            gone=gone,
            dead=dead,
            silent=frozenset(uid for uid in uids if self._detector.is_silent(uid)),
            stale=self._detector.stale(),
            answered=self._detector.answered(record.suspects) | {self._uid},
            names=self._peers.names(),
            since_status=self._detector.mark - self.status_since,
            since_lost=self._detector.mark - self.lost_since,
            is_unsupervised=is_unsupervised,
            since_waiting=self._growth.since_waiting,
            since_saved=self._growth.since_saved,
            is_saving=self._growth.is_saving,
            noted=self._noted.read(record.round, here) if record.notice is not None else {},
            kept=frozenset(here.get("kept", ())),
            since_notice=self._detector.mark - self.noticed_at,
        )


FIRST_SECONDS = 1.1
"""The longest tick of the filesystems in use, and a little."""
LAST_SECONDS = 30.0


class CacheInvalidator:
    def __init__(self, store: Store, uid: str, *, observes: bool) -> None:
        self._store = store
        self._uid = uid
        self._observes = observes
        self._seen: object = None
        self._due: float | None = None
        self._delay = FIRST_SECONDS

    def before_absence(self, record: RoundRecord) -> None:
        """Look past the caches, before a decision that a node has not claimed."""
        for folder in _claim_folders(record):
            self._store.invalidate(folder)

    def while_waiting(self, record: RoundRecord | None, *, seen: int, now: float) -> None:
        """Invalidate what only this node would notice as hidden, where the number of claims `seen` has not changed for
        a while."""
        folders = self._folders(record)
        state = (record and record.number, seen)
        if self._due is None or state != self._seen:
            self._seen, self._delay = state, FIRST_SECONDS
            self._due = now + self._delay
        elif folders and now >= self._due:
            for folder in folders:
                # Records come from this node alone: when some calls lay in different ticks, they have done their work.
                # A call costs each node that looks a listing.
                if folder != "log" or record is None or self._delay < LAST_SECONDS:
                    self._store.invalidate(folder)
            self._delay = min(2 * self._delay, LAST_SECONDS)
            self._due = now + self._delay

    def _folders(self, record: RoundRecord | None) -> list[str]:
        if record is None:
            return ["log"]
        if record.status is Status.CLOSED:
            return ["node", "bye"] if self._observes else []
        return ["log", "gone", *_claim_folders(record)] if record.leader == self._uid else []


def _claim_folders(record: RoundRecord) -> list[str]:
    beside = record.round - 1 if record.status is Status.JOINABLE else record.round + 1
    return [claim_folder(index) for index in (record.round, beside) if index >= 0]


MOST_PENDING = 256
"""Things kept at a time; of more, polling has to find what caches hide."""


class PendingNotifications:
    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.newest_record = 0
        """The highest number of a record that was named since the last `take_hidden`; 0: none was."""

    def add(self, keys: Iterable[str]) -> None:
        for key in keys:
            if len(self.keys) < MOST_PENDING:
                self.keys.add(key)
                self.newest_record = max(self.newest_record, record_number(key))

    def take_hidden(self, *, newest: int, claims: Mapping[int, Claims]) -> set[str]:
        """Forget all, and return the folders to invalidate: those of keys that neither `claims`, as listed by the
        coordinator, nor record `newest` shows."""
        if not self.keys:
            return set()
        shown = {
            f"{claim_folder(index)}/{kind}+{uid}"
            for index, found in claims.items()
            for kind, uids in found.items()
            for uid in uids
        }
        folders = {claim_folder(index) for index in claims}
        hidden = set()
        for key in self.keys - shown:
            folder = key.rpartition("/")[0]
            if folder in folders or record_number(key) > newest:
                hidden.add(folder)
        self.keys.clear()
        self.newest_record = 0
        return hidden
