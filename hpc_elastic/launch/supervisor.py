"""One attempt, seen from the batch host: start the agents, keep one on every node, wait for the verdict, leave nothing.

The supervisor decides nothing about rounds. It takes part in the rendezvous as an observer: it reads the log, is
notified like the agents, and can close the run (Ctrl-C, a preemption notice, or when no agent is left to do so).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from msgspec import UNSET, Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import seconds_until, wait_readable
from hpc_elastic.errors import HpcElasticError, describe_error, where_raised
from hpc_elastic.launch.agents import Agents, Launcher
from hpc_elastic.launch.requeue import AttemptResult, closed_result
from hpc_elastic.launch.site import HeardBy, JobWatch, Meaning, SignalDecision, SignalResolver
from hpc_elastic.launch.supersede import EndClaim
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.participant import Refreshed
from hpc_elastic.rendezvous.state import RoundRecord, RunNotice, Status, seconds_to_save
from hpc_elastic.rendezvous.succession import END_UNCONFIRMED, AgentsDeparted, EndClaimed
from hpc_elastic.run.agent_events import FilesystemRefused, PlatformFailure
from hpc_elastic.run.control_events import EndTakenOver, SignalReceived
from hpc_elastic.run.events import EventLog, Note, RunEvent
from hpc_elastic.run.paths import AttemptInfo, Outcome
from hpc_elastic.store.file_store import StoreWipedError
from hpc_elastic.workers.linux import SignalQueue

logger = logging.getLogger(__name__)

ORPHANED_SECONDS = 5.0
"""Wait for a verdict after the last agent's end."""
CLOSE_SECONDS = 1.0
"""Further wait after this process has closed the run itself."""
UNFIT_SECONDS = 0.5
"""The same wait where every node was found unfit: usually there is no verdict."""
WIPED_SECONDS = 20.0
"""Time for this process to see the wiped store too, after the last agent that saw it."""
END_RESERVE = 15.0
DEPARTED_SECONDS = 1.0
"""Time for the launcher to notice after every agent has deregistered."""
LAST_GRACE = 2.0
AT_ONCE = 0.3
SILENT_SECONDS = 3.0
"""Time for the store to take the closing record."""
UNMET_SECONDS = 0.5
"""Time for that where no node has joined: there is no log to write it into."""
SILENT_RESERVE = 9.0
"""Time for agents to end after a signal, on top of the workers' grace: they need 4 s to find the store silent."""
CLAIM_SECONDS = 5.0
LAUNCH_NEWS_SECONDS = 30.0
NOTICE_SLACK = 5.0
"""Time for the nodes to close the run after the workers' time to save."""


class SupervisorFailedError(HpcElasticError):
    template = "the supervisor itself failed: {error} ({where})"


