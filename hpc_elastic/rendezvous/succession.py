"""Succession of the coordinator: when a participant takes its place, and how it finds out which other nodes live."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection

from msgspec import Struct

from hpc_elastic.options.rendezvous_settings import RendezvousSettings
from hpc_elastic.rendezvous.claims import goodbye_key
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.peers import NodeInfo, notifier_of
from hpc_elastic.rendezvous.schedule import LOOK_AT_ONCE, PollIntervals
from hpc_elastic.rendezvous.state import RoundEvent, RoundRecord, Status, node_of, supersedes
from hpc_elastic.run.events import RunEvent
from hpc_elastic.store.file_store import Store

logger = logging.getLogger(__name__)

STANDBYS = 16
"""Members, from the first slot on, that watch the coordinator's heartbeat; the others only look at it now and then."""
_RARELY = 8
HEAD_START = 1.5
"""Seconds that the node which asked has to take over before all others: it alone has seen all cells before the
question, and so knows which other nodes did not answer; any other node has to ask them again."""


CUT_OFF_SECONDS = 5.0
"""Seconds between two reports of a link that stays lost."""


class NodesCutOff(RunEvent, frozen=True, kw_only=True):
    """Nodes live, and their packets do not come through: Slurm may have given them up. No log has it."""

    nodes: tuple[int, ...]


class Move(Struct, frozen=True, kw_only=True):
    event: RoundEvent
    """TAKE_OVER, or ASK: name it in the log, so that the silent coordinator can answer."""
    why: str
    certain: bool = False
    """It depends on no absence: what caches may hide need not be looked for first."""


