"""What nodes say about a round: one small value each, under ``round/<index>/<kind>+<uid>``, never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord, Status, decode_failure
from hpc_elastic.rendezvous.uid import node_of
from hpc_elastic.store.base import Store


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


Claims = Mapping[str, Sequence[str]]
"""Kind → uids, as one listing of a round's folder gave them."""


def claim_folder(round_index: int) -> str:
    return f"round/{round_index:06d}"


def claim_key(round_index: int, kind: ClaimKind, uid: str) -> str:
    return f"{claim_folder(round_index)}/{kind.value}+{uid}"


def read_claims(store: Store, round_index: int) -> Claims:
    """Who says what about a round: one listing."""
    found: dict[str, list[str]] = {}
    for name in sorted(store.list(claim_folder(round_index))):
        kind, _, uid = name.partition("+")
        found.setdefault(kind, []).append(uid)
    return found


def read_confirmed(store: Store, record: RoundRecord, uids: Sequence[str]) -> dict[str, str]:
    """Who has confirmed a frozen round, uid → the TCPStore's address from the first slot.

    The first slot has confirmed when its word can be read: nobody can start without.
    """
    if record.status is not Status.FROZEN:
        return {}
    first = record.members[0].uid
    confirmed = dict.fromkeys((uid for uid in uids if uid != first), "")
    if first in uids:
        value = decode_object(store.get(claim_key(record.round, ClaimKind.ACK, first)))
        if value is not None:
            confirmed[first] = str(value.get("master", ""))
    return confirmed


def read_failures(store: Store, round_index: int, claims: Claims) -> dict[str, NodeFailure]:
    """The failures that nodes told of, by uid; what a node summed up replaces its first word."""
    found: dict[str, NodeFailure] = {}
    tellers = {*claims.get("sum", ()), *claims.get("fail", ())}
    for kind in (ClaimKind.SUM, ClaimKind.FAIL):
        for uid in claims.get(kind.value, ()):
            value = None if uid in found else decode_object(store.get(claim_key(round_index, kind, uid)))
            failure = decode_failure(value) if value is not None else None
            if failure is not None:
                found[uid] = failure
    for uid in tellers - set(found):
        found[uid] = NodeFailure(
            node=node_of(uid), fingerprint="", failure_class="root", retryable=True, message="(unreadable)"
        )
    return dict(sorted(found.items()))


def decode_object(raw: str | None) -> dict[str, Any] | None:
    """A JSON object, or None where there is none that makes sense."""
    if raw is None:
        return None
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
