"""Claims of nodes about a round: one small value each, under ``round/<index>/<kind>+<uid>``, never changed.

Their number does not grow with rounds: each node removes its own claims on rounds that nobody reads any more; the
coordinator removes the rest, and other old files, while a round is final, a few at a step, and never anything of the
newest rounds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.clock import Staleness
from hpc_elastic.rendezvous.failure_detector import HEARTBEATS
from hpc_elastic.rendezvous.membership import Peers
from hpc_elastic.rendezvous.state import NodeFailure, PreemptionStatus, RoundRecord, Status, node_of
from hpc_elastic.store.file_store import Store, StoreError

C = TypeVar("C", bound=Struct)

_ROUNDS = "round/"
GONE = "gone"
BYE = "bye"
MOST_MESSAGE = 300


class ClaimKind(str, Enum):
    JOIN = "join"
    ACK = "ack"
    """The node is ready for the frozen round."""
    FAIL = "fail"
    """A worker failed: the bare fact."""
    SUM = "sum"
    """The node's failures, once the evidence is written."""
    DONE = "done"
    """All workers of the node ended with 0."""
    LEAVE = "leave"
    SAVING = "saving"
    """Nodes wait, and workers of this one are writing a checkpoint. It has a serial, as `SAVED` has."""
    SAVED = "saved"
    """Nodes wait, and this one's last checkpoint is complete."""
    NOTED = "noted"
    """There is a notice, and the node's workers stand here."""
    KEPT = "kept"
    """There is a notice, and all workers of the node that follow it have saved."""


class Ready(Struct, frozen=True):
    master: str = ""
    """``host:port`` of the TCPStore, from the first slot; else empty."""


class Departure(Struct, frozen=True):
    reason: str = ""


class Saved(Struct, frozen=True):
    age: float
    """Seconds for which the checkpoint had been complete."""


Claims = Mapping[str, Sequence[str]]


def claim_folder(round_index: int) -> str:
    return f"{_ROUNDS}{round_index:06d}"


def claim_key(round_index: int, kind: ClaimKind, uid: str, *, serial: str = "") -> str:
    """Key of a claim; `serial` distinguishes those that a node makes several times in a round."""
    word = f"{kind.value}.{serial}" if serial else kind.value
    return f"{claim_folder(round_index)}/{word}+{uid}"


def read_claims(store: Store, round_index: int) -> Claims:
    return claims_of(store.list(claim_folder(round_index)))


def claims_of(names: Iterable[str]) -> Claims:
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        kind, _, uid = name.partition("+")
        found.setdefault(kind, []).append(uid)
    return found


def goodbye_key(uid: str) -> str:
    """Key by which an agent says that it ends and leaves nothing running."""
    return f"{BYE}/{uid}"


class ClaimReader(Generic[C]):
    """Reads the claims of one kind. What was read once is not read again: claims never change."""

    def __init__(self, store: Store, kind: ClaimKind, content: type[C]) -> None:
        self._store = store
        self._kind = kind
        self._content = content
        self._round = -1
        self._read: dict[str, C] = {}

    def read(self, round_index: int, claims: Claims, *, without: Container[str] = ()) -> dict[str, C]:
        if round_index != self._round:
            self._round, self._read = round_index, {}
        uids = claims.get(self._kind.value, ())
        unread = [uid for uid in uids if uid not in self._read and uid not in without]
        keys = [claim_key(round_index, self._kind, uid) for uid in unread]
        for uid, raw in zip(unread, self._store.get_many(keys), strict=True):
            if (found := read_claim(self._content, raw)) is not None:
                self._read[uid] = found
        return {uid: self._read[uid] for uid in uids if uid in self._read}


class FailureReader:
    def __init__(self, store: Store) -> None:
        self._facts = ClaimReader(store, ClaimKind.FAIL, NodeFailure)
        self._summaries = ClaimReader(store, ClaimKind.SUM, NodeFailure)

    def read(self, round_index: int, claims: Claims) -> dict[str, NodeFailure]:
        summed_up = self._summaries.read(round_index, claims)
        found = {**self._facts.read(round_index, claims, without=summed_up), **summed_up}
        uids = {*claims.get(ClaimKind.SUM.value, ()), *claims.get(ClaimKind.FAIL.value, ())}
        unreadable = partial(NodeFailure, fingerprint="", failure_class="root", retryable=True, message="(unreadable)")
        return {uid: found.get(uid) or unreadable(node=node_of(uid)) for uid in sorted(uids)}


