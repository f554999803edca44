"""Ends earlier attempts of a run that may still be running, before the next one starts a worker: one run, one owner.

Slurm gives up a node that it can't reach, though the node may live, and starts the job again elsewhere. So the
supervisor that has claimed attempt N+1 first closes the log of attempt N, as superseded: the log's compare-and-set is
the fence. Attempt N's agents read that, answer it by a heartbeat, end their workers, and deregister.

One closed attempt, one finisher: before the supervisor writes the verdict, `EndClaim` claims the right to do so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from msgspec import UNSET, Struct, field

from hpc_elastic.agent.identity import open_session_notifier, rendezvous_settings, session_addresses
from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.base.loop import start_thread
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launch.requeue import RequeueAction
from hpc_elastic.launch.run_directory import read_attempt
from hpc_elastic.launch.site import Allocation, AttemptContext, SlurmQuestion, Start, supervisor_events
from hpc_elastic.rendezvous.claims import BYE
from hpc_elastic.rendezvous.failure_detector import HeartbeatAges
from hpc_elastic.rendezvous.membership import NodeInfo, Peers, RoundLog, record_name
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.schedule import PollIntervals, poll_intervals
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, RendezvousStateError, RoundRecord, host_of, node_of
from hpc_elastic.rendezvous.succession import END_UNCONFIRMED, claim_end, close_run, newest_agents
from hpc_elastic.run.control_events import AttemptEnded, RequeueDecided
from hpc_elastic.run.events import Note
from hpc_elastic.run.paths import AttemptPaths, ExitCode, Outcome, StoredResult
from hpc_elastic.slurm.job_environment import compress
from hpc_elastic.store.file_store import FileStore, Store
from hpc_elastic.store.notifier import Notifier, read_secret

logger = logging.getLogger(__name__)

END_SECONDS = 60.0
LOOK_SECONDS = 0.25
HELD_UP_SECONDS = 5.0
"""Looks this much further apart than planned show that this process was held up, and no agent was silent."""


class AgentState(Enum):
    ENDED = "ended"
    """It has deregistered: nothing of it runs."""
    ALIVE = "alive"
    """It has answered, and ends its workers."""
    AWAITED = "awaited"
    """It has not answered yet, and may."""
    SILENT = "silent"
    """It gave no answer, or stopped answering, for as long as a living agent that can read files needs."""


def agent_state(
    *, has_ended: bool, has_answered: bool, silent_for: float, is_node_up: bool, answer: float, lease: float
) -> AgentState:
    """`answer` and `lease` are the seconds of silence that show an end; the former only where Slurm reaches the node.

    The longer `lease` is for an agent that lived after its attempt was closed, or whose node Slurm does not reach.
    """
    if has_ended:
        return AgentState.ENDED
    if silent_for >= (answer if is_node_up and not has_answered else lease):
        return AgentState.SILENT
    return AgentState.ALIVE if has_answered else AgentState.AWAITED


class EarlierAttempt(Struct, eq=False, kw_only=True):
    store: Store
    run_id: str
    intervals: PollIntervals
    clock: Clock
    number: int = 0
    names: Sequence[str] = ()
    record: RoundRecord | None = None
    had_begun: bool = False
    _heartbeats: HeartbeatAges = UNSET  # type: ignore[assignment]
    _answered: set[str] = field(default_factory=set)
    _closed_at: float = 0.0
    _states: dict[str, AgentState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._heartbeats = HeartbeatAges(self.store)

    def supersede(self, uid: str, reason: str) -> bool:
        """Returns whether the attempt was still open, and no other process is going to finish it."""
        self.record = RoundLog(self.store, self.run_id).latest()
        self.had_begun = self.record is not None
        self._closed_at = self.clock.monotonic()
        for agent in self.agents():
            self._heartbeats.look(agent, self._closed_at)
        close_run(self.store, self.run_id, Outcome.SUPERSEDED, reason)
        self.record = RoundLog(self.store, self.run_id).latest()
        was_open = self.record is not None and self.record.outcome is Outcome.SUPERSEDED
        return claim_end(self.store, uid) and was_open

    def notify(self, notifier: Notifier, uid: str) -> None:
        observer = NodeInfo(uid=uid, node=OBSERVER_PLACE, host="", local_world_size=0, addresses=(), port=0)
        peers = Peers(self.store, observer, notifier)
        peers.learn(())
        if self.record is not None:
            peers.notify_all(record_name(self.record.number))

    def agents(self) -> list[str]:
        lost = self.record.lost if self.record is not None else ()
        announced = (name.partition("+")[0] for name in self.store.list("node"))
        return list(newest_agents(announced, without=lost).values())

    def paused_for(self, seconds: float) -> None:
        self._heartbeats.paused_for(seconds, now=self.clock.monotonic())
        self._closed_at += seconds

    def look(self, up: Collection[str] = ()) -> dict[str, AgentState]:
        ended = self.store.list(BYE)
        found = {}
        for uid in self.agents():
            if uid not in ended:
                self._heartbeats.look(uid, self.clock.monotonic())
            if self._heartbeats.changed_since(uid, self._closed_at):
                self._answered.add(uid)
            found[uid] = agent_state(
                has_ended=uid in ended,
                has_answered=uid in self._answered,
                silent_for=self._heartbeats.age(uid),
                is_node_up=self._name(uid) in up,
                answer=self.intervals.answer_unheard,
                lease=self.intervals.lease,
            )
        self._states = found
        return found

    def nodes(self, *states: AgentState) -> list[str]:
        return [self._name(uid) for uid, state in sorted(self._states.items()) if state in states]

    def _name(self, uid: str) -> str:
        node = node_of(uid)
        return self.names[node] if 0 <= node < len(self.names) else host_of(uid)


class EarlierAttemptRunsError(HpcElasticError):
    template = (
        "attempt {attempt} of this run still runs on {nodes} {seconds:.0f} s after it was superseded, and two must not "
        "train at once: end its processes there (pkill -u $USER -f hpc_elastic), then requeue the job"
    )


class StartInterruptedError(HpcElasticError):
    template = "interrupted while an earlier attempt was ending on {nodes}: nothing was started"


class EarlierAttempts:
    """`supersede` and `look` touch files: may block."""

    def __init__(self, context: AttemptContext, uid: str) -> None:
        self._context = context
        self._uid = uid
        self._began_at = self._looked_at = context.clock.monotonic()
        self._open: list[EarlierAttempt] = []
        self._up: frozenset[str] = frozenset()

    @property
    def look_seconds(self) -> float:
        return LOOK_SECONDS * max(1.0, len(self._context.attempt.nodes) / 256)

    @property
    def awaited_nodes(self) -> list[str]:
        return [name for earlier in self._open for name in earlier.nodes(*_AWAITED)]

    def end(self, on_disk: Callable[[Callable[[], bool]], bool], *, is_interrupted: Callable[[], bool]) -> None:
        """Wait until no worker of an earlier attempt runs. `on_disk` repeats what a filesystem refuses."""
        is_over = on_disk(self.supersede)
        while not is_over:
            if is_interrupted():
                raise StartInterruptedError(nodes=", ".join(self.awaited_nodes))
            pause(self._context.clock, self.look_seconds)
            is_over = on_disk(self.look)

    def supersede(self) -> bool:
        """Returns whether no earlier attempt is waited for. May be repeated after an OSError."""
        self._open.clear()
        for number in range(self._context.attempt.number - 1, -1, -1):
            folder = self._context.paths.attempt(number)
            if not folder.root.is_dir():
                continue  # one that gave way
            if folder.records.exists():
                break  # the run was over, with all attempts before
            info = read_attempt(folder)
            intervals = poll_intervals(rendezvous_settings(self._context.spec, info or self._context.attempt))
            earlier = EarlierAttempt(
                store=FileStore(folder.store, clock=self._context.clock),
                run_id=self._context.spec.run_id,
                intervals=intervals,
                clock=self._context.clock,
                number=number,
                names=info.nodes if info else (),
            )
            reason = f"superseded by attempt {self._context.attempt.number} on {self._context.attempt.batch_host}"
            try:
                was_open = earlier.supersede(self._uid, reason)
            except RendezvousStateError as error:
                # Its agents can't read their log either, and end their workers for that.
                logger.warning("attempt %d can't be closed: %s; going on", number, error)
                break
            if was_open and not folder.result_json.exists():
                self._record_end(folder, reason, step=earlier.record.memory.step if earlier.record else -1)
            self._open.append(earlier)
            if earlier.had_begun:
                break  # its own supervisor has ended those before it
        if not self._look():
            self._up = self._context.site.nodes_up()
            self._notify()
            for earlier in self._open:
                if awaited := earlier.nodes(*_AWAITED):
                    logger.warning(
                        "attempt %d may still run on %s: it was superseded, and this attempt waits until it has ended",
                        earlier.number,
                        compress(awaited),
                    )
        return self._is_over()

    def look(self) -> bool:
        self._look()
        return self._is_over()

    def _look(self) -> bool:
        now = self._context.clock.monotonic()
        apart = now - self._looked_at
        paused = apart if apart > self.look_seconds + HELD_UP_SECONDS else 0.0
        self._looked_at = now
        self._began_at += paused
        for earlier in self._open:
            if paused:  # by a filesystem that hung for the agents too, say
                earlier.paused_for(paused)
            earlier.look(self._up)
        return not self.awaited_nodes

    def _is_over(self) -> bool:
        seconds = self._context.clock.monotonic() - self._began_at
        for earlier in list(self._open):
            alive = earlier.nodes(AgentState.ALIVE)
            if alive and seconds > self._context.spec.shutdown_timeout + END_SECONDS:
                raise EarlierAttemptRunsError(attempt=earlier.number, nodes=compress(alive), seconds=seconds)
            if not earlier.nodes(*_AWAITED):
                self._open.remove(earlier)
                self._report(earlier, seconds)
        return not self._open

    def _report(self, earlier: EarlierAttempt, seconds: float) -> None:
        number, ended, silent = earlier.number, earlier.nodes(AgentState.ENDED), earlier.nodes(AgentState.SILENT)
        if not silent and seconds < LOOK_SECONDS:
            return
        rule = why_safe(silent, self._up, seconds=seconds) if silent else ""
        text = f"attempt {number} was superseded"
        if ended:
            logger.info("attempt %d has ended on %s", number, compress(ended))
            text += f"; it has ended on {', '.join(ended)}"
        if silent:
            logger.warning("attempt %d was not seen to end everywhere; this attempt starts now: %s", number, rule)
            text += f"; not heard from: {', '.join(silent)}"
        self._context.events.write(Note(subject="attempt_superseded", text=text, reason=rule))

    def _record_end(self, folder: AttemptPaths, reason: str, *, step: int) -> None:
        stored = StoredResult(
            outcome=Outcome.SUPERSEDED.value,
            reason=reason,
            exit_code=ExitCode.REQUEUED,
            action=RequeueAction.REQUEUE.value,
            decision=reason,
            step=step,
        )
        try:
            stored.save(folder.result_json)
            host, clock = self._context.attempt.batch_host, self._context.clock
            events = supervisor_events(folder, host=host, uid=self._uid, clock=clock)
            events.write(RequeueDecided(action=stored.action, reason=reason))
            events.write(AttemptEnded(outcome=stored.outcome, exit_code=stored.exit_code))
            events.close()
        except (OSError, HpcElasticError) as error:
            logger.error("the end of attempt %d could not be written: %s", folder.number, error)

    def _notify(self) -> None:
        if not rendezvous_settings(self._context.spec, self._context.attempt).doorbell:
            return
        secret = read_secret(self._context.paths.secret)
        addresses = session_addresses(self._context.attempt, self._context.attempt.batch_host)
        notifier = open_session_notifier(
            self._context.spec, self._context.attempt, secret=secret, uid=self._uid, addresses=addresses
        )
        if notifier is not None:
            for earlier in self._open:
                earlier.notify(notifier, self._uid)
            notifier.close()


_AWAITED = (AgentState.ALIVE, AgentState.AWAITED)


def why_safe(silent: Collection[str], up: Collection[str], *, seconds: float) -> str:
    """The rule by which an attempt may begin after `seconds`, though earlier agents have not deregistered."""
    known, unknown = sorted(set(silent) & set(up)), sorted(set(silent) - set(up))
    parts = []
    if known:
        parts.append(f"Slurm reaches {compress(known)}, and has ended the job's processes there before this attempt")
    if unknown:
        parts.append(
            f"{compress(unknown)} has not answered through the files for {seconds:.0f} s, so that node is off or can't "
            "use the run directory; its workers are ended as soon as it can"
        )
    return "; ".join(parts)


ASK_AGAIN_SECONDS = 3.0
_WHY = {
    Allocation.LOST: "Slurm has given this node up, or has requeued the job",
    Allocation.UNKNOWN: "Slurm can't be asked from here",
}


class EndClaim(Struct, eq=False):
    """Claims the right to finish the closed attempt: Slurm confirms it, or no other process claims it for long."""

    allocation: Callable[[], Allocation]
    ask: Callable[[Callable[[Participant], None]], None]
    clock: Clock
    start: Start = start_thread
    due: float | None = None
    """When to call `step` next, monotonic; None: not begun, or over."""
    _question: SlurmQuestion[Allocation] = UNSET  # type: ignore[assignment]
    _deadline: float = 0.0
    _ask_at: float = 0.0
    _has_warned: bool = False

    def __post_init__(self) -> None:
        self._question = SlurmQuestion(self.allocation, self.start)

    def fileno(self) -> int:
        return self._question.fileno()

    def begin(self) -> None:
        self._deadline = self.due = self.clock.monotonic() + END_UNCONFIRMED
        self.ask(lambda participant: participant.ending.announce_claim())
        self._question.ask()

    def step(self) -> None:
        now = self.clock.monotonic()
        answer = self._question.answer()
        if self.due is None:
            return
        if answer is Allocation.HELD or now >= self._deadline:
            self.claim()
            return
        if isinstance(answer, Allocation):
            if not self._has_warned:
                logger.warning(
                    "finishing the attempt is left to another node for %.0f s: %s", END_UNCONFIRMED, _WHY[answer]
                )
            self._has_warned, self._ask_at = True, now + ASK_AGAIN_SECONDS
        elif self._has_warned and now >= self._ask_at:
            self._question.ask()
        self.due = self._deadline if self._question.is_open else min(self._ask_at, self._deadline)

    def claim(self) -> None:
        """Claim without asking: Slurm's own signal has come, so Slurm reaches this node."""
        self.stop()
        self.ask(lambda participant: participant.ending.may_claim())

    def stop(self) -> None:
        self.due = None
