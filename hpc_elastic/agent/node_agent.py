"""The agent of one node: one loop over events, one phase at a time; whatever may be slow happens elsewhere.

What `step` observes becomes an `Event`, `supervision.TRANSITIONS` holds which phase follows, and `_happens` does what
belongs to it. Everything beside the loop, the workers and the policy is a `Part`. The way of a worker that is killed:

- `_handle_workers` sees its end, and `FailureReports` the bare fact, so that all nodes stop;
- `_stop_workers` begins to end the others, and `_handle_stop` goes on with that until nothing is left;
- `_workers_ended` has the evidence reported, and `_join` asks to be in the next round, once this node is fit;
- `_handle_record` sees that round frozen: `confirm_round` opens the port of rank 0; and final: `_start_workers`.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hpc_elastic.agent import ending, rounds
from hpc_elastic.agent.ending import CrashGuard, HeardSignals, ThreadFailedError
from hpc_elastic.agent.metrics import MetricSink, RoundFigures
from hpc_elastic.agent.part import AgentSite, Condemned, HealthVerdict, Part, fork_workers, watched
from hpc_elastic.agent.rounds import LOAD_SECONDS, ClockOffsetLog, RoundWorkers
from hpc_elastic.agent.supervision import WORKER_STATE, Event, Phase, WorkerState, next_phase
from hpc_elastic.base.loop import FileExecutor, seconds_until, wait_readable
from hpc_elastic.base.text import ranges
from hpc_elastic.failures.ranking import ALL_ALIKE
from hpc_elastic.output.pump import log_losses
from hpc_elastic.rendezvous.state import RoundRecord, Status, supersedes
from hpc_elastic.rendezvous.succession import NodesCutOff
from hpc_elastic.run.agent_events import AgentEnded, WorkersStarted, WorkersStopping, WorkersSucceeded
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import Outcome
from hpc_elastic.workers.linux import SignalQueue
from hpc_elastic.workers.spawn import NO_CHANGE, EnvironmentChange, WorkerStartError, reap_orphans

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import LocalWorkers
    from hpc_elastic.agent.restart_policy import FailureReports

logger = logging.getLogger(__name__)

FIRST_HEALTH_SECONDS = 0.25
FIRST_RECORD_SECONDS = 1.0
"""How long one whose fork server imports, or whose guardian has ended the workers, waits for a record."""


class NodeAgent:
    """Runs one node's part of an attempt, from joining to the end."""

    def __init__(
        self,
        site: AgentSite,
        parts: Sequence[Part],
        *,
        signals: SignalQueue,
        guardian_pid: int = 0,
        were_workers_ended: Callable[[], bool] = lambda: False,
        crash: CrashGuard | None = None,
        metrics: MetricSink | None = None,
        loader: FileExecutor | None = None,
    ) -> None:
        self.site = site
        self.parts = parts
        self.phase = Phase.JOINING
        self.record: RoundRecord | None = None
        self.workers: LocalWorkers | None = None
        self.change = NO_CHANGE
        self.has_run = False
        self.hangs = False
        """The filesystem did not take the last commands in time: a thread may wait for it forever."""
        self._signals = signals
        self._guardian_pid = guardian_pid
        self._were_workers_ended = were_workers_ended
        self._crash = crash or CrashGuard()
        self._loader = loader or site.files
        self.round = -1
        self._wants_join = self._waits_to_start = False
        self._failure: Exception | None = None
        self._why_ended = ""
        self._stop_due: float | None = None
        self._swept = False
        self._unfit: HealthVerdict | None = None
        self._grace_for_peers_until: float | None = None
        """Deadline for other nodes to show the same failure, before the workers here are ended."""
        self.figures = RoundFigures(metrics, role=site.me.spec.role, clock=site.clock)
        self._rendezvous_seconds: float | None = None
        self._clock_offsets = ClockOffsetLog(site.events, site.notifier, uid=site.info.uid, clock=site.clock)
        self._reports: FailureReports
        self.heard = HeardSignals(site, signals)
        self._unendable: set[int] = set()
        """Not even SIGKILL ended them: logged once, and not waited for again."""

    @property
    def state(self) -> WorkerState:
        if self.record is not None and self.record.outcome is Outcome.SUCCEEDED:
            return WorkerState.SUCCEEDED
        if self.phase is Phase.ENDED:
            return WorkerState.FAILED
        return WORKER_STATE[self.phase] if self.has_run else WorkerState.INIT

    def run(self) -> int:
        """Take part until the run is closed, or this node is out. Returns the exit code, which is for a person."""
        self.begin()
        while self.phase is not Phase.ENDED:
            pidfds = self.workers.watched() if self.workers else ()
            wait_readable([self.site.coordination, self._signals, *pidfds, *watched(self.parts)], self._timeout())
            self.step()
        return self.leave()

    def begin(self) -> None:
        self._loader.post(rounds.load)
        for part in self.parts:
            part.begin()
        if not all(part.is_ready for part in self.parts):
            self.site.coordination.start()
            return
        self._set_up(NO_CHANGE)
        if is_cold := self._is_start_held:
            self.site.coordination.start()
            while self.record is None and (held_by := [part for part in self.parts if part.holds_start]):
                if not wait_readable([self.site.coordination, *watched(held_by)], FIRST_RECORD_SECONDS):
                    break
                self._handle_messages()
                for part in held_by:
                    part.look(self)
        self._join()
        self._look_at_parts()
        if is_cold:
            return
        if holding := watched(part for part in self.parts if part.holds_join(self)):
            wait_readable(holding, FIRST_HEALTH_SECONDS)  # of thousands that start, each should ask at once
            self._look_at_parts()
        self.site.coordination.start()

    def begin_joining(self, change: EnvironmentChange) -> None:
        self._set_up(change)
        self._join()

    def _set_up(self, change: EnvironmentChange) -> None:
        self.change = change
        for part in self.parts:
            part.on_setup(change)

    @property
    def _is_start_held(self) -> bool:
        return any(part.holds_start for part in self.parts)

    def step(self) -> None:
        self._handle_signals()
        self._handle_workers()
        self._handle_messages()
        if self._failure is None:
            self._crash.check()
        self._handle_stop()
        self._look_at_parts()
        log_losses(self.site.events, self.site.pump)
        self.figures.enter(self.state)

    def _look_at_parts(self) -> None:
        for part in self.parts:
            if (found := part.look(self)) is not None:
                self.condemn(found)
        if self._waits_to_start and not self._is_start_held:
            self._waits_to_start = False
            self._start_workers()
        self._ask_to_join()

    def _ask_to_join(self) -> None:
        is_held = any(part.holds_join(self) for part in self.parts)
        if self._wants_join and self.phase is Phase.JOINING and not is_held:
            self._wants_join = False
            self.site.coordination.ask(lambda participant: participant.join())

    def _timeout(self) -> float:
        if self._stop_due is not None:
            return seconds_until([self._stop_due], self.site.clock)
        dues = [*(part.due for part in self.parts), self.heard.due, self._grace_for_peers_until]
        dues += [self.workers.sockets.due] if self.workers is not None and self.phase is Phase.RUNNING else []
        return seconds_until(dues, self.site.clock, most=self.site.me.spec.monitor_interval)

    def _helpers(self) -> set[int]:
        return {self._guardian_pid, *(pid for part in self.parts for pid in part.pids)}

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            if number is signal.SIGCHLD:
                reap_orphans(set(self.workers.pids if self.workers else ()) | self._helpers())
            elif self.heard.hear(number):
                self._happens(Event.LEAVE, f"{number.name} received {self._signals.sender(number)}".rstrip())
            elif self._stop_due is not None and self.workers is not None:
                self.workers.begin_stop(grace=self.heard.grace())  # Slurm may leave less time than was known
        if (overdue := self.heard.overdue()) is not None:
            self._happens(Event.LEAVE, f"{overdue.name} received")

    def _handle_workers(self) -> None:
        workers, now = self.workers, self.site.clock.monotonic()
        if workers is None or self.phase is not Phase.RUNNING:
            return
        changed = workers.poll()
        if now >= workers.sockets.due:
            workers.look_at_sockets()
        if self._grace_for_peers_until is not None:
            if now >= self._grace_for_peers_until:
                self._grace_for_peers_until = None
                self._happens(Event.FAILED, workers.exit_summary())
            return
        if not changed:
            return
        if workers.failed:
            if any(part.replace_dead(workers) for part in self.parts):
                return
            if (seconds := self._reports.grace_for_peers(workers, self.record)) is not None:
                self._grace_for_peers_until = now + seconds
            else:
                self._happens(Event.FAILED, workers.exit_summary())
        elif workers.succeeded:
            self._happens(Event.SUCCEEDED, "all workers here ended with 0")
        elif not workers.running:  # its guardian has ended them: a newer record says why, or this node's files hung
            self._grace_for_peers_until = now + FIRST_RECORD_SECONDS

    def _handle_messages(self) -> None:
        events = self.site.events
        for message in self.site.coordination.take():
            if isinstance(message, RoundRecord):
                self._handle_record(message)
            elif isinstance(message, NodesCutOff) and self.record is not None:
                for part in self.parts:
                    part.on_cut_off(message, self.record)
            elif isinstance(message, RunEvent):
                rounds.log_coordination(events, message, nodes=self.site.me.attempt.nodes)
            else:
                self._failure = message
                logger.error("%s", message)
                what = "" if isinstance(message, ThreadFailedError) else "the store can't be used any more: "
                self._happens(Event.LEAVE, f"{what}{message}")

    def _handle_record(self, record: RoundRecord) -> None:
        if self.phase is Phase.ENDED:
            return
        self.record = record
        self._clock_offsets.on_leader(record.leader)
        self.heard.on_record(record)
        for part in self.parts:
            part.on_record(record, self.workers)
        if self.has_run:
            self._reports.on_record(record)
        uid = self.site.info.uid
        if any(supersedes(member.uid, uid) for member in record.members):
            self._happens(Event.LEAVE, "a newer agent runs on this node")
        elif self.site.info.node in record.unfit and self._unfit is None:
            # All workers here failed alike, and none elsewhere: another agent here would find the same.
            self._leave_unfit(HealthVerdict(reason=ALL_ALIKE))
        elif record.status is Status.CLOSED:
            self._happens(Event.CLOSED, record.reason)
        elif record.round > self.round and self.phase in (Phase.READY, Phase.RUNNING, Phase.DONE, Phase.STOPPING):
            self._happens(Event.NEWER_ROUND, record.reason)
        if record.member(uid) is None or record.round < self.round:
            return
        if record.status is Status.FROZEN and self.phase is Phase.JOINING:
            # Not in READY: that is the same round under a new coordinator, and the port that was published must stay.
            self._happens(Event.FROZEN, record.reason)
        elif record.status is Status.FINAL and self.phase is Phase.READY and record.round == self.round:
            self._happens(Event.FINAL, record.reason)

    def on_health(self, verdict: HealthVerdict) -> None:
        rounds.log_health(self.site.events, verdict, round_index=max(0, self.round))
        if not verdict.is_healthy:
            self._leave_unfit(verdict)

    def _leave_unfit(self, verdict: HealthVerdict) -> None:
        self._unfit = verdict
        if not verdict.is_usage:  # else the supervisor gives the node up, and judges by what all of them did
            self.site.coordination.ask(lambda participant: ending.leave_run(participant, verdict.reason))
        self._happens(Event.LEAVE, verdict.reason)

    def condemn(self, found: Condemned) -> None:
        if self.workers is None:
            return
        self._reports.on_condemned(self.workers, found)
        if self.phase is Phase.RUNNING:
            self._happens(Event.FAILED, found.reason)
        elif self.phase is Phase.DONE:  # ranks elsewhere are meant: all here have ended with 0
            self._reports.on_failure(self.workers, found.reason)

    def _handle_stop(self) -> None:
        workers = self.workers
        if self._stop_due is None or workers is None:
            return
        result = workers.step_stop()
        if isinstance(result, (float, int)):
            self._stop_due = self.site.clock.monotonic() + result
            return
        self._stop_due = None
        self.figures.end("stop")
        rounds.log_stopped(self.site, workers, result)
        self._unendable.update(survivor.pid for survivor in result.left)
        self._swept = self.phase is Phase.DONE
        if self.phase in (Phase.STOPPING, Phase.LEAVING):
            self._happens(Event.STOPPED, "workers have ended")

    def _happens(self, event: Event, reason: str) -> None:
        before = self.phase
        if before is Phase.ENDED:
            return
        self.phase = next_phase(before, event)
        self.figures.enter(self.state)
        self._waits_to_start = False
        if event in (Event.CLOSED, Event.LEAVE):
            self._why_ended = self._why_ended or reason
        if event is Event.FROZEN:
            assert self.record is not None
            self.round = self.record.round
            rounds.confirm_round(self.site, self.record, change=self.change, is_ending=self.heard.is_ending)
        elif event is Event.FINAL:
            self._rendezvous_seconds = self.figures.end("rendezvous")
            self.figures.begin("start")
            self._waits_to_start = self._is_start_held
            if not self._waits_to_start:
                self._start_workers()
        elif event is Event.FAILED:
            self._clock_offsets.log_changes()
            assert self.workers is not None
            if self.workers.has_symptoms_only:
                self.workers.look_first()
            self._reports.on_failure(self.workers, reason)
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
        self.figures.begin("rendezvous")
        self._wants_join = True
        for part in self.parts:
            part.on_join(self.round)
        self._ask_to_join()

    def _start_workers(self) -> None:
        record, site = self.record, self.site
        assert record is not None
        if not self.has_run and not self._load():
            return
        own = RoundWorkers(site, record, change=self.change)
        if not own.serves_store:
            # Rank 0 opens it itself, or another node has it now. Not sooner: workers elsewhere that were still being
            # ended would have failed with a lost connection.
            site.store_server.release()
        self._grace_for_peers_until = None
        workers = self.workers = own.group(
            excluding=lambda: self._helpers() | self._unendable,
            is_ending=self.heard.is_ending,
            were_ended=self._were_workers_ended,
            fork=partial(fork_workers, self.parts),
        )
        self._reports.begin()
        self._swept, self.has_run = False, True
        rounds.log_round(site.events, own.facts, restarts_used=record.restarts_used)
        self.figures.put("remaining_restarts", site.me.spec.max_restarts - record.restarts_used)
        environ = dict(site.environ)
        for part in self.parts:
            environ.update(part.environment(site.environ))
        try:
            own.start(workers, environ)
        except (WorkerStartError, OSError) as error:
            if isinstance(error, WorkerStartError) and not error.is_passing:
                self.on_health(HealthVerdict(reason=str(error), is_usage=True))  # who else lacks it?
                return
            logger.error("the workers could not be started: %s", error)
            self.condemn(workers.condemn_unstarted(error))
            return
        self._clock_offsets.log_first()
        for part in self.parts:
            part.on_start(workers)
        site.events.write(
            WorkersStarted(
                round=workers.round,
                pids=tuple(workers.pids),
                rendezvous_seconds=self._rendezvous_seconds,
                start_seconds=self.figures.end("start"),
                restart_seconds=self.figures.end("restart"),
                started_fresh="".join(part.why_fresh for part in self.parts),
                cpus=tuple(ranges(sorted(own)) for own in site.cpus),
            )
        )
        if own.serves_store:
            site.store_server.serve()

    def _load(self) -> bool:
        try:
            self._loader.do(rounds.load, within=LOAD_SECONDS, unless=self.heard.is_ending)
        except OSError as error:
            self._failure = error
            self._happens(Event.LEAVE, f"this package can't be read: {error}")
            return False
        from hpc_elastic.agent.restart_policy import FailureReports

        self._reports = FailureReports(self.site, self._clock_offsets)
        return True

    def _report_done(self) -> None:
        assert self.workers is not None
        self.site.events.write(WorkersSucceeded(round=(index := self.workers.round)))
        self.site.watch.refresh()
        self.site.watch.stop_judging()
        for part in self.parts:
            part.on_success()  # a preemption's first: done alone would mean that there is no more to do
        self.site.coordination.ask(lambda participant: participant.claims.report_done(index))
        # What they left running does not outlive the round; the other nodes do not wait for its end.
        self.workers.begin_stop(grace=self.heard.grace())
        self._stop_due = self.site.clock.monotonic()

    def _stop_workers(self, reason: str) -> None:
        workers, site, record = self.workers, self.site, self.record
        if workers is None or self._swept:
            if workers is not None:
                self._reports.on_break_elsewhere(workers, record)
            self._stop_due = None
            self._happens(Event.STOPPED, reason)
            return
        if not workers.stopping and self._stop_due is None:
            site.events.write(WorkersStopping(round=workers.round, reason=reason))
            self.figures.begin("restart")
            self.figures.begin("stop")
            self._reports.before_stop(workers, record)
            for part in self.parts:
                part.before_stop()
        elif record is not None and not record.symptoms and record.round > workers.round:
            workers.end_delay()
        workers.begin_stop(grace=self.heard.grace(), at_once=site.watch.is_round_over)
        self._stop_due = site.clock.monotonic()

    def _workers_ended(self) -> None:
        workers, self.workers = self.workers, None
        if workers is not None:
            self._reports.on_end(workers, self.record)
        if self.phase is Phase.JOINING:
            self._join()

    def leave(self) -> int:
        if self.has_run:
            self._reports.write_again()
        code = ending.exit_code(
            ended_by=self.heard.ended_by, failure=self._failure, unfit=self._unfit, record=self.record
        )
        for part in self.parts:
            part.close()
        self.site.watch.close()
        if self._failure is None:
            ending.finish_if_unclaimed(self.site, self.record, ended_by=self.heard.ended_by)
        self.site.events.write(AgentEnded(reason=self._why_ended, code=code))
        self.hangs = not ending.deregister(self.site)
        return code
