"""Removal of old files in the store of a long run: their number does not grow with rounds.

Each node removes its own claims on rounds that nobody reads any more; the coordinator removes the rest, while a round
is final, a few files at a step, and never anything of the newest rounds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from hpc_elastic.base.clock import Staleness
from hpc_elastic.rendezvous.claims import claim_folder
from hpc_elastic.rendezvous.failure_detector import HEARTBEATS
from hpc_elastic.rendezvous.peers import Peers
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.store.file_store import Store, StoreError

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
