"""One attempt, seen from the batch host: start the agents, keep one on every node, wait for the verdict, leave nothing.

The supervisor decides nothing about rounds. It takes part in the rendezvous as an observer: it reads the log, is
notified like the agents, and can close the run (Ctrl-C, a notice, or when no agent is left to do so).
"""

from __future__ import annotations

import logging
import selectors
import signal
from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.outcome import REFUSED_CODE, STORE_LOST_CODE, UNHEALTHY_CODE, GivenUp, Outcome
from hpc_elastic.launch.agents import LostNodes, UnableNode, describe_unable_nodes, is_same_everywhere, is_usage_error
from hpc_elastic.launch.attempt_result import AttemptResult, closed_result
from hpc_elastic.launch.job_watch import EndClaim, JobWatch
from hpc_elastic.launch.signals import GivenNotice, HeardBy, Meaning, SignalDecision, SignalResolver
from hpc_elastic.launch.site import AgentEnded, Launcher
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.ending import END_UNCONFIRMED
from hpc_elastic.rendezvous.state import RoundRecord, Status, node_of
from hpc_elastic.run.attempt import AttemptInfo
from hpc_elastic.run.events import EventLog
from hpc_elastic.store.base import StoreWipedError
from hpc_elastic.workers.linux import SignalQueue

logger = logging.getLogger(__name__)

RELAUNCHES_PER_NODE = 3
FRUITLESS_RELAUNCHES = 1
"""The same where no agent has ever come of it. The second is in a step of its own: what it prints is the node's."""
MESSAGE_SECONDS = 1.0
"""Beyond `SETTLE_SECONDS`: how long the message that explains an end may take to come."""
SETTLE_SECONDS = 0.3
"""Between an agent's end and its restart: the news of the run's end may just be on its way."""
NEWS_SECONDS = 10.0
"""The same where the store does not answer whether the run has ended."""
ORPHANED_SECONDS = 5.0
"""With no agent left and no verdict: how long one is still waited for."""
CLOSE_SECONDS = 1.0
"""How long after that the log may take to say that the run is closed, which this process has done itself then."""
UNFIT_SECONDS = 0.5
"""The same where every node was found unfit: most often there is none."""
END_RESERVE = 15.0
"""Beyond the workers' grace: how long agents may take to end after the verdict."""
DEPARTED_SECONDS = 1.0
"""After every agent has said goodbye: how long the launcher may take to notice."""
LAST_GRACE = 2.0
"""For agents that have not ended by then."""
AT_ONCE = 0.3
"""For a SIGTERM to get through before the SIGKILL, where everything is to end at once."""
SILENT_SECONDS = 3.0
"""After the end of the run was asked for: how long the store may take to have it."""
UNMET_SECONDS = 0.5
"""The same where no node has joined yet (its health is still looked at, say): there is no log to write it into."""
SILENT_RESERVE = 9.0
"""Where it does not take it: how long agents may take to end beyond the workers' grace: the first 4 s go by until
they know that nobody answers."""
CLAIM_SECONDS = 5.0
"""How long the store may take to have the claim on the attempt's end."""
WIPED_SECONDS = 20.0
"""How long this process may take to see as well that the store was wiped, after the last agent that did."""
LAUNCH_NEWS_SECONDS = 30.0


class _Relaunch(Struct, frozen=True, kw_only=True):
    """An agent that is to be started again, unless the run has ended."""

    at: float
    look: int
    """The look at the log that has to come first: the agent may have ended because the run has."""
    ended: AgentEnded
    has_waited: bool = False
    """For the message that explains the end."""


