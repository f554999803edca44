"""The agent of one node: one loop over events, one phase at a time; whatever may be slow happens elsewhere.

`run` waits for what comes first: the end of a worker (its pidfd), a newer record of the rendezvous (from the
coordination thread), a signal, an answer of the health checks, the TCPStore's process, or a time that is due. `step`
takes in all that has come: what was observed becomes an `Event`, `supervision.TRANSITIONS` holds which phase follows,
and `_happens` does what belongs to it. The way of a worker that is killed:

- `_handle_workers` sees its end, and `FailureReports` the bare fact, so that all nodes stop;
- `_stop_workers` begins to end the others, and `_handle_stop` goes on with that until nothing is left;
- `_workers_ended` has the evidence reported, and `_join` asks to be in the next round, once this node is fit;
- `_handle_record` sees that round frozen: `confirm_round` opens the port of rank 0; and final: `_start_workers`.
"""

from __future__ import annotations

import logging
import selectors
import signal

from hpc_elastic.agent.checkpoints import CheckpointWatch, PreemptionWatch
from hpc_elastic.agent.confirmation import confirm_round
from hpc_elastic.agent.context import AgentContext
from hpc_elastic.agent.ending import (
    HeardSignals,
    ThreadFailedError,
    deregister,
    exit_code,
    finish_if_unclaimed,
    leave_run,
)
from hpc_elastic.agent.failure_reports import FailureReports
from hpc_elastic.agent.health import HealthVerdict
from hpc_elastic.agent.job_nodes import JobNodes
from hpc_elastic.agent.local_workers import LocalWorkers
from hpc_elastic.agent.metrics import NoMetrics, RoundFigures
from hpc_elastic.agent.round_events import ClockOffsetLog, log_coordination, log_health, log_round
from hpc_elastic.agent.round_workers import RoundWorkers, log_started, log_stopped
from hpc_elastic.agent.store_server import StoreState
from hpc_elastic.agent.supervision import WORKER_STATE, Event, Phase, WorkerState, next_phase
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.base.waking import wait_readable
from hpc_elastic.failures.contrast import ALL_ALIKE
from hpc_elastic.output.pump import log_losses
from hpc_elastic.rendezvous.state import RoundRecord, Status, supersedes
from hpc_elastic.rendezvous.succession import NodesCutOff
from hpc_elastic.run.agent_events import AgentEnded, WorkersStopping, WorkersSucceeded
from hpc_elastic.run.event_types import RunEvent
from hpc_elastic.workers.spawn import WorkerStartError, reap_orphans
from hpc_elastic.workers.stop import Stopped

logger = logging.getLogger(__name__)

FIRST_HEALTH_SECONDS = 0.25
"""How long an agent waits for its first health check before it asks to join."""
FIRST_RECORD_SECONDS = 1.0
"""How long one whose fork server imports, or whose guardian has ended the workers, waits for a record."""


