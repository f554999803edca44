"""One node's own claims: kept until the filesystem takes them."""

from __future__ import annotations

from collections import deque

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.rendezvous.claims import MOST_MESSAGE, ClaimKind, Departure, Ready, Saved, claim_key
from hpc_elastic.rendezvous.cluster_view import gone_key
from hpc_elastic.rendezvous.ending import goodbye_key
from hpc_elastic.rendezvous.preemption import PreemptionStatus
from hpc_elastic.rendezvous.state import NodeFailure
from hpc_elastic.store.base import Store


class OwnClaims:
    """One participant's: each is written with the next step of the rendezvous, in order, once."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._uid = uid
        self._waiting: deque[tuple[str, str]] = deque()
        self._joined_round = -1
        self._is_unannounced = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def confirm(self, round_index: int, master: str) -> None:
        """This node is ready for the frozen round; `master` is ``host:port`` from the first slot, else empty."""
        self._add(round_index, ClaimKind.ACK, Ready(master))

    def report_failure(self, round_index: int, failure: NodeFailure) -> None:
        """A worker of this node failed: the round is over for all, as soon as the coordinator reads it."""
        self._add_failure(round_index, ClaimKind.FAIL, failure)

    def sum_up_failures(self, round_index: int, failure: NodeFailure) -> None:
        """What the failures on this node were, once its workers have ended and the evidence is written.

        To be reported before `join`: the coordinator settles a round's failures when the next one is frozen.
        """
        self._add_failure(round_index, ClaimKind.SUM, failure)

    def report_done(self, round_index: int) -> None:
        """All workers of this node ended with 0."""
        self._add(round_index, ClaimKind.DONE)

    def report_saving(self, round_index: int, serial: int) -> None:
        """While nodes wait: workers of this node are writing a checkpoint."""
        self._add(round_index, ClaimKind.SAVING, serial=str(serial))

    def report_saved(self, round_index: int, serial: int, age: float) -> None:
        """While nodes wait: the last checkpoint of this node's workers has been complete for `age` seconds.

        A claim can't be taken back; each of a round has a serial of its own.
        """
        self._add(round_index, ClaimKind.SAVED, Saved(round(age, 3)), serial=str(serial))

    def give_up_node(self, node: int) -> None:
        """The launcher will bring no further agent to `node`."""
        self._write_later(gone_key(node), "gone")

    def deregister(self) -> None:
        """This node's agent ends now, and leaves nothing running."""
        self._write_later(goodbye_key(self._uid), "bye")

    def report_noted(self, round_index: int, status: PreemptionStatus) -> None:
        """There is a notice: where this node's workers stand."""
        self._add(round_index, ClaimKind.NOTED, status)

    def report_kept(self, round_index: int) -> None:
        """There is a notice: this node's workers have saved, as far as they follow it."""
        self._add(round_index, ClaimKind.KEPT)

    def leave(self, round_index: int, reason: str) -> None:
        """This node takes itself out of a round."""
        self._add(round_index, ClaimKind.LEAVE, Departure(reason[:MOST_MESSAGE]))

    def flush(self) -> list[str]:
        """Write all that waits. Returns the keys.

        Raises:
            OSError, StoreError: the rest waits for the next time.
        """
        keys = []
        while self._waiting:
            key, value = self._waiting[0]
            self._store.put_if_absent(key, value)
            self._waiting.popleft()
            keys.append(key)
        return keys

    def join(self, target: int) -> bool:
        """Claim a place in a round, once. Returns whether it was now."""
        if target <= self._joined_round:
            return False
        self._store.put_if_absent(claim_key(target, ClaimKind.JOIN, self._uid), "in")
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

    def _write_later(self, key: str, value: str) -> None:
        self._waiting.append((key, value))