class Supervisor:
    """Watches over one attempt. `run` is its whole life."""

    def __init__(
        self,
        *,
        attempt: AttemptInfo,
        launcher: Launcher,
        coordination: Coordination,
        signals: SignalQueue,
        events: EventLog,
        clock: Clock,
        shutdown_timeout: float,
        resolver: SignalResolver,
        end_claim: EndClaim,
        job_watch: JobWatch | None = None,
    ) -> None:
        """Args:
        attempt: The attempt's facts.
        launcher: Starts the agents.
        coordination: With an observer's participant; not started yet.
        signals: This process's.
        events: The supervisor's log.
        clock: For deadlines.
        shutdown_timeout: The workers' grace, in seconds.
        resolver: Finds out what signals mean.
        end_claim: To finish the attempt once it is closed.
        job_watch: Looks at the job now and then; None: there is none.
        """
        self._job_watch = job_watch
        self._attempt = attempt
        self._launcher = launcher
        self._coordination = coordination
        self._signals = signals
        self._events = events
        self._clock = clock
        self._shutdown_timeout = shutdown_timeout
        self._resolver = resolver
        self._end_claim = end_claim
        self._notice: GivenNotice | None = None
        """The one that leaves the least time so far."""
        self.record: RoundRecord | None = None
        self.superseded = False
        """Another process finishes the attempt, or a later attempt has taken the run over."""
        self._closed_at: float | None = None
        """When the log was seen to be closed."""
        self._is_end_settled = False
        """Whether it is known which process finishes the closed attempt (`rendezvous.ending`)."""
        self._relaunches: dict[int, int] = {}
        self._due: dict[int, _Relaunch] = {}
        self._looks_asked = 0
        self._looks_done = 0
        self._given_up: set[int] = set()
        self._lost = LostNodes()
        self._have_trained: set[int] = set()
        """Nodes that have been members: one that never came may just be slow to start."""
        self._announced: frozenset[str] = frozenset()
        """Uids of all agents that have ever said in the store that they are there."""
        self._announcements: Counter[int] = Counter()
        """Node → how many of them were its own."""
        self._announced_by_end: dict[int, int] = {}
        """The same by the time at which the node's last end was dealt with."""
        self._unable: dict[int, UnableNode] = {}
        """Nodes that were given up because what was started there never became an agent."""
        self._unhealthy: set[int] = set()
        """Nodes whose agent found them unfit."""
        self._without_files: set[int] = set()
        """Nodes whose agent was refused by the filesystem for too long."""
        self._agents_heard = ""
        """What the log has told of that: each word is looked into once."""
        self._signal: signal.Signals | None = None
        self._signal_reason = ""
        self._asked: tuple[Outcome, str] | None = None
        """How this process asked for the end."""
        self._requeued = self._cancelled = False
        self._end_by: float | None = None
        self._last_grace = LAST_GRACE
        self._orphaned_since: float | None = None
        self._has_closed_for_orphans = False
        self.failure: Exception | None = None
        """Why it can't go on: the store can't be read any more, or something was raised."""
        self._started_at = clock.monotonic()
        self._told_waiting = False
        self._asked_to_close_at: float | None = None
        self._has_lost_store = False
        """Whether an agent has ended because the store was wiped: this process will see so too, if it was for all."""
        self._is_store_silent = False
        """Whether the end could not be written where the agents would read it."""

    def run(self) -> AttemptResult:
        """Launch, watch, and return when no agent is left."""
        self._coordination.start()
        self._launcher.launch()
        self._events.write("agents_launched", nodes=len(self._attempt.nodes))
        while True:
            self._wait()
            self._handle_signals()
            self._handle_notices()
            for ended in self._launcher.take():
                self._handle_ended(ended)
            self._relaunch_due()
            self._look_at_job()
            self._compare_nodes()
            self._try_lost_nodes()
            self._end_notice()
            self._log_if_waiting()
            self._signal_if_store_silent()
            if self._is_over():
                break
        self._launcher.end(within=self._last_grace)
        self._coordination.stop(within=1.0 if self._is_store_silent else 5.0)
        self._handle_notices()
        if (refusal := self._coordination.lasting_refusal()) is not None:
            self._events.write(refusal[0], **refusal[1])
        return self.result()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in (self._signals.fileno(), self._coordination.fileno(), *self._launcher.filenos()):
                selector.register(fd, selectors.EVENT_READ)
            due = self.due()
            selector.select(None if due is None else max(0.0, due - self._clock.monotonic()))

    def due(self) -> float | None:
        """When there is something to do though nothing has come in, on the monotonic clock; None: never.

        Whatever is said here is done by the turn of the loop after that moment, and said no more.
        """
        found = [self._launcher.due(), self._close_unheard_at]
        found += [self._relaunch_at(due) for due in self._due.values()]
        if not self._told_waiting:
            found.append(self._started_at + LAUNCH_NEWS_SECONDS)
        if not self._is_ending():
            found.append(self._notice.closed_by if self._notice is not None else self._resolver.due)
            found.append(self._lost.next_at())
        found.append(self._job_watch.due if self._job_watch is not None else None)
        if self._end_settled_by is not None:
            found.append(self._end_settled_by)
        elif self._launcher.running() or self._due:
            found.append(self._end_by)
        elif self._orphaned_since is not None:
            found.append(self._orphaned_since + self._orphans_wait)
        return min((at for at in found if at is not None), default=None)

    # -- what comes in -------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            if number is signal.SIGCHLD:
                continue
            self._events.write("notice", signal=number.name)
            if number is signal.SIGINT and self._signal is not None:
                before = "second Ctrl-C" if self._signal is signal.SIGINT else f"Ctrl-C after {self._signal.name}"
                logger.warning("%s: killing everything now", before)
                self._end_by, self._last_grace = self._clock.monotonic(), AT_ONCE
            else:
                self._hear(number, HeardBy.BATCH, self._attempt.batch_host)

    def _hear(self, number: signal.Signals, heard_by: HeardBy, host: str) -> None:
        """A signal informs; after a notice it tells something new only where the job ends now, or sooner."""
        if self._signal is not None or (number is signal.SIGUSR2 and self._is_ending()):
            return
        reason = f"{number.name} on {host}"
        notice = None if self._is_ending() else self._notice
        left = None if notice is None else notice.job_ends - self._clock.monotonic()
        decision = self._resolver.hear(number, heard_by, reason=reason, ends_in=left)
        if decision is None:
            return
        if heard_by is HeardBy.BATCH and self._closed_at is not None and not self._is_end_settled:
            self._end_claim.claim()
        if self._is_ending():
            # The attempt has ended by itself, or after a notice: what is left to know is whether it may come back.
            self._signal, self._signal_reason = number, reason
            self._requeued = self._requeued or decision.requeued
            self._cancelled = decision.meaning is Meaning.CANCEL
        elif decision.saves:
            self._give_notice(reason, decision)
        else:
            self._signal = number
            self._signal_reason = (
                reason if decision.meaning is Meaning.CANCEL else f"{reason} ({decision.meaning.value})"
            )
            self._requeued = decision.requeued
            if number is signal.SIGINT:
                logger.info("Ctrl-C: ending the workers (again to kill them at once)")
            self._close(decision.outcome, self._signal_reason)

    def _look_at_job(self) -> None:
        """Nobody may have given the notice: it came before this process could hear, or was never asked for."""
        if self._notice is not None or self._is_ending():
            return
        decision = self._resolver.look()
        if decision is not None:
            self._give_notice("seen by the supervisor", decision)

    def _compare_nodes(self) -> None:
        """Log where Slurm has another view of which nodes are in the job."""
        if self._job_watch is None or self.record is None or self._is_ending():
            return
        names, record = self._attempt.nodes, self.record
        used = [names[member.node] for member in record.members] if record.status is Status.FINAL else None
        self._job_watch.look(used=used, lost=[names[node] for node in record.lost])

    def _give_notice(self, reason: str, decision: SignalDecision) -> None:
        """The workers may save first."""
        reason, now = f"{reason} ({decision.meaning.value})", self._clock.monotonic()
        given = GivenNotice.now(reason, decision.seconds, shutdown_timeout=self._shutdown_timeout, now=now)
        self._notice, notice = given, given.notice
        in_time = f"notice: {notice.reason}, the job ends in {decision.seconds:.0f} s"
        if self.record is None:
            logger.info("%s; no round has begun: ending the attempt", in_time)
            self._close(Outcome.PREEMPTED, f"notice {notice.reason}; no worker was running")
            return
        logger.info("%s; the workers have %.0f s to save", in_time, notice.seconds)
        self._coordination.ask(lambda participant: participant.give_notice(notice))

    def _end_notice(self) -> None:
        """Nobody has closed the run in time: the files may not answer, or the agents."""
        if self._notice is None or self._is_ending() or self._clock.monotonic() < self._notice.closed_by:
            return
        logger.warning("the notice's time is over, and the nodes have not ended the run")
        self._close(Outcome.PREEMPTED, "notice; the nodes did not answer in time")

    def _close(self, outcome: Outcome, reason: str) -> None:
        self._asked = self._asked or (outcome, reason)
        self._coordination.ask(lambda participant: participant.close(outcome, reason))
        if self._asked_to_close_at is None:
            self._asked_to_close_at = self._clock.monotonic()
        self._set_end()

    def _set_end(self) -> None:
        if self._end_by is None:
            self._end_by = self._clock.monotonic() + self._shutdown_timeout + END_RESERVE

    def _handle_notices(self) -> None:
        for notice in self._coordination.take():
            if isinstance(notice, RoundRecord):
                self.record = notice
                self._see_lost(notice)
                if notice.status is Status.CLOSED:
                    self._see_closed(notice)
                elif notice.heard != self._agents_heard and not self._is_ending():
                    self._agents_heard = notice.heard
                    self._hear_of_agents(notice.heard)
            elif isinstance(notice, tuple):
                if notice[0] == "looked_anew":
                    self._looks_done = notice[1]["serial"]
                    self._take_announced(notice[1]["announced"])
                elif notice[0] == "end_claimed":
                    self._settle_end(superseded=False)
                elif notice[0] == "filesystem_refused":
                    self._events.write(notice[0], **notice[1])
                elif notice[0] == "end_taken_over":
                    self._settle_end(superseded=True)
                    self._end_by = self._clock.monotonic()
                elif notice[0] == "agents_departed":
                    # srun may never return (a lost node, a dead slurmstepd): it gets a moment, and is ended.
                    self._end_by = self._clock.monotonic() + DEPARTED_SECONDS
            else:
                self.failure = notice
                logger.error("the store can't be read any more: %s", notice)
                self._set_end()
                if isinstance(notice, StoreWipedError):
                    self._launcher.terminate()

    def _see_closed(self, record: RoundRecord) -> None:
        self._set_end()
        if self._closed_at is not None:
            return
        self._closed_at = self._clock.monotonic()
        if record.outcome is Outcome.SUPERSEDED:
            logger.error("%s: this attempt ends", record.reason)
            self._settle_end(superseded=True)
        elif self._signal is not None:  # Slurm reaches this node, and its SIGKILL is near
            self._end_claim.claim()
        else:
            self._end_claim.start()

    def _settle_end(self, *, superseded: bool) -> None:
        """It is known which process finishes the attempt."""
        self._is_end_settled = True
        self.superseded = self.superseded or superseded
        self._end_claim.stop()

    @property
    def _end_settled_by(self) -> float | None:
        """When the question which process finishes the attempt is given up; None while it is not open."""
        is_open = self._closed_at is not None and not self._is_end_settled
        if not is_open or self.failure is not None or self._last_grace == AT_ONCE:
            return None
        assert self._closed_at is not None
        return self._closed_at + END_UNCONFIRMED + CLAIM_SECONDS

    def _hear_of_agents(self, heard: str) -> None:
        name, _, host = heard.partition(" on ")
        try:
            number = signal.Signals[name]
        except KeyError:
            number = signal.SIGTERM  # of another version: nothing that is heard is made little of
        self._hear(number, HeardBy.AGENTS, host)

    def _see_lost(self, record: RoundRecord) -> None:
        self._have_trained |= {member.node for member in record.members}
        if not self._launcher.hears_all_ends:
            lost = self._have_trained.intersection(record.lost) - self._given_up - set(self._due)
            self._lost.see(lost, now=self._clock.monotonic())

    def _try_lost_nodes(self) -> None:
        """Slurm has not given them up: whoever has rebooted has nobody else to start an agent."""
        for node in [] if self._is_ending() else self._lost.due(self._clock.monotonic()):
            name = self._attempt.nodes[node]
            logger.info("%s is lost to the run, not to Slurm: starting an agent there, should it be back", name)
            self._events.write("agent_relaunched", node=node, name=name, reason="the node is lost, and may be back")
            self._launcher.relaunch(node)

    def _is_still_lost(self, ended: AgentEnded) -> bool:
        """Whether that only says that a lost node is not back yet, or not with all its mounts."""
        if ended.gone or self._is_ending() or not self._lost.is_on_trial(ended.node):
            return False
        pause = self._lost.failed(ended.node, now=self._clock.monotonic())
        if pause is not None:
            logger.info("%s is not back (%s); again in %g s", self._attempt.nodes[ended.node], ended.detail, pause)
        return pause is not None

    def _handle_ended(self, ended: AgentEnded) -> None:
        if not ended.started and self._is_still_lost(ended):
            return
        name = self._attempt.nodes[ended.node]
        self._events.write(
            "agent_ended", node=ended.node, name=name, code=ended.code, detail=ended.detail, started=ended.started
        )
        if self._is_ending():
            return
        if not ended.started:
            logger.warning("no agent on %s: %s", name, ended.detail)
            self._give_up(ended.node, GivenUp.NOT_STARTED, ended.detail)
        elif ended.code == UNHEALTHY_CODE:
            logger.warning("%s has left the run: it failed a health check", name)
            self._unhealthy.add(ended.node)
            self._give_up(ended.node, GivenUp.UNHEALTHY, "it failed a health check")
        elif ended.code == REFUSED_CODE:
            reason = "the filesystem of the run directory refuses it, or does not answer"
            logger.error("%s has left the run: %s", name, reason)
            self._without_files.add(ended.node)
            self._give_up(ended.node, GivenUp.REFUSED, reason)
        elif ended.code == STORE_LOST_CODE:
            logger.error("the agent on %s has lost the run's store", name)
            self._has_lost_store = True
            self._coordination.ask(lambda participant: participant.doubt_store())
            # Never with a new one: it would take an empty folder for a run that begins.
            self._give_up(ended.node, GivenUp.STORE_LOST, "its agent has lost the run's store")
        else:
            look = self._looks_asked = self._looks_asked + 1
            self._due[ended.node] = _Relaunch(at=self._clock.monotonic() + SETTLE_SECONDS, look=look, ended=ended)
            self._coordination.ask(lambda participant: participant.look_anew(look))

    def _relaunch_due(self) -> None:
        now = self._clock.monotonic()
        for node, due in list(self._due.items()):
            if self._is_ending():
                self._due.clear()
                return
            if now < self._relaunch_at(due):
                continue
            message = self._launcher.last_message(node)
            if not (message or due.has_waited or self._has_come(due)):
                self._due[node] = replace(due, at=now + MESSAGE_SECONDS, has_waited=True)
                continue
            del self._due[node]
            self._relaunch_or_give_up(due, message)

    def _relaunch_or_give_up(self, due: _Relaunch, message: str) -> None:
        node, ended = due.ended.node, due.ended
        name, used = self._attempt.nodes[node], self._relaunches.get(node, 0)
        is_fruitless, announced = not self._has_come(due), self._announcements[node]
        self._announced_by_end[node] = announced
        if is_fruitless and self._is_still_lost(ended):
            return
        unable = UnableNode(name=name, code=ended.code, detail=ended.detail, message=message if is_fruitless else "")
        never_came = is_fruitless and announced == 0
        most = FRUITLESS_RELAUNCHES if never_came else RELAUNCHES_PER_NODE
        if used >= most or is_usage_error(ended.code) or (never_came and self._fails_everywhere()):
            starts = f"{used + 1} start{'s' if used else ''}"
            logger.error("the agent on %s ended (%s); giving the node up after %s", name, unable.reason, starts)
            if never_came:
                self._unable[node] = unable
            self._give_up(node, GivenUp.COULD_NOT_RUN if never_came else GivenUp.DIED, unable.reason)
            return
        self._relaunches[node] = used + 1
        logger.warning("the agent on %s ended (%s); starting it again", name, unable.reason)
        self._events.write("agent_relaunched", node=node, name=name, reason=f"it ended: {unable.reason}")
        self._launcher.relaunch(node)

    def _take_announced(self, uids: frozenset[str]) -> None:
        self._announcements.update(node_of(uid) for uid in uids - self._announced)
        self._announced |= uids

    def _has_come(self, due: _Relaunch) -> bool:
        """Whether what has ended was an agent that took part; also where the store does not say."""
        node = due.ended.node
        return due.look > self._looks_done or self._announcements[node] > self._announced_by_end.get(node, 0)

    def _fails_everywhere(self) -> bool:
        """Whether what was started on most nodes never became an agent: it is not the nodes, and no start helps."""
        failing = 1 + len(self._unable) + sum(1 for due in self._due.values() if not self._has_come(due))
        return failing > 1 and 2 * failing > len(self._attempt.nodes)

    def _relaunch_at(self, due: _Relaunch) -> float:
        return due.at + (NEWS_SECONDS if due.look > self._looks_done else 0.0)

    def _give_up(self, node: int, cause: GivenUp, reason: str) -> None:
        """No further agent is started there, and the others need not wait for one."""
        name = self._attempt.nodes[node]
        self._events.write("node_given_up", node=node, name=name, cause=cause.value, reason=reason)
        self._given_up.add(node)
        self._lost.forget(node)
        self._coordination.ask(lambda participant: participant.give_up_node(node))

    def _log_if_waiting(self) -> None:
        """Say who is missing after half a minute, not after ten."""
        if self._told_waiting or self._clock.monotonic() - self._started_at < LAUNCH_NEWS_SECONDS:
            return
        self._told_waiting = True
        if self.record is None or (self.record.round == 0 and self.record.status is Status.JOINABLE):
            logger.warning(
                "%d nodes were launched, and they have not met after %.0f s; see events/ in the attempt's directory",
                len(self._attempt.nodes),
                LAUNCH_NEWS_SECONDS,
            )

    def _signal_if_store_silent(self) -> None:
        """The agents read in the store that the run ends. Where it does not answer, a signal has to tell them."""
        unheard_at = self._close_unheard_at
        if unheard_at is None or self._clock.monotonic() < unheard_at:
            return
        have_met = self.record is not None
        self._is_store_silent = True
        if have_met:
            logger.error(
                "the filesystem of the run directory does not answer: ending the agents by signal "
                "(their workers: SIGTERM, SIGKILL after %g s)",
                self._shutdown_timeout,
            )
        else:
            logger.info(
                "the nodes have not met yet, or the filesystem of the run directory does not answer: ending the agents"
            )
        self._launcher.terminate()
        if self._end_by is not None:
            self._end_by = min(self._end_by, self._clock.monotonic() + self._shutdown_timeout + SILENT_RESERVE)

    @property
    def _close_unheard_at(self) -> float | None:
        """When the store has had enough time to take in that the run is to end; None: it has, or nobody asked."""
        asked_at = self._asked_to_close_at
        closed = self.record is not None and self.record.status is Status.CLOSED
        if asked_at is None or closed or self._is_store_silent or self.failure is not None:
            return None
        return asked_at + (SILENT_SECONDS if self.record is not None else UNMET_SECONDS)

    # -- the end -------------------------------------------------------------------------------------------------

    def _is_ending(self) -> bool:
        return self._end_by is not None

    def _is_over(self) -> bool:
        now = self._clock.monotonic()
        if self._end_settled_by is not None and now < self._end_settled_by:
            return False
        if self._launcher.running() or self._due:
            self._orphaned_since = None
            return self._end_by is not None and now >= self._end_by
        if self.record is not None and self.record.status is Status.CLOSED:
            return True
        if self.failure is not None or self._is_store_silent:
            return True
        # No agent is left, and nobody has said how it ended: the record may still be on its way.
        if self._orphaned_since is None:
            self._orphaned_since, self._has_closed_for_orphans = now, False
        if now < self._orphaned_since + self._orphans_wait:
            return False
        if self._has_closed_for_orphans or self._are_all_unfit:
            return True
        self._coordination.ask(lambda p: p.close(Outcome.FAILED, "all agents ended without a verdict"))
        self._has_closed_for_orphans = True
        return False

    @property
    def _orphans_wait(self) -> float:
        """Seconds from the last agent's end to what is done next where nobody says how it ended."""
        wiped = WIPED_SECONDS if self._has_lost_store else 0.0
        if self._are_all_unfit:  # no agent is left that could have said something
            return max(wiped, UNFIT_SECONDS)
        return max(wiped, ORPHANED_SECONDS) + (CLOSE_SECONDS if self._has_closed_for_orphans else 0.0)

    @property
    def _are_all_unfit(self) -> bool:
        """No node is left, and not one because its agent died: there is no verdict to wait for."""
        none_is_left = len(self._given_up) == len(self._attempt.nodes)
        unfit = bool(self._unhealthy | self._without_files)
        return none_is_left and (unfit or len(self._unable) == len(self._given_up))

    def _why_all_are_unfit(self) -> str:
        """Empty where they are not."""
        refusal, known = self._coordination.refusal, len(self._given_up)
        by_what = f": {refusal}" if refusal is not None else ""
        reasons = [f"{len(self._unhealthy)} of {known} failed a health check"] if self._unhealthy else []
        if self._without_files:
            reasons.append(
                f"the filesystem of the run directory refused {len(self._without_files)} of {known}, "
                f"or did not answer{by_what}"
            )
        return f"no node is left: {'; '.join(reasons)}" if reasons else ""

    @property
    def _is_same_everywhere(self) -> bool:
        return is_same_everywhere(self._unable.values(), nodes=len(self._attempt.nodes))

    @property
    def _describe_unable_nodes(self) -> str:
        return describe_unable_nodes(self._unable.values(), nodes=len(self._attempt.nodes))

    def result(self) -> AttemptResult:
        """How the attempt ended, as far as it is known."""
        record = self.record
        number = int(self._signal) if self._signal is not None else None
        if record is not None and record.status is Status.CLOSED and record.outcome is not None:
            if record.outcome is not Outcome.CANCELLED and record.reason != self._signal_reason:
                number = None  # it came later, or after a notice: something else has ended the attempt
            seconds = self._clock.monotonic() - self._started_at
            result = closed_result(record, record.outcome, signal_number=number, seconds=seconds)
            if result.outcome is Outcome.TOO_FEW_NODES and self._unable:
                retryable = result.retryable and not self._is_same_everywhere
                result = replace(result, reason=f"{result.reason}; {self._describe_unable_nodes}", retryable=retryable)
            return replace(result, requeued=self._requeued, cancelled=self._cancelled)
        if self._asked is not None:
            outcome, reason = self._asked
        elif self._signal is not None:
            outcome, reason = Outcome.CANCELLED, self._signal.name
        elif self.failure is not None:
            outcome, reason = Outcome.FAILED, str(self.failure)
        elif len(self._given_up) == len(self._attempt.nodes):
            outcome = Outcome.TOO_FEW_NODES
            reason = self._why_all_are_unfit() or self._describe_unable_nodes or "no agent could be started"
        else:
            outcome, reason = Outcome.FAILED, "all agents ended without a verdict"
        return AttemptResult(
            outcome=outcome,
            reason=reason,
            retryable=not self._is_same_everywhere,
            signal_number=number,
            fingerprint="",
            step=-1,
            seconds=self._clock.monotonic() - self._started_at,
            requeued=self._requeued,
            cancelled=self._cancelled,
        )