class NodeAgent:
    """Runs one node's part of an attempt, from joining to the end."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self.phase = Phase.JOINING
        self._record: RoundRecord | None = None
        self._workers: LocalWorkers | None = None
        self._round = -1
        """The round that this node confirmed last."""
        self._has_run = self._joins_when_warm = False
        self._failure: Exception | None = None
        """What ended this agent, and was no worker's."""
        self._why_ended = ""
        self._stop_due: float | None = None
        """When workers that are being ended must be looked at again; None: none are."""
        self._swept = False
        """Whether the workers ended with 0 and all that they left running has been ended."""
        self.hangs = False
        """Whether the filesystem did not take the last commands in time: a thread may wait for it for ever."""
        self._selector = selectors.DefaultSelector()
        self._watched: set[int] = set()
        self._unfit: HealthVerdict | None = None
        self._moment_ends: float | None = None
        """Until when the workers elsewhere are let go on after a failure here that may be this node's."""
        self._figures = context.figures or RoundFigures(NoMetrics(), role=context.spec.role, clock=context.clock)
        self._checkpoints = CheckpointWatch(context.watch, context.spec, clock=context.clock)
        uid, clock = context.info.uid, context.clock
        self._clock_offsets = ClockOffsetLog(context.events, context.notifier, uid=uid, clock=clock)
        self._reports = FailureReports(context, self._clock_offsets)
        self._heard = HeardSignals(context)
        self._notice = PreemptionWatch(context.watch, context.spec, clock=context.clock)
        self._unendable: set[int] = set()
        """Pids that not even SIGKILL ended: logged once, and not waited for again."""
        self._job_nodes = JobNodes(context)
        self._met: float | None = None  # seconds that the rendezvous of this round took
        self._awaits_imports = False  # the round is final, and its workers wait for the fork server

    @property
    def state(self) -> WorkerState:
        if self._record is not None and self._record.outcome is Outcome.SUCCEEDED:
            return WorkerState.SUCCEEDED
        if self.phase is Phase.ENDED:
            return WorkerState.FAILED
        return WORKER_STATE[self.phase] if self._has_run else WorkerState.INIT

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part until the run is closed, or this node is out.

        Returns:
            The agent's exit code: information for a person; the verdict is in the store.
        """
        context = self._context
        for source in (context.coordination, context.signals, context.health, context.setup):
            if source.fileno() >= 0:
                self._selector.register(source, selectors.EVENT_READ)
        self.begin()
        while self.phase is not Phase.ENDED:
            self._watch_workers()
            self._selector.select(self._timeout())
            self.step()
        return self.leave()

    def begin(self) -> None:
        """Ask to be in the first round, once ``--setup`` has made the workers' environment."""
        context = self._context
        context.setup.begin()
        if not context.setup.is_ready:
            context.coordination.start()
            return
        self._begin_servers()
        if is_cold := context.fork_server.is_awaited:
            context.coordination.start()
            self._find_round()
        self._join()
        # Of thousands that start, each should ask at once.
        context.health.wait(FIRST_HEALTH_SECONDS)
        self._handle_health()
        if not is_cold:
            context.coordination.start()

    def _find_round(self) -> None:
        """Wait for the record of the round that goes on, if there is one, while the fork server imports anyway."""
        context = self._context
        while self._record is None and context.fork_server.is_awaited:
            if not wait_readable([context.coordination, context.fork_server], FIRST_RECORD_SECONDS):
                return
            self._handle_messages()
            context.fork_server.handle()

    def _begin_servers(self) -> None:
        change = self._context.setup.change
        self._context.store_server.take_change(change)
        self._context.fork_server.begin(change)

    def step(self) -> None:
        """Take in all that has come, and do what follows. Never waits."""
        self._handle_signals()
        self._handle_setup()
        self._handle_workers()
        self._handle_heartbeats()
        self._handle_messages()
        self._job_nodes.handle()
        if self._failure is None:
            self._context.crash.check()
        self._handle_health()
        self._handle_stop()
        self._handle_store()
        self._handle_fork_server()
        log_losses(self._context.events, self._context.pump)
        self._figures.enter(self.state)

    def _watch_workers(self) -> None:
        wanted = set(self._workers.watched()) if self._workers else set()
        context = self._context
        parts = (context.store_server, context.restart_group, context.fork_server, self._job_nodes)
        wanted |= {fd for part in parts if (fd := part.fileno()) >= 0}
        for fd in self._watched - wanted:
            self._selector.unregister(fd)
        for fd in wanted - self._watched:
            self._selector.register(fd, selectors.EVENT_READ)
        self._watched = wanted

    def _timeout(self) -> float:
        context, now = self._context, self._context.clock.monotonic()
        if self._stop_due is not None:
            return max(0.0, self._stop_due - now)
        watches = (context.hangs, self._checkpoints, self._notice, self._heard, context.fork_server)
        dues = (*(watch.due for watch in watches), self._moment_ends)
        looks = [due - now for due in dues if due is not None]
        looks += [self._workers.sockets.due - now] if self._workers is not None and self.phase is Phase.RUNNING else []
        return max(0.0, min([context.spec.monitor_interval, *looks]))

    # -- what comes in -------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        for number in self._context.signals.take():
            if number is signal.SIGCHLD:
                reap_orphans(set(self._workers.pids if self._workers else ()) | self._context.helpers())
            elif self._heard.hear(number):
                self._happens(Event.LEAVE, f"{number.name} received")
            elif self._stop_due is not None and self._workers is not None:
                self._workers.begin_stop(grace=self._heard.grace())  # Slurm may leave less time than was known
        if (overdue := self._heard.overdue()) is not None:
            self._happens(Event.LEAVE, f"{overdue.name} received")

    def _handle_workers(self) -> None:
        workers = self._workers
        self._context.restart_group.handle(self._round)
        if workers is None or self.phase is not Phase.RUNNING:
            return
        changed = workers.poll()
        if self._moment_ends is not None:
            if self._context.clock.monotonic() >= self._moment_ends:
                self._moment_ends = None
                self._happens(Event.FAILED, workers.exit_summary())
            return
        if not changed:
            return
        if workers.failed:
            if self._context.restart_group.replace_dead(workers):
                return
            if (seconds := self._reports.moment_for(workers, self._record)) is not None:
                self._moment_ends = self._context.clock.monotonic() + seconds
            else:
                self._happens(Event.FAILED, workers.exit_summary())
        elif workers.succeeded:
            self._happens(Event.SUCCEEDED, "all workers here ended with 0")
        elif not workers.running:  # its guardian has ended them: a newer record says why, or this node's files hung
            self._moment_ends = self._context.clock.monotonic() + FIRST_RECORD_SECONDS

    def _handle_heartbeats(self) -> None:
        workers, is_running = self._workers, self.phase is Phase.RUNNING
        if workers is None or not (is_running or self.phase is Phase.DONE):
            return
        if (found := self._context.hangs.look(workers, self._record)) and self._reports.on_hang(workers, found):
            if is_running:
                self._happens(Event.FAILED, found.reason)
            else:
                self._reports.on_failure(workers, found.reason)  # of ranks elsewhere: all here have ended with 0
            return
        if not is_running:
            return
        if self._context.clock.monotonic() >= workers.sockets.due:
            workers.look_at_sockets()
        if (status := self._checkpoints.look(workers.running)) is not None:
            self._context.coordination.ask(status.send)
        elif (reply := self._notice.look(workers.running)) is not None:
            self._context.coordination.ask(reply.send)

    def _handle_messages(self) -> None:
        for message in self._context.coordination.take():
            if isinstance(message, RoundRecord):
                self._handle_record(message)
            elif isinstance(message, NodesCutOff) and self._record is not None:
                self._job_nodes.on_cut_off(message, self._record)
            elif isinstance(message, RunEvent):
                log_coordination(self._context.events, message, nodes=self._context.attempt.nodes)
            else:
                self._failure = message
                logger.error("%s", message)
                what = "" if isinstance(message, ThreadFailedError) else "the store can't be used any more: "
                self._happens(Event.LEAVE, f"{what}{message}")

    def _handle_record(self, record: RoundRecord) -> None:
        if self.phase is Phase.ENDED:
            return
        self._record = record
        self._clock_offsets.on_leader(record.leader)
        self._checkpoints.on_record(record)
        self._heard.on_record(record)
        self._notice.on_record(record, self._workers)
        uid = self._context.info.uid
        if any(supersedes(member.uid, uid) for member in record.members):
            self._happens(Event.LEAVE, "a newer agent runs on this node")
        elif self._context.info.node in record.unfit and self._unfit is None:
            # All workers here failed alike, and none elsewhere: another agent here would find the same.
            self._unfit = HealthVerdict(reason=ALL_ALIKE)
            self._context.coordination.ask(lambda participant: leave_run(participant, ALL_ALIKE))
            self._happens(Event.LEAVE, ALL_ALIKE)
        elif record.status is Status.CLOSED:
            self._happens(Event.CLOSED, record.reason)
        elif record.round > self._round and self.phase in (Phase.READY, Phase.RUNNING, Phase.DONE, Phase.STOPPING):
            self._happens(Event.NEWER_ROUND, record.reason)
        if record.member(uid) is None or record.round < self._round:
            return
        if record.status is Status.FROZEN and self.phase is Phase.JOINING:
            # Not in READY: that is the same round under a new coordinator, and the port that was published must stay.
            self._happens(Event.FROZEN, record.reason)
        elif record.status is Status.FINAL and self.phase is Phase.READY and record.round == self._round:
            self._happens(Event.FINAL, record.reason)

    def _handle_setup(self) -> None:
        why = self._context.setup.take()
        if why is None or self.phase is not Phase.JOINING:
            return
        if why:
            self._on_health(HealthVerdict(reason=why, is_usage=True))
        else:
            self._begin_servers()
            self._join()

    def _handle_health(self) -> None:
        if (verdict := self._context.health.take()) is not None and self.phase is Phase.JOINING:
            self._on_health(verdict)

    def _on_health(self, verdict: HealthVerdict) -> None:
        context = self._context
        log_health(context.events, verdict, round_index=max(0, self._round))
        if verdict.is_healthy:
            self._joins_when_warm = self._is_too_cold
            if not self._joins_when_warm:
                context.coordination.ask(lambda participant: participant.join())
            return
        self._unfit = verdict
        if not verdict.is_usage:  # else the supervisor gives the node up, and judges by what all of them did
            context.coordination.ask(lambda participant: leave_run(participant, verdict.reason))
        self._happens(Event.LEAVE, verdict.reason)

    def _handle_stop(self) -> None:
        workers = self._workers
        if self._stop_due is None or workers is None:
            return
        result = workers.step_stop()
        if not isinstance(result, Stopped):
            self._stop_due = self._context.clock.monotonic() + result
            return
        self._stop_due = None
        self._figures.end("stop")
        log_stopped(self._context, workers, result)
        self._unendable.update(survivor.pid for survivor in result.left)
        self._swept = self.phase is Phase.DONE
        if self.phase in (Phase.STOPPING, Phase.LEAVING):
            self._happens(Event.STOPPED, "workers have ended")

    def _handle_store(self) -> None:
        store, reports = self._context.store_server, self._reports
        has_workers = self.phase in (Phase.RUNNING, Phase.STOPPING)  # a worker may notice it before this agent does
        if store.handle() is not StoreState.FAILED or not has_workers or reports.platform_failure:
            return
        reports.on_platform_failure(self._round, f"the workers' TCPStore is gone: {store.failure}")
        if self.phase is Phase.RUNNING:  # workers that connect would retry for five minutes before they fail
            self._happens(Event.FAILED, reports.platform_failure)

    def _handle_fork_server(self) -> None:
        self._context.fork_server.handle()
        if self._joins_when_warm and self.phase is Phase.JOINING and not self._is_too_cold:
            self._joins_when_warm = False
            self._context.coordination.ask(lambda participant: participant.join())
        if self._awaits_imports and not self._context.fork_server.is_awaited:
            self._awaits_imports = False
            self._start_workers()

    @property
    def _is_too_cold(self) -> bool:
        """Whether a round goes on elsewhere, which would be ended for workers that then wait for the fork server."""
        goes_on = self._record is not None and self._record.status is Status.FINAL and not self._has_run
        return goes_on and self._context.fork_server.is_awaited

    # -- what follows --------------------------------------------------------------------------------------------

    def _happens(self, event: Event, reason: str) -> None:
        """Take `event` in: the table holds which phase follows, the methods below do what belongs to it."""
        before = self.phase
        if before is Phase.ENDED:
            return
        self.phase = next_phase(before, event)
        self._figures.enter(self.state)
        self._awaits_imports = False
        if event in (Event.CLOSED, Event.LEAVE):
            self._why_ended = self._why_ended or reason
        if event is Event.FROZEN:
            assert self._record is not None
            self._round = self._record.round
            confirm_round(self._context, self._record, is_ending=self._heard.is_ending)
        elif event is Event.FINAL:
            self._met = self._figures.end("rendezvous")
            self._figures.begin("start")
            self._awaits_imports = self._context.fork_server.is_awaited
            if not self._awaits_imports:
                self._start_workers()
        elif event is Event.FAILED:
            self._clock_offsets.log_changes()
            assert self._workers is not None
            if self._workers.has_symptoms_only:
                self._workers.look_first()
            self._reports.on_failure(self._workers, reason)
            self._stop_workers(reason)
        elif event is Event.SUCCEEDED:
            self._report_done()
        elif event is Event.STOPPED:
            self._workers_ended()
        elif self.phase in (Phase.STOPPING, Phase.LEAVING):
            self._stop_workers(reason)
        elif event is Event.NEWER_ROUND:
            self._join()

    def _join(self) -> None:
        """Ask to be in the next round, once this node is known to be fit."""
        self._figures.begin("rendezvous")
        self._context.health.begin(self._round)
        self._handle_health()

    def _start_workers(self) -> None:
        record, context = self._record, self._context
        assert record is not None
        own = RoundWorkers(context, record)
        if not own.serves_store:
            # Rank 0 opens it itself, or another node has it now. Not sooner: workers elsewhere that were still being
            # ended would have failed with a lost connection.
            context.store_server.release()
        self._moment_ends = None
        workers = self._workers = own.group(
            excluding=lambda: context.helpers() | self._unendable | self._job_nodes.pids,
            is_ending=self._heard.is_ending,
        )
        self._reports.write_again()
        self._swept, self._has_run, self._reports.platform_failure = False, True, ""
        log_round(context.events, own.facts, restarts_used=record.restarts_used)
        self._figures.put("remaining_restarts", context.spec.max_restarts - record.restarts_used)
        try:
            own.start(workers)
        except (WorkerStartError, OSError) as error:
            if isinstance(error, WorkerStartError) and not error.is_passing:
                self._on_health(HealthVerdict(reason=str(error), is_usage=True))  # who else lacks it?
                return
            self._reports.on_start_failure(workers, error)
            self.phase = next_phase(self.phase, Event.FAILED)
            self._stop_workers(str(error))
            return
        self._clock_offsets.log_first()
        context.hangs.begin(record.round, workers.layout.local_world_size)
        log_started(
            context,
            workers,
            rendezvous_seconds=self._met,
            start_seconds=self._figures.end("start"),
            restart_seconds=self._figures.end("restart"),
        )
        if own.serves_store:
            context.store_server.serve()

    def _report_done(self) -> None:
        assert self._workers is not None
        self._context.events.write(WorkersSucceeded(round=(index := self._workers.round)))
        self._context.watch.refresh()
        self._context.watch.rest()
        if (reply := self._notice.ended()) is not None:
            self._context.coordination.ask(reply.send)  # first: done alone would mean that there is no more to do
        self._context.coordination.ask(lambda participant: participant.claims.report_done(index))
        # What they left running does not outlive the round; the other nodes do not wait for its end.
        self._workers.begin_stop(grace=self._heard.grace())
        self._stop_due = self._context.clock.monotonic()

    def _stop_workers(self, reason: str) -> None:
        """Begin to end the workers, or leave them less time; what they did last is read before."""
        workers, context, record = self._workers, self._context, self._record
        if workers is None or self._swept:
            self._reports.on_break_elsewhere(workers, record)
            self._stop_due = None
            self._happens(Event.STOPPED, reason)
            return
        if not workers.stopping and self._stop_due is None:
            context.events.write(WorkersStopping(round=workers.round, reason=reason))
            self._figures.begin("restart")
            self._figures.begin("stop")
            self._reports.before_stop(workers, record)
        elif record is not None and not record.symptoms and record.round > workers.round:
            workers.end_moment()
        workers.begin_stop(grace=self._heard.grace(), at_once=context.watch.is_round_over)
        self._stop_due = context.clock.monotonic()

    def _workers_ended(self) -> None:
        """All of the group are gone: write and report the evidence, and join again where this agent goes on."""
        workers, self._workers = self._workers, None
        if workers is not None:
            self._reports.on_end(workers)
        if self.phase is Phase.JOINING:
            self._join()

    # -- the end -------------------------------------------------------------------------------------------------

    def leave(self) -> int:
        """The phase is ENDED: close all, and report the end. Returns the exit code."""
        context = self._context
        self._selector.close()
        self._reports.write_again()
        code = exit_code(ended_by=self._heard.ended_by, failure=self._failure, unfit=self._unfit, record=self._record)
        for part in (context.store_server, context.fork_server, context.watch, context.health, context.setup):
            part.close()
        # Slurm's own end too: where it has killed the batch script (scancel --batch), nothing else writes the verdict.
        by_slurm = self._heard.ended_by in (None, signal.SIGTERM)
        if by_slurm and self._failure is None and context.attempt.cluster == "slurm":
            finish_if_unclaimed(context, self._record, is_closing=self._heard.ended_by is not None)
        context.events.write(AgentEnded(reason=self._why_ended, code=code))
        self.hangs = not deregister(context)
        for message in [*context.coordination.take(), context.coordination.lasting_refusal()]:
            if isinstance(message, RunEvent):  # what was decided meanwhile: that the run is closed, for one
                log_coordination(context.events, message, nodes=context.attempt.nodes)
        return code