class Succession:
    def __init__(
        self,
        store: Store,
        info: NodeInfo,
        settings: RendezvousSettings,
        intervals: PollIntervals,
        detector: FailureDetector,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._info = info
        self._settings = settings
        self._intervals = intervals
        self._detector = detector
        self._patience = rng.uniform(0.0, 0.1)
        self._looks = rng.randrange(_RARELY)
        self._own_look = self._cut_off_due = 0.0
        self._asked_about = ""
        """Coordinator about which this node has asked, or was about to when another did."""
        self._left: tuple[str, float] = ("", 0.0)
        """Coordinator that is known to have said goodbye, and the time since."""
        self.next_look = float("inf")
        """Time when this node, as a standby, looks at the coordinator's heartbeat next."""
        self.turn_due = float("inf")
        """Time when this node's turn comes to take over from a coordinator that has said goodbye."""

    def move(self, record: RoundRecord, now: float, *, looked: bool, notified_of: Collection[str]) -> Move | None:
        """Decide this node's step about the coordinator, if any.

        Silence alone means no more than that no packet comes through from there to here: a node that took over for that
        would take a healthy run's beats away. So the coordinator is asked like all others.
        """
        leader = record.leader
        if supersedes(self._info.uid, leader):
            return Move(event=RoundEvent.TAKE_OVER, why="the coordinator's node has a new agent", certain=True)
        self._watch(record, now, looked=looked)
        turn = self._turn(record) * 0.2 + self._patience
        unchanged = self._detector.unchanged(leader)
        silent = self._detector.silence(leader)
        if self._has_left(leader, now, turn, looked=looked, announced=goodbye_key(leader) in notified_of):
            return Move(event=RoundEvent.TAKE_OVER, why=f"the coordinator {leader} has left")
        if unchanged > self._settings.heartbeat_ttl + turn:
            why = f"the coordinator {leader} has not changed its heartbeat for {unchanged:.1f} s"
            return Move(event=RoundEvent.TAKE_OVER, why=why)
        if leader in record.suspects:
            patience = turn if self._asked_about == leader else turn + HEAD_START
            if not self._detector.is_dead(leader, patience=patience):
                return None
            return Move(event=RoundEvent.TAKE_OVER, why=f"the coordinator {leader} did not answer")
        if silent is not None and silent > self._intervals.silence + turn:
            why = f"no packets from the coordinator {leader} for {silent:.1f} s: checking whether it is alive"
            return Move(event=RoundEvent.ASK, why=why)
        return None

    def _has_left(self, leader: str, now: float, turn: float, *, looked: bool, announced: bool) -> bool:
        late = self._detector.unchanged(leader) > 1.5 * self._settings.heartbeat_interval
        suspicious = self._detector.is_silent(leader) or (late and not self._detector.hears(leader))
        worth_a_look = self._left[0] != leader and (announced or (looked and suspicious))
        if worth_a_look and self._store.get(goodbye_key(leader)) is not None:
            self._left = (leader, now)
        self.turn_due = self._left[1] + turn if self._left[0] == leader else float("inf")
        return now >= self.turn_due

    def cut_off(self, record: RoundRecord | None, now: float) -> tuple[int, ...]:
        """Nodes whose link is lost, where this node reports them: as coordinator, or as the first member that lives of
        all that do not hear it. So Slurm is asked once."""
        if record is None or record.status is Status.CLOSED or now < self._cut_off_due:
            return ()
        self._cut_off_due = now + CUT_OFF_SECONDS
        if (found := self._detector.cut_off()) and record.leader != self._info.uid:
            others = [m.uid for m in record.members[: record.rank(self._info.uid)] if m.uid not in found]
            if not all(self._detector.overdue([uid], closely=True) for uid in others):
                return ()
        return tuple(sorted(map(node_of, found)))

    def new_record(self, before: RoundRecord, record: RoundRecord) -> None:
        leader = record.leader
        if before.leader != leader:
            self.turn_due = float("inf")
            self._detector.forget(leader)  # what it said before it was coordinator was not meant for all
        elif leader in before.suspects and leader not in record.suspects and not self._detector.hears(leader):
            self._detector.has_cut_off(leader)

    def _watch(self, record: RoundRecord, now: float, *, looked: bool) -> None:
        """Beats come from a thread that no hung filesystem stops: the coordinator's heartbeat has to move as well."""
        stands_by = self._turn(record) < STANDBYS
        if self._detector.hears(record.leader):
            due = now >= self._own_look and stands_by
            if looked and not due:
                self._looks += 1
                due = self._looks % _RARELY == 0
        else:
            due = looked
        if due:
            self._detector.look_at([record.leader], closely=True)
            self._own_look = now + self._settings.heartbeat_ttl / 4
        self.next_look = self._own_look if stands_by else float("inf")

    def _turn(self, record: RoundRecord) -> int:
        rank = record.rank(self._info.uid)
        return min(rank, 20) if rank is not None else 20 + min(self._info.node, 20)

    def successor(self, record: RoundRecord, move: Move, *, asks: bool) -> RoundRecord:
        """The record that carries `move` out; `asks`: there are packets, and so suspects."""
        suspects = self._whom_to_ask(record, move) if asks and not move.certain else record.suspects
        if move.event is RoundEvent.ASK:
            self._asked_about = record.leader
            return record.successor(suspects=suspects)
        logger.info("taking over as coordinator: %s", move.why)
        me = self._info
        return record.successor(term=record.term + 1, leader=me.uid, notifier=notifier_of(me), suspects=suspects)

    def _whom_to_ask(self, record: RoundRecord, move: Move) -> tuple[str, ...]:
        """Suspects beside the coordinator, of which this node hears none; of many nodes it alone is asked."""
        if move.event is RoundEvent.TAKE_OVER and record.leader in record.suspects:
            self._detector.look_at(record.suspects, closely=True)
            asked = set(record.suspects) - self._detector.answered(record.suspects)
            return tuple(sorted(asked - {self._info.uid}))
        others = {m.uid for m in record.members} | {record.leader}
        asked = {uid for uid in others if len(others) <= LOOK_AT_ONCE or uid == record.leader} - {self._info.uid}
        self._detector.look_at(sorted(asked), closely=True)  # what their cells say before they are asked
        return tuple(sorted(asked | set(record.suspects) - {self._info.uid}))

    def took_over(self, record: RoundRecord) -> None:
        if record.notifier:
            self._detector.expect(m.uid for m in record.members if m.uid not in (*record.suspects, self._info.uid))
