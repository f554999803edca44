"""Decides whether a round that goes well is ended so that nodes that wait come in.

`decide_growth` is the decision; `GrowthSigns` reads the members' reports about their checkpoints while nodes wait.
"""

from __future__ import annotations

from msgspec import Struct

from hpc_elastic.rendezvous.claims import ClaimKind, Claims, Saved, claim_key, read_claim
from hpc_elastic.run.option_values import GrowPolicy
from hpc_elastic.store.base import Store

SETTLE_SECONDS = 2.5
"""Seconds from one node's report of a complete checkpoint until the other nodes, which still write theirs, must have
reported that: an agent looks at its workers once a second."""


class GrowthFacts(Struct, frozen=True, kw_only=True):
    """Facts that the coordinator of a final round knows. Times in seconds, on its own monotonic clock."""

    newcomers: int
    """Nodes that wait, without those that were submitted as spares."""
    spares: int
    free: int
    vacant: int
    """Free places of lost members that nobody has taken."""
    since_final: float
    since_waiting: float
    since_saved: float
    """Age of the newest checkpoint of this round, on any node; infinite where none was."""
    is_saving: bool
    """A node is still writing its part of one."""


class Growth(Struct, frozen=True, kw_only=True):
    takes_in: bool
    why: str


def decide_growth(facts: GrowthFacts, policy: GrowPolicy, *, patience: float, answer: float) -> Growth:
    """Spares come in only for a lost node. CHECKPOINT waits for none any more after `patience` seconds without one;
    after `answer` seconds members have reported the checkpoints that they had completed before nodes waited."""
    several = facts.newcomers + facts.spares > 1
    waits, as_a_spare = ("wait", "wait as spares") if several else ("waits", "waits as a spare")
    if facts.newcomers + facts.spares == 0 or facts.free <= 0:
        return Growth(takes_in=False, why=as_a_spare)
    if facts.vacant > 0:
        return Growth(takes_in=True, why=f"came for {'lost nodes' if several else 'a lost node'}")
    if facts.newcomers == 0:
        return Growth(takes_in=False, why=as_a_spare)
    if policy is GrowPolicy.NOW:
        return Growth(takes_in=True, why="came")
    if policy is GrowPolicy.NEVER:
        return Growth(takes_in=False, why=f"{waits} for a new round to begin (--grow never)")
    idle = min(facts.since_saved, facts.since_final)
    if idle >= patience and facts.since_waiting >= answer:
        return Growth(takes_in=True, why=f"came, and no checkpoint was reported for {idle:.0f} s")
    is_fresh = SETTLE_SECONDS <= facts.since_saved < facts.since_waiting
    if is_fresh and not facts.is_saving:
        return Growth(takes_in=True, why="came, and a checkpoint is complete")
    return Growth(takes_in=False, why=f"{waits} for the next checkpoint (--grow checkpoint)")


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
