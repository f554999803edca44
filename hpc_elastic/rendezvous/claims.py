"""What nodes report about a round: one small value each, under ``round/<index>/<kind>+<uid>``, never changed.

`ClaimReader` reads them; `own_claims.OwnClaims` writes a node's own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from typing import Generic, TypeVar

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord, Status, node_of
from hpc_elastic.store.base import Store

C = TypeVar("C", bound=Struct)

MOST_MESSAGE = 300
"""Characters of a message in a claim."""


class ClaimKind(str, Enum):
    """What a node can say about a round."""

    JOIN = "join"
    """It wants to be in."""
    ACK = "ack"
    """It is ready for the frozen round."""
    FAIL = "fail"
    """A worker failed: the bare fact."""
    SUM = "sum"
    """What failed, once the evidence is written."""
    DONE = "done"
    """All its workers ended with 0."""
    LEAVE = "leave"
    """It takes itself out."""
    SAVING = "saving"
    """While nodes wait: workers of it are writing a checkpoint. Has a serial, as what follows."""
    SAVED = "saved"
    """While nodes wait: its last checkpoint is complete, for so long."""
    NOTED = "noted"
    """There is a notice: where its workers stand."""
    KEPT = "kept"
    """There is a notice: all its workers that follow it have saved."""


class Ready(Struct, frozen=True):
    """What an ACK holds."""

    master: str = ""
    """``host:port`` of the TCPStore, from the first slot; else empty."""


class Departure(Struct, frozen=True):
    """What a LEAVE holds."""

    reason: str = ""


class Saved(Struct, frozen=True):
    """What a SAVED holds."""

    age: float
    """Seconds for which the checkpoint had been complete."""


Claims = Mapping[str, Sequence[str]]
"""Kind → uids, as one listing of a round's folder gave them."""


def claim_folder(round_index: int) -> str:
    return f"round/{round_index:06d}"


def claim_key(round_index: int, kind: ClaimKind, uid: str, *, serial: str = "") -> str:
    """Where a claim is; `serial` distinguishes those that a node makes several times in a round."""
    word = f"{kind.value}.{serial}" if serial else kind.value
    return f"{claim_folder(round_index)}/{word}+{uid}"


def read_claims(store: Store, round_index: int) -> Claims:
    """All claims on a round: one listing."""
    return claims_of(store.list(claim_folder(round_index)))


def claims_of(names: Iterable[str]) -> Claims:
    """The claims with these names in a round's folder."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        kind, _, uid = name.partition("+")
        found.setdefault(kind, []).append(uid)
    return found


class ClaimReader(Generic[C]):
    """Reads the claims of one kind. What was read once is not read again: claims never change."""

    def __init__(self, store: Store, kind: ClaimKind, content: type[C]) -> None:
        """Args:
        kind: Which ones.
        content: The record that such a claim holds.
        """
        self._store = store
        self._kind = kind
        self._content = content
        self._round = -1
        self._read: dict[str, C] = {}

    def read(self, round_index: int, claims: Claims, *, without: Container[str] = ()) -> dict[str, C]:
        """Uid → content, for all that can be read.

        Args:
            round_index: Which round's.
            claims: What its folder's listing gave.
            without: Uids whose claim need not be read.
        """
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
    """Reads the failures that nodes reported: what a node summed up replaces its bare fact."""

    def __init__(self, store: Store) -> None:
        self._facts = ClaimReader(store, ClaimKind.FAIL, NodeFailure)
        self._summaries = ClaimReader(store, ClaimKind.SUM, NodeFailure)

    def read(self, round_index: int, claims: Claims) -> dict[str, NodeFailure]:
        """The failures of a round by uid; one that can't be read counts too."""
        summed_up = self._summaries.read(round_index, claims)
        found = {**self._facts.read(round_index, claims, without=summed_up), **summed_up}
        uids = {*claims.get(ClaimKind.SUM.value, ()), *claims.get(ClaimKind.FAIL.value, ())}
        return {uid: found.get(uid) or _unreadable(uid) for uid in sorted(uids)}


def _unreadable(uid: str) -> NodeFailure:
    return NodeFailure(node=node_of(uid), fingerprint="", failure_class="root", retryable=True, message="(unreadable)")


def read_claim(cls: type[C], raw: str | None) -> C | None:
    """A claim's content, or None where there is none that makes sense."""
    try:
        return None if raw is None else codec.loads(cls, raw)
    except codec.UnreadableRecordError:
        return None


def round_to_join(record: RoundRecord | None, uid: str) -> int | None:
    """In which round a node that wants to be in claims a place now.

    Args:
        record: The newest; None where this node has seen none: then it is the first round, and where it turns out to be
            another one, the claim is nobody's concern.
    """
    if record is None:
        return 0
    if record.status is Status.JOINABLE:
        return record.round
    if record.status is Status.CLOSED or record.member(uid) is not None:
        return None
    return record.round + 1