def read_claim(cls: type[C], raw: str | None) -> C | None:
    try:
        return None if raw is None else codec.loads(cls, raw)
    except codec.UnreadableRecordError:
        return None


def round_to_join(record: RoundRecord | None, uid: str) -> int | None:
    """The round in which a node that wants to be in claims a place now."""
    if record is None:
        return 0  # where it turns out to be another one, nobody looks at the claim
    if record.status is Status.JOINABLE:
        return record.round
    if record.status is Status.CLOSED or record.member(uid) is not None:
        return None
    return record.round + 1


class OwnClaims:
    """Claims of one participant: each is written with the next step of the rendezvous, in order, once."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._uid = uid
        self._waiting: deque[tuple[str, str]] = deque()
        self.made: deque[str] = deque()
        """Keys of its claims on rounds, the oldest first; who removes a claim takes it out."""
        self._joined_round = -1
        self._is_unannounced = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def confirm(self, round_index: int, master: str) -> None:
        """`master` is ``host:port`` from the first slot, else empty."""
        self._add(round_index, ClaimKind.ACK, Ready(master))

    def report_failure(self, round_index: int, failure: NodeFailure) -> None:
        self._add_failure(round_index, ClaimKind.FAIL, failure)

    def sum_up_failures(self, round_index: int, failure: NodeFailure) -> None:
        """Once the evidence is written; before `join`, since the next freeze settles them."""
        self._add_failure(round_index, ClaimKind.SUM, failure)

    def report_done(self, round_index: int) -> None:
        self._add(round_index, ClaimKind.DONE)

    def report_saving(self, round_index: int, serial: int) -> None:
        self._add(round_index, ClaimKind.SAVING, serial=str(serial))

    def report_saved(self, round_index: int, serial: int, age: float) -> None:
        """A claim can't be taken back: each of a round has a serial of its own."""
        self._add(round_index, ClaimKind.SAVED, Saved(round(age, 3)), serial=str(serial))

    def give_up_node(self, node: int) -> None:
        self._write_later(f"{GONE}/{node:05d}", "gone")

    def deregister(self) -> None:
        """Report that this node's agent ends now, and leaves nothing running."""
        self._write_later(goodbye_key(self._uid), "bye")

    def report_noted(self, round_index: int, status: PreemptionStatus) -> None:
        self._add(round_index, ClaimKind.NOTED, status)

    def report_kept(self, round_index: int) -> None:
        self._add(round_index, ClaimKind.KEPT)

    def leave(self, round_index: int, reason: str) -> None:
        self._add(round_index, ClaimKind.LEAVE, Departure(reason[:MOST_MESSAGE]))

    def flush(self) -> list[str]:
        """Write all that waits, and return the keys. OSError, StoreError: the rest waits for the next time."""
        keys = []
        while self._waiting:
            key, value = self._waiting[0]
            self._store.put_if_absent(key, value)
            self._waiting.popleft()
            self._remember(key)
            keys.append(key)
        return keys

    def join(self, target: int) -> bool:
        """Claim a place in a round, once. Returns whether it was now."""
        if target <= self._joined_round:
            return False
        key = claim_key(target, ClaimKind.JOIN, self._uid)
        self._store.put_if_absent(key, "in")
        self._remember(key)
        self._joined_round = target
        self._is_unannounced = True
        return True

    def unannounced_join(self, target: int) -> str:
        """The key of the claim on `target`, where the coordinator is still to be notified of it; once."""
        if not self._is_unannounced or target != self._joined_round:
            return ""
        self._is_unannounced = False
        return claim_key(target, ClaimKind.JOIN, self._uid)

    def _add(self, round_index: int, kind: ClaimKind, content: Struct | None = None, *, serial: str = "") -> None:
        key = claim_key(round_index, kind, self._uid, serial=serial)
        self._write_later(key, "{}" if content is None else codec.dumps(content))

    def _add_failure(self, round_index: int, kind: ClaimKind, failure: NodeFailure) -> None:
        self._add(round_index, kind, replace(failure, message=failure.message[:MOST_MESSAGE]))

    def _remember(self, key: str) -> None:
        if key.startswith(_ROUNDS):
            self.made.append(key)

    def _write_later(self, key: str, value: str) -> None:
        self._waiting.append((key, value))


