"""What members say about checkpoints while nodes wait, as the coordinator reads it."""

from __future__ import annotations

from hpc_elastic.rendezvous.claims import ClaimKind, Claims, claim_key, decode_object
from hpc_elastic.store.base import Store, get_many


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
        """Take in what the listing of a final round's folder gave.

        Args:
            round_index: The round.
            claims: Kind → uids.
            waiting: Whether a node waits that lives.
            now: The moment that the decision is about.
        """
        if round_index != self._round:
            self._round, self._waiting_since = round_index, None
            self._saved_at, self._saving = {}, set()
        self._now = now
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self._saving = {(uid, serial) for uid, serial, _ in _words(claims, ClaimKind.SAVING)}
        unread = [word for word in _words(claims, ClaimKind.SAVED) if word[:2] not in self._saved_at]
        keys = [claim_key(round_index, ClaimKind.SAVED, uid, serial=serial) for uid, serial, _ in unread]
        for (uid, serial, _), raw in zip(unread, get_many(self._store, keys), strict=True):
            self._saved_at[uid, serial] = now - _age(decode_object(raw))

    def paused_for(self, seconds: float) -> None:
        """This process was, for so long: that is nobody's time."""
        self._now += seconds
        if self._waiting_since is not None:
            self._waiting_since += seconds
        self._saved_at = {key: at + seconds for key, at in self._saved_at.items()}

    @property
    def since_waiting(self) -> float:
        return 0.0 if self._waiting_since is None else self._now - self._waiting_since

    @property
    def since_saved(self) -> float:
        """Since a checkpoint was complete; infinite where nobody has told of one."""
        return min((self._now - at for at in self._saved_at.values()), default=float("inf"))

    @property
    def is_saving(self) -> bool:
        """Whether a node has begun one, and not said that it is complete."""
        return bool(self._saving - self._saved_at.keys())


def _words(claims: Claims, kind: ClaimKind) -> list[tuple[str, str, str]]:
    """(uid, serial, kind as listed) of every claim of this kind."""
    found = []
    for name, uids in claims.items():
        word, dot, serial = name.partition(".")
        if dot and word == kind.value:
            found += [(uid, serial, name) for uid in uids]
    return found


def _age(value: dict[str, object] | None) -> float:
    age = value.get("age") if value is not None else None
    return max(0.0, float(age)) if isinstance(age, (int, float)) and age < 1e9 else 0.0
