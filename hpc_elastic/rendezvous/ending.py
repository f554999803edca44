"""After the run is closed: who sees to the rest, and whether all agents have gone.

One key says who sees to the rest (verdict, report, requeue, the allocation): the supervisor writes its name there as
soon as it reads that the run is closed. Where it does not, its host is dead or cut off, and the first agent whose turn
has come writes its own. Exactly one can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hpc_elastic.clock import Clock
from hpc_elastic.rendezvous.peers import Peers
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.rendezvous.uid import node_of, supersedes
from hpc_elastic.store.base import Store

END_PATIENCE = 5.0
"""Seconds in which the supervisor has to say that it sees to the rest."""
END_TURN = 2.0
"""Seconds that each further agent waits longer than the one before, to step in."""
_BY = "end/by"
_BYE = "bye"


class EventListener(Protocol):
    """Whom to tell."""

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None: ...


def goodbye_key(uid: str) -> str:
    """Where an agent says that it ends and leaves nothing running."""
    return f"{_BYE}/{uid}"


class Ending:
    """One participant's part in it. Each method is for a step of its machine, while the run is closed."""

    def __init__(self, store: Store, uid: str, listener: EventListener, clock: Clock) -> None:
        self._store = store
        self._uid = uid
        self._listener = listener
        self._clock = clock
        self._in_charge: bool | None = None
        self._all_departed = False
        self._turn: int | None = None
        self._closed_since: float | None = None

    @property
    def all_departed(self) -> bool:
        """Whether the supervisor has been told that no agent is left."""
        return self._all_departed

    @property
    def awaits(self) -> bool:
        """Whether this agent waits to hear who sees to the rest."""
        return self._turn is not None

    def begin(self, turn: int) -> None:
        """Find out, in the steps to come, who sees to the rest; the agent whose turn has come does."""
        self._turn = turn
        self._see_closed()

    def _see_closed(self) -> float:
        """When the supervisor's time began: with the close, since Slurm's KillWait may run while workers still end."""
        if self._closed_since is None:
            self._closed_since = self._clock.monotonic()
        return self._closed_since

    def step_of_agent(self) -> None:
        """Tell ``end_seen_to``, or ``end_is_ours`` where nobody took it up in time."""
        since = self._see_closed()
        if self._turn is None:
            return
        by = self._store.get(_BY)
        if by is None and self._clock.monotonic() - since >= END_PATIENCE + END_TURN * self._turn:
            by = self._uid if self._store.put_if_absent(_BY, self._uid) else self._store.get(_BY)
        if by is not None:
            self._turn = None
            self._listener.on_event("end_is_ours" if by == self._uid else "end_seen_to", {"by": by})

    def step_of_supervisor(self, record: RoundRecord, peers: Peers) -> None:
        """Take charge, or tell ``end_taken_over``; and ``agents_departed`` when no agent that lives is left."""
        if self._in_charge is None:
            self._in_charge = self._store.put_if_absent(_BY, self._uid)
            if not self._in_charge:
                self._listener.on_event("end_taken_over", {"by": self._store.get(_BY) or ""})
        if self._all_departed:
            return
        newest: dict[int, str] = {}
        for uid in peers.all_uids():
            node = node_of(uid)
            if node in record.lost or uid == self._uid:
                continue
            if node not in newest or supersedes(uid, newest[node]):
                newest[node] = uid
        if set(newest.values()) <= set(self._store.list(_BYE)):
            self._all_departed = True
            self._listener.on_event("agents_departed", {"nodes": sorted(newest)})
