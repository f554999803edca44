"""After the run is closed: which process finishes the attempt, and whether all agents have ended.

One key says who finishes it. The supervisor writes its name there once Slurm has confirmed that this node still belongs
to the job: Slurm would not take a requeue from a node that it has given up. Where the supervisor does not claim the end
in time, the agents try it one after the other, each in a process that asks Slurm first (`launch.batch`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from hpc_elastic.base.clock import Clock
from hpc_elastic.rendezvous.claims import BYE, read_claims
from hpc_elastic.rendezvous.failure_detector import FailureDetector
from hpc_elastic.rendezvous.heartbeat_sender import StoreId
from hpc_elastic.rendezvous.peers import Peers
from hpc_elastic.rendezvous.proposals import propose_close
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.schedule import PollIntervals
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, RoundRecord, Status, newest_by_node
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import Store

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
                from hpc_elastic.run.supervisor_events import EndTakenOver  # the supervisor's alone

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
