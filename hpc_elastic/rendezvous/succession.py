"""When a participant takes the coordinator's place, and how it finds out then who else lives."""

from __future__ import annotations

import random

from hpc_elastic.rendezvous.life_signs import LifeSigns
from hpc_elastic.rendezvous.pace import LOOK_AT_ONCE, Pace
from hpc_elastic.rendezvous.settings import RendezvousSettings
from hpc_elastic.rendezvous.state import NodeInfo, RoundRecord

STANDBYS = 16
"""Members, from the first slot on, that watch the coordinator's heartbeat; the others only see to it now and then."""
_RARELY = 8


class Succession:
    """One participant's view of the coordinator's office."""

    def __init__(
        self, info: NodeInfo, settings: RendezvousSettings, pace: Pace, life: LifeSigns, rng: random.Random
    ) -> None:
        self._info = info
        self._settings = settings
        self._pace = pace
        self._life = life
        self._patience = rng.uniform(0.0, 0.1)
        self._looks = rng.randrange(_RARELY)
        self._own_look = 0.0
        self.next_look = float("inf")
        """When this node, as a standby, is to see to the coordinator's heartbeat next."""

    def why(self, record: RoundRecord, now: float, *, looked: bool) -> str:
        """Why this node should take over, or nothing.

        Args:
            record: The newest.
            now: Seconds, monotonic.
            looked: Whether this step has looked at the log.
        """
        leader = record.leader
        self._watch(record, now, looked=looked)
        turn = self._turn(record) * 0.2 + self._patience
        unchanged = self._life.unchanged(leader)
        silent = self._life.silence(leader)
        if unchanged > self._settings.heartbeat_ttl + turn:
            return f"the coordinator {leader} has not changed its heartbeat for {unchanged:.1f} s"
        if silent is not None and silent > self._pace.silence + turn:
            return f"no word from the coordinator {leader} for {silent:.1f} s"
        return ""

    def _watch(self, record: RoundRecord, now: float, *, looked: bool) -> None:
        """Its beats come from a thread that no hung filesystem stops: its heartbeat has to move as well."""
        stands_by = self._turn(record) < STANDBYS
        if self._life.hears(record.leader):
            due = now >= self._own_look and stands_by
            if looked and not due:
                self._looks += 1
                due = self._looks % _RARELY == 0
        else:
            due = looked
        if due:
            self._life.look_at([record.leader], closely=True)
            self._own_look = now + self._settings.heartbeat_ttl / 4
        self.next_look = self._own_look if stands_by else float("inf")

    def _turn(self, record: RoundRecord) -> int:
        rank = record.rank(self._info.uid)
        return min(rank, 20) if rank is not None else 20 + min(self._info.node, 20)

    def whom_to_ask(self, record: RoundRecord) -> tuple[str, ...]:
        """Suspects for a new coordinator that has heard none of the others: who died with the old one is to be missed.

        The old one may live, cut off from here alone: it stays in if it answers. Where there are many nodes only the
        old one is asked: the others have to send their beats here from now on, or are asked for that.
        """
        others = sorted({m.uid for m in record.members} - {self._info.uid})
        asked = [uid for uid in others if len(others) <= LOOK_AT_ONCE or uid == record.leader]
        self._life.look_at(asked, closely=True)  # what their cells say before they are asked
        return tuple(asked)

    def took_over(self, record: RoundRecord) -> None:
        """This node is the coordinator now."""
        if record.bell:
            self._life.expect(m.uid for m in record.members if m.uid not in (*record.suspects, self._info.uid))
