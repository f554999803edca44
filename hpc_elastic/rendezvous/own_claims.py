"""What this node has to say about rounds and has not written yet: in order, each once, though the disk refuse."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from hpc_elastic.rendezvous.claims import ClaimKind, claim_key
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.store.base import Store


class OwnClaims:
    """One participant's."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._uid = uid
        self._waiting: deque[tuple[str, str]] = deque()
        self._joined_round = -1
        self._untold = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, round_index: int, kind: ClaimKind, value: Mapping[str, Any], *, serial: str = "") -> None:
        """Say something about a round."""
        key = claim_key(round_index, kind, self._uid, serial=serial)
        self.add_key(key, json.dumps(value, separators=(",", ":")))

    def add_key(self, key: str, value: str) -> None:
        """Say something else."""
        self._waiting.append((key, value))

    def flush(self) -> str:
        """Write all that waits. Returns the last key, empty where there was nothing.

        Raises:
            OSError, StoreError: the rest waits for the next time.
        """
        key = ""
        while self._waiting:
            key, value = self._waiting[0]
            self._store.put_if_absent(key, value)
            self._waiting.popleft()
        return key

    def join(self, target: int) -> bool:
        """Claim a place in a round, once. Returns whether it was now."""
        if target <= self._joined_round:
            return False
        self._store.put_if_absent(claim_key(target, ClaimKind.JOIN, self._uid), "in")
        self._joined_round = target
        self._untold = True
        return True

    def unannounced_join(self, target: int) -> str:
        """The key of the claim on `target`, where the coordinator is still to be rung about it; once."""
        if not self._untold or target != self._joined_round:
            return ""
        self._untold = False
        return claim_key(target, ClaimKind.JOIN, self._uid)


def round_to_join(record: RoundRecord | None, uid: str) -> int | None:
    """In which round a node that wants to be in claims a place now.

    Args:
        record: The newest; None where this node has seen none: then it is the first round, and where it turns out to be
            another one, the claim is nobody's concern.
        uid: The node's.
    """
    if record is None:
        return 0
    if record.status is Status.JOINABLE:
        return record.round
    if record.status is Status.CLOSED or record.member(uid) is not None:
        return None
    return record.round + 1