logger = logging.getLogger(__name__)

KEPT_ROUNDS = 1
"""Number of rounds before the newest whose claims are kept: a round's failures are settled in the next one."""
KEPT_VALUES = 8
"""The same for rounds' key-value folders, which programs outside use too."""
SWEEP_SECONDS = 30.0
"""Seconds between two looks of the coordinator for old files."""
GONE_SECONDS = 900.0
"""Seconds without a change of its heartbeat after which the files of an agent outside the round are removed."""
REMOVALS_PER_SECOND = 50.0
MOST_AT_ONCE = 25


def old_rounds(names: Iterable[str], *, newest: int, kept: int) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal() and int(name) < newest - kept)


class Sweep:
    """One participant's part in it: a `step` at the end of each of its machine's steps."""

    def __init__(
        self, store: Store, uid: str, peers: Peers, claimed: deque[str], *, observes: bool, now: float
    ) -> None:
        """`peers` announces it again, should others have taken it for gone. `claimed`: keys of this node's claims;
        those that are removed are taken out. One that `observes` removes nothing."""
        self._store = store
        self._uid = uid
        self._peers = peers
        self._observes = observes
        self._allowed = 0.0
        self._stepped_at = now
        self._claimed = claimed
        self._keys: Iterator[str] = iter(())
        self._swept_at = now
        self._outside: Staleness[str] = Staleness(longest_gap=4 * SWEEP_SECONDS)
        """Heartbeats of agents outside the round. They do not age while this process does not look: frozen, or not the
        coordinator."""

    def step(self, record: RoundRecord | None, *, joined: AbstractSet[str], now: float) -> None:
        """Remove a little, where nobody waits; `joined`: claims on the next round, as the coordinator last saw them."""
        if self._observes:
            return
        try:
            if now - self._stepped_at >= GONE_SECONDS / 2:
                self._peers.announce()
            passed, self._stepped_at = max(0.0, now - self._stepped_at), now
            self._allowed = min(MOST_AT_ONCE, self._allowed + REMOVALS_PER_SECOND * passed)
            if record is None or record.status is not Status.FINAL:
                return
            kept = claim_folder(max(0, record.round - KEPT_ROUNDS))
            while self._claimed and self._claimed[0] < kept and self._may_remove():
                self._store.delete(self._claimed[0])
                self._claimed.popleft()
            if record.leader == self._uid:
                self._remove_others(record, joined, now)
        except (OSError, StoreError) as error:
            logger.debug("not swept: %s", error)  # the next step tries again; nothing depends on it

    def _may_remove(self) -> bool:
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True

    def _remove_others(self, record: RoundRecord, joined: AbstractSet[str], now: float) -> None:
        while self._may_remove():
            key = next(self._keys, None)
            if key is not None:
                self._store.delete(key)
            elif now - self._swept_at >= SWEEP_SECONDS:
                self._swept_at = now
                self._keys = self._find(record, joined, now)
            else:
                return

    def _find(self, record: RoundRecord, joined: AbstractSet[str], now: float) -> Iterator[str]:
        for index in old_rounds(self._store.list("round"), newest=record.round, kept=KEPT_ROUNDS):
            folder = claim_folder(index)
            yield from (f"{folder}/{name}" for name in self._store.list(folder))
            yield folder
        for index in old_rounds(self._store.list("kv"), newest=record.round, kept=KEPT_VALUES):
            folder = f"kv/{index:06d}"
            yield from (f"{folder}/key/{name}" for name in self._store.list(f"{folder}/key"))
            yield from (f"{folder}/key", folder)
        inside = {member.uid for member in record.members} | joined | {self._uid}
        announced = {name.partition("+")[0]: name for name in self._store.list("node")}
        outside = {*announced, *self._store.list(HEARTBEATS)} - inside
        ages = self._outside.observe_all({uid: self._store.version(f"{HEARTBEATS}/{uid}") for uid in outside}, now)
        for uid in sorted(uid for uid, age in ages.items() if age >= GONE_SECONDS):
            # In this order: the end of the run waits for each agent that has announced itself and not deregistered.
            yield from (f"node/{announced.get(uid, uid)}", f"{HEARTBEATS}/{uid}", f"bye/{uid}")