class Supervisor(Struct, eq=False, kw_only=True):
    attempt: AttemptInfo
    launcher: Launcher
    coordination: Coordination
    signals: SignalQueue
    events: EventLog
    clock: Clock
    shutdown_timeout: float
    flush_seconds: float = 0.0
    """How long agents may still copy checkpoints after that."""
    resolver: SignalResolver
    end_claim: EndClaim
    job_watch: JobWatch | None = None
    on_record: Callable[[RoundRecord], object] = lambda record: None
    """Gets each newer record, and must not wait."""
    record: RoundRecord | None = None
    superseded: bool = False
    """Another process finishes the attempt, or a later attempt has taken the run over."""
    failure: Exception | None = None
    _agents: Agents = UNSET  # type: ignore[assignment]
    _started_at: float = 0.0
    _has_logged_waiting: bool = False
    _agents_heard: str = ""
    """The agents' newest signal in the log; each is handled once."""
    _notice: RunNotice | None = None
    _job_ends: float = 0.0
    _notice_ends: float = 0.0
    """When this process closes the run after a notice, if the nodes have not."""
    _notice_means: str = ""
    _signal: signal.Signals | None = None
    _signal_reason: str = ""
    _requeued: bool = False
    _cancelled: bool = False
    _asked: tuple[Outcome, str] | None = None
    _asked_to_close_at: float | None = None
    _is_store_silent: bool = False
    _closed_at: float | None = None
    _is_end_settled: bool = False
    """The process that finishes the attempt is known (`rendezvous.succession`)."""
    _end_by: float | None = None
    _last_grace: float = LAST_GRACE
    _orphaned_since: float | None = None
    _has_closed_for_orphans: bool = False

    def __post_init__(self) -> None:
        ask, names = self.coordination.ask, self.attempt.nodes
        self._agents = Agents(self.launcher, names, ask=ask, events=self.events, clock=self.clock)
        self._started_at = self.clock.monotonic()

    def run(self) -> AttemptResult:
        self.coordination.start()
        self._agents.launch()
        while True:
            self._wait()
            self._handle_signals()
            self._handle_messages()
            self._agents.step()
            self._look_at_job()
            self._end_notice()
            self.end_claim.step()
            self._log_if_waiting()
            self._signal_if_store_silent()
            if self._is_over():
                break
        self.launcher.end(within=self._last_grace)
        self.coordination.stop(within=1.0 if self._is_store_silent else 5.0)
        self._handle_messages()
        if (refusal := self.coordination.lasting_refusal()) is not None:
            self.events.write(refusal)
        return self.result()

    def _wait(self) -> None:
        job = [self.job_watch] if self.job_watch is not None and self._compares_nodes else []
        fds = self.launcher.filenos()
        seconds = seconds_until([self.due()], self.clock)
        wait_readable([self.signals, self.coordination, self.end_claim, *job, *fds], seconds)

    def due(self) -> float | None:
        """Monotonic; None: never. The turn of the loop after that moment does it, and it is due no more."""
        found = [self._agents.due(), self.end_claim.due, self._close_unheard_at]
        if not self._has_logged_waiting:
            found.append(self._started_at + LAUNCH_NEWS_SECONDS)
        if not self._is_ending():
            found.append(self._notice_ends if self._notice is not None else self.resolver.due)
        if self.job_watch is not None and self._compares_nodes:
            found.append(self.job_watch.due)
        if self._end_settled_by is not None:
            found.append(self._end_settled_by)
        elif self._agents.running():
            found.append(self._end_by)
        elif self._orphaned_since is not None:
            found.append(self._orphaned_since + self._orphans_wait)
        return min((at for at in found if at is not None), default=None)

    # -- signals, and what Slurm knows of the job --------------------------------------------------------------------

    def _handle_signals(self) -> None:
        for number in self.signals.take():
            if number is signal.SIGCHLD:
                continue
            sender = self.signals.sender(number)
            self.events.write(SignalReceived(signal=number.name, sender=sender))
            if number is signal.SIGINT and self._signal is not None:
                before = "second Ctrl-C" if self._signal is signal.SIGINT else f"Ctrl-C after {self._signal.name}"
                logger.warning("%s: killing everything now", before)
                self._end_by, self._last_grace = self.clock.monotonic(), AT_ONCE
            else:
                self._resolve_signal(number, HeardBy.BATCH, self.attempt.batch_host, sender)

    def _resolve_signal(self, number: signal.Signals, heard_by: HeardBy, host: str, sender: str) -> None:
        if self._signal is not None or (number is signal.SIGUSR2 and self._is_ending()):
            return
        reason = f"{number.name} on {host}"
        left = None if self._is_ending() or self._notice is None else self._job_ends - self.clock.monotonic()
        if sender:
            logger.info("%s %s", reason, sender)
        decision = self.resolver.hear(number, heard_by, reason=f"{reason} {sender}".rstrip(), ends_in=left)
        if decision is None:
            return
        if heard_by is HeardBy.BATCH and self._closed_at is not None and not self._is_end_settled:
            self.end_claim.claim()
        if self._is_ending():
            # The attempt has ended by itself, or after a notice: what is left to know is whether it may come back.
            self._signal, self._signal_reason = number, reason
            self._requeued = self._requeued or decision.requeued
            self._cancelled = decision.meaning is Meaning.CANCEL
        elif decision.saves:
            self._give_notice(reason, decision)
        else:
            if number is signal.SIGINT:
                logger.info("Ctrl-C: ending the workers (again to kill them at once)")
            if decision.meaning is not Meaning.CANCEL:
                reason = f"{reason} ({decision.text})"
            self._signal, self._signal_reason, self._requeued = number, reason, decision.requeued
            self._close(decision.outcome, reason)

    def _look_at_job(self) -> None:
        if self._notice is None and not self._is_ending():
            decision = self.resolver.look()
            if decision is not None:
                self._give_notice("seen by the supervisor", decision)
        if self.job_watch is not None and self._compares_nodes and (record := self.record) is not None:
            names = self.attempt.nodes
            used = [names[member.node] for member in record.members] if record.status is Status.FINAL else None
            self.job_watch.look(used=used, lost=[names[node] for node in record.lost])

    @property
    def _compares_nodes(self) -> bool:
        return self.record is not None and not self._is_ending()

    def _give_notice(self, reason: str, decision: SignalDecision) -> None:
        left, now, self._notice_means = decision.seconds, self.clock.monotonic(), decision.meaning.value
        seconds = seconds_to_save(left, shutdown_timeout=self.shutdown_timeout)
        self._notice = notice = RunNotice(f"{reason} ({self._notice_means})", seconds, left=left)
        self._job_ends, self._notice_ends = now + left, now + seconds + NOTICE_SLACK
        in_time = f"notice: {notice.reason}, the job ends in {left:.0f} s"
        if self.record is None:
            logger.info("%s; no round has begun: ending the attempt", in_time)
            self._close(Outcome.PREEMPTED, f"notice {notice.reason}; no worker was running")
            return
        logger.info("%s; the workers have %.0f s to save", in_time, notice.seconds)
        self.coordination.ask(lambda participant: participant.to_all.give_notice(notice))

    def _end_notice(self) -> None:
        if self._notice is None or self._is_ending() or self.clock.monotonic() < self._notice_ends:
            return
        logger.warning("the notice period is over, and the nodes have not ended the run")
        self._close(Outcome.PREEMPTED, f"notice {self._notice.reason}; the nodes did not answer in time")

    # -- the log -----------------------------------------------------------------------------------------------------

    def _handle_messages(self) -> None:
        for message in self.coordination.take():
            if isinstance(message, RoundRecord):
                self._take_in(message)
            elif isinstance(message, RunEvent):
                self._on_event(message)
            else:
                self.failure = message
                logger.error("the store can't be read any more: %s", message)
                self._begin_end()
                if isinstance(message, StoreWipedError):
                    self.launcher.terminate()

    def _on_event(self, event: RunEvent) -> None:
        match event:
            case Refreshed():
                self._agents.on_looked_anew(event.serial, event.announced)
            case EndClaimed():
                self._settle_end(superseded=False)
            case FilesystemRefused() | Note(subject="health_warning"):
                self.events.write(event)
            case EndTakenOver():
                self._settle_end(superseded=True)
                self._end_by = self.clock.monotonic()
            case AgentsDeparted():
                # srun may never return (a lost node, a dead slurmstepd): it gets a moment, and is ended.
                self._end_by = self.clock.monotonic() + DEPARTED_SECONDS

    def _take_in(self, record: RoundRecord) -> None:
        self.record = record
        self._agents.on_record(record)
        self.on_record(record)
        if record.status is Status.CLOSED:
            self._begin_end()
            if self._closed_at is not None:
                return
            self._closed_at = self.clock.monotonic()
            if record.outcome is Outcome.SUPERSEDED:
                logger.error("%s: this attempt ends", record.reason)
                self._settle_end(superseded=True)
            elif self._signal is not None:  # Slurm reaches this node, and its SIGKILL is near
                self.end_claim.claim()
            else:
                self.end_claim.begin()
        elif record.heard != self._agents_heard and not self._is_ending():
            self._agents_heard = record.heard
            name, _, where = record.heard.partition(" on ")
            host, origin, sender = where.partition(" from ")
            # One of another version counts as the end: no signal is taken lightly.
            number = signal.Signals.__members__.get(name, signal.SIGTERM)
            self._resolve_signal(number, HeardBy.AGENTS, host, f"{origin}{sender}".strip())

    def _settle_end(self, *, superseded: bool) -> None:
        self._is_end_settled = True
        self.superseded = self.superseded or superseded
        self.end_claim.stop()

    def _log_if_waiting(self) -> None:
        if self._has_logged_waiting or self.clock.monotonic() - self._started_at < LAUNCH_NEWS_SECONDS:
            return
        self._has_logged_waiting = True
        if self.record is None or (self.record.round == 0 and self.record.status is Status.JOINABLE):
            logger.warning(
                "%d nodes were launched, and have not joined after %.0f s; see events/ in the attempt's directory",
                len(self.attempt.nodes),
                LAUNCH_NEWS_SECONDS,
            )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _close(self, outcome: Outcome, reason: str) -> None:
        self._asked = self._asked or (outcome, reason)
        self.coordination.ask(lambda participant: participant.to_all.close(outcome, reason))
        if self._asked_to_close_at is None:
            self._asked_to_close_at = self.clock.monotonic()
        self._begin_end()

    def _begin_end(self) -> None:
        self._agents.stop_relaunching()
        if self._end_by is None:
            self._end_by = self.clock.monotonic() + self.shutdown_timeout + self.flush_seconds + END_RESERVE

    def _is_ending(self) -> bool:
        return self._end_by is not None

    def _is_closed(self) -> bool:
        return self.record is not None and self.record.status is Status.CLOSED

    @property
    def _close_unheard_at(self) -> float | None:
        asked_at = self._asked_to_close_at
        if asked_at is None or self._is_closed() or self._is_store_silent or self.failure is not None:
            return None
        return asked_at + (SILENT_SECONDS if self.record is not None else UNMET_SECONDS)

    def _signal_if_store_silent(self) -> None:
        unheard_at = self._close_unheard_at
        if unheard_at is None or self.clock.monotonic() < unheard_at:
            return
        self._is_store_silent = True
        if self.record is not None:
            logger.error(
                "the filesystem of the run directory does not answer: ending the agents by signal "
                "(their workers: SIGTERM, SIGKILL after %g s)",
                self.shutdown_timeout,
            )
        else:
            logger.info(
                "no node has joined yet, or the filesystem of the run directory does not answer: ending the agents"
            )
        self.launcher.terminate()
        if self._end_by is not None:
            self._end_by = min(self._end_by, self.clock.monotonic() + self.shutdown_timeout + SILENT_RESERVE)

    @property
    def _end_settled_by(self) -> float | None:
        if self._closed_at is None or self._is_end_settled or self.failure is not None or self._last_grace == AT_ONCE:
            return None
        return self._closed_at + END_UNCONFIRMED + CLAIM_SECONDS

    def _is_over(self) -> bool:
        now = self.clock.monotonic()
        if self._end_settled_by is not None and now < self._end_settled_by:
            return False
        if self._agents.running():
            self._orphaned_since = None
            return self._end_by is not None and now >= self._end_by
        if self._is_closed() or self.failure is not None or self._is_store_silent:
            return True
        # No agent is left, and none has said how it ended: the record may still be on its way.
        if self._orphaned_since is None:
            self._orphaned_since, self._has_closed_for_orphans = now, False
        if now < self._orphaned_since + self._orphans_wait:
            return False
        refused = self._agents.unable.are_refusals and self.record is not None
        if self._has_closed_for_orphans or (self._agents.are_all_unfit and not refused):
            return True
        reason = str(self._agents.unable) if refused else "all agents ended without a verdict"
        self.coordination.ask(lambda p: p.to_all.close(Outcome.FAILED, reason))
        self._has_closed_for_orphans = True
        return False

    @property
    def _orphans_wait(self) -> float:
        wiped = WIPED_SECONDS if self._agents.has_lost_store else 0.0
        if self._agents.are_all_unfit:  # no agent is left that could have said something
            return max(wiped, UNFIT_SECONDS)
        return max(wiped, ORPHANED_SECONDS) + (CLOSE_SECONDS if self._has_closed_for_orphans else 0.0)

    def fail(self, error: Exception, *, keep: Callable[[], None]) -> None:
        """An uncaught exception would end the batch script and the job: no verdict, no report, no requeue."""
        self.failure = failure = SupervisorFailedError(error=describe_error(error), where=where_raised(error))
        logger.error("%s; ending the workers", failure, exc_info=error)
        host, nodes = self.attempt.batch_host, self.attempt.nodes
        node = nodes.index(host) if host in nodes else 0
        index = self.record.round if self.record is not None else 0
        steps: list[Callable[[], object]] = [
            lambda: self.events.write(PlatformFailure(round=index, node=node, host=host, reason=str(failure))),
            lambda: self.coordination.ask(lambda participant: participant.to_all.close(Outcome.FAILED, str(failure))),
            keep,
            lambda: self.launcher.end(within=self.shutdown_timeout + END_RESERVE),
            lambda: self.coordination.stop(within=5.0),
        ]
        for step in steps:
            try:
                step()
            except Exception as problem:  # it may fail for the same reason; the next one may not
                logger.error("after that: %s", problem)

    def result(self) -> AttemptResult:
        reason, failed = (result := self._result()).reason, sorted(self.launcher.unlaunched.items())
        if self._requeued and failed:
            # Slurm requeues a job by itself where a prolog fails on one of its nodes.
            reason = "; ".join([reason, *(f"{self.attempt.nodes[node]}: {why}" for node, why in failed)])
        return replace(
            result,
            reason=reason,
            seconds=self.clock.monotonic() - self._started_at,
            requeued=self._requeued,
            cancelled=self._cancelled,
            notice=self._notice_means,
        )

    def _result(self) -> AttemptResult:
        record, agents = self.record, self._agents
        number = int(self._signal) if self._signal is not None else None
        if record is not None and record.status is Status.CLOSED and record.outcome is not None:
            if record.outcome is not Outcome.CANCELLED and record.reason != self._signal_reason:
                number = None  # it came later, or after a notice: something else has ended the attempt
            result = closed_result(record, record.outcome, signal_number=number)
            if result.outcome is Outcome.TOO_FEW_NODES and (unable := str(agents.unable)):
                retryable = result.retryable and not agents.unable.is_same_everywhere
                result = replace(result, reason=f"{result.reason}; {unable}", retryable=retryable)
            if agents.unable.are_refusals:
                result = replace(result, outcome=Outcome.FAILED, reason=str(agents.unable), retryable=False)
            return result
        if self._asked is not None:
            outcome, reason = self._asked
        elif self._signal is not None:
            outcome, reason = Outcome.CANCELLED, self._signal.name
        elif self.failure is not None:
            outcome, reason = Outcome.FAILED, str(self.failure)
        elif agents.none_is_left:
            outcome = Outcome.FAILED if agents.unable.are_refusals else Outcome.TOO_FEW_NODES
            reason = agents.why_none_is_left(self.coordination.refusal)
        else:
            outcome, reason = Outcome.FAILED, "all agents ended without a verdict"
        return AttemptResult(
            outcome=outcome, reason=reason, retryable=not agents.unable.is_same_everywhere, signal_number=number
        )
