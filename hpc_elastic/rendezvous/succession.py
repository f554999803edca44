"""Succession: which participant takes the place of a coordinator that is gone, and who finishes a closed attempt.

One key says who finishes it. The supervisor writes its name there once Slurm has confirmed that this node still belongs
to the job: Slurm would not take a requeue from a node that it has given up. Where the supervisor does not claim the end
in time, the agents try it one after the other, each in a process that asks Slurm first (`launch.batch`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable
from typing import Protocol

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.rendezvous.claims import BYE, goodbye_key, read_claims
from hpc_elastic.rendezvous.failure_detector import FailureDetector, StoreId
from hpc_elastic.rendezvous.membership import NodeInfo, Peers, RoundLog, notifier_of
from hpc_elastic.rendezvous.proposals import propose_close
from hpc_elastic.rendezvous.schedule import LOOK_AT_ONCE, PollIntervals
from hpc_elastic.rendezvous.state import (
    OBSERVER_PLACE,
    RoundEvent,
    RoundRecord,
    Status,
    newest_by_node,
    node_of,
    supersedes,
)
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
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


END_PATIENCE = 5.0
"""Seconds in which the supervisor has to claim the end."""
END_TURN = 2.0
"""Seconds that each further agent waits longer than the one before, to step in."""
END_ASKED = 12.0
"""The same for a supervisor that lives, and has not had Slurm's answer yet: without a controller it takes 9 s."""
END_UNCONFIRMED = 30.0
"""Seconds after which the end is claimed without Slurm's confirmation: no process of the run may be able to ask it."""
_BY = "end/by"
_ASKED = "end/asked"


class EndClaimed(RunEvent, frozen=True, kw_only=True):
    """The process that finishes the attempt is known. For this process, as the two below: no log has them."""

    by: str


class EndUnclaimed(RunEvent, frozen=True, kw_only=True):
    """It is this agent's turn to finish the attempt."""


class AgentsDeparted(RunEvent, frozen=True, kw_only=True):
    nodes: tuple[int, ...]


class Listener(Protocol):
    """A participant calls it from within `step`: with records, of which some may be skipped, and its decisions."""

    def on_record(self, record: RoundRecord) -> None: ...

    def on_event(self, event: RunEvent) -> None: ...


def newest_agents(uids: Iterable[str], *, without: Collection[int] = ()) -> dict[int, str]:
    """Node index → the uid of its newest agent, but for the nodes `without`; observers have no node."""
    left_out = {OBSERVER_PLACE, -1, *without}
    return {node: uid for node, uid in newest_by_node(uids).items() if node not in left_out}


def claim_end(store: Store, uid: str) -> bool:
    return store.put_if_absent(_BY, uid) or store.get(_BY) == uid


class Ending:
    """One participant's part in it. Each method is for a step of its machine, while the run is closed."""

    def __init__(self, store: Store, uid: str, listener: Listener, clock: Clock) -> None:
        self._store = store
        self._uid = uid
        self._listener = listener
        self._clock = clock
        self._announces = self._may_claim = False
        self._in_charge: bool | None = None
        self._all_departed = False
        self._gone: set[int] = set()
        self._turn: int | None = None
        self._closed_since: float | None = None
        self._patience = END_PATIENCE

    def look_interval(self, intervals: PollIntervals, *, observes: bool) -> float | None:
        """Seconds between two looks at the log while the run is closed; None: nothing is waited for in it."""
        if observes:
            return intervals.stride if self._all_departed else 0.1 * intervals.ending
        return None if self._turn is None else 0.05 * intervals.ending

    def begin(self, turn: int, *, confirmed: bool) -> None:
        """Have an agent find out, in the steps to come, who finishes the attempt. `turn`: its place in the order. Not
        `confirmed`: Slurm would not be asked first, and this last resort waits longer."""
        self._turn = turn
        self._patience = END_PATIENCE if confirmed else END_UNCONFIRMED
        self._see_closed()

    def _see_closed(self) -> float:
        """The supervisor's time begins with the close: Slurm's KillWait may run while workers still end."""
        if self._closed_since is None:
            self._closed_since = self._clock.monotonic()
        return self._closed_since

    def announce_claim(self) -> None:
        """Have the next step let the agents know that the supervisor lives, and is about to claim the end."""
        self._announces = True

    def may_claim(self) -> None:
        self._may_claim = True

    def give_up_node(self, node: int) -> None:
        """Supervisor: Slurm has given the node up, so no goodbye of its agent is waited for."""
        self._gone.add(node)

    def step_of_agent(self) -> None:
        since = self._see_closed()
        if self._turn is None:
            return
        by = self._store.get(_BY)
        if by is not None:
            self._turn = None
            self._listener.on_event(EndClaimed(by=by))
        elif self._clock.monotonic() - since >= self._patience + END_TURN * self._turn:
            if self._patience == END_PATIENCE and self._store.get(_ASKED) is not None:
                self._patience = END_ASKED
                return
            self._turn = None
            self._listener.on_event(EndUnclaimed())

    def step_of_supervisor(self, record: RoundRecord, peers: Peers, detector: FailureDetector) -> None:
        """A node that crashes at the end says no goodbye, and Slurm may miss it: its heartbeat stops."""
        if self._announces:
            self._store.put_if_absent(_ASKED, self._uid)
            self._announces = False
        if self._in_charge is None:
            if self._may_claim:
                self._in_charge = claim_end(self._store, self._uid)
            elif self._store.get(_BY) is not None:
                self._in_charge = False
            if self._in_charge:
                self._listener.on_event(EndClaimed(by=self._uid))
            elif self._in_charge is False:
                from hpc_elastic.run.control_events import EndTakenOver  # the supervisor's alone

                self._listener.on_event(EndTakenOver(by=self._store.get(_BY) or ""))
        if self._all_departed:
            return
        newest = newest_agents(peers.all_uids(), without={*record.lost, *self._gone})
        left = set(newest.values()).difference(self._store.list(BYE))
        if left <= detector.overdue(left):
            self._all_departed = True
            self._listener.on_event(AgentsDeparted(nodes=tuple(sorted(newest))))


def close_run(store: Store, run_id: str, outcome: Outcome, reason: str) -> None:
    """Append the closing record, also where nothing was there yet. The first one to close wins. OSError: repeat it."""
    log = RoundLog(store, run_id)
    while True:
        record = log.latest()
        if record is None:
            epoch = StoreId(store, run_id, patience=0).open()
            closed = RoundRecord(
                number=1, epoch=epoch, term=1, leader="", round=0, status=Status.CLOSED, outcome=outcome, reason=reason
            )
        elif record.status is Status.CLOSED:
            return
        else:
            closed = propose_close(record, outcome, reason).record
        if log.append(closed):
            return


def close_if_last(store: Store, run_id: str) -> None:
    """Each node says its own goodbye before it looks, so at least the last one sees all."""
    record = RoundLog(store, run_id).latest()
    if record is None or record.status is Status.CLOSED:
        return
    here, following = read_claims(store, record.round), read_claims(store, record.round + 1)
    everyone = {m.uid for m in record.members} | {*here.get("join", ()), *following.get("join", ())}
    if not everyone <= set(store.list(BYE)):
        return
    done = record.status is Status.FINAL and {m.uid for m in record.members} <= set(here.get("done", ()))
    end = (Outcome.SUCCEEDED, "all workers ended with 0") if done else (Outcome.FAILED, "all nodes left")
    close_run(store, run_id, *end)
