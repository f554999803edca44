"""One attempt, put together from its events in any order of files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.failures.classify import signal_name, signal_of
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.report.clocks import OF_CLOCKS, SUPERVISOR, ClocksBuilder
from hpc_elastic.report.collect_round import EventCoverage, RoundBuilder
from hpc_elastic.report.history import (
    START_REFUSED,
    AgentTimes,
    AttemptHistory,
    CommandFailure,
    FailedAgent,
    NodeLoss,
    OutputLoss,
    RestartRecord,
    RoundHistory,
    RoundNode,
    attributed,
    read_incident,
    read_outage,
)
from hpc_elastic.run import agent_events as of_agent
from hpc_elastic.run import control_events
from hpc_elastic.run.event_reader import EVENTS, EventLine
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import REFUSED_CODE, UNHEALTHY_CODE, ExitCode, is_job_id

_OF_ATTEMPT = (control_events.RunClosed, control_events.NodeMissing, control_events.LinkLost)
"""Events that name a round, and are none of it."""
_OF_ROUND = frozenset(kind for kind in EVENTS.values() if "round" in kind.__struct_fields__) - {*_OF_ATTEMPT}
_MOST_WORDS = 300
_MOST_REASON = 400
_MOST_LINES = 20
_NEVER_JOINED_NS = 10 * 10**9
"""An attempt that ended sooner is no evidence against a node that was still to come."""
_seen_by_supervisor = partial(NodeLoss, observer=SUPERVISOR)


class AttemptBuilder(Struct):
    """Fed with events by `take`; error files and heartbeats are put into its `rounds`."""

    history: AttemptHistory
    """It is filled in: what needs nothing of other events, by `take`."""
    rounds: dict[int, RoundBuilder] = field(default_factory=dict)
    replaced_ends: list[FailedAgent] = field(default_factory=list)
    """Those after which another agent was started on the node: they were there, and took part."""
    own_reasons: dict[int, list[str]] = field(default_factory=dict)
    relaunched: list[tuple[int, str]] = field(default_factory=list)
    agents: dict[int, AgentTimes] = field(default_factory=dict)
    unstarted: dict[str, str] = field(default_factory=dict)
    given_up: dict[int, NodeLoss] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    not_committed: tuple[int, of_agent.CheckpointNotCommitted | None] = (0, None)
    """The last one, with its time."""
    missing: set[int] = field(default_factory=set)
    closed: control_events.RunClosed = field(default_factory=lambda: control_events.RunClosed(round=-1, outcome=""))
    coverage: EventCoverage = field(default_factory=EventCoverage)
    known: dict[int, RoundNode] = field(default_factory=dict)
    clocks: ClocksBuilder = field(default_factory=ClocksBuilder)
    bad_ends: dict[int, list[FailedAgent]] = field(default_factory=dict)
    cut_short: dict[int, list[int]] = field(default_factory=dict)
    """Node with bad ends → rounds of which it reported no end, though it was there again later."""
    has_result: bool = False
    is_supervised: bool = False

    def round(self, index: int) -> RoundBuilder:
        if index not in self.rounds:
            self.rounds[index] = RoundBuilder(RoundHistory(index=index), self.known)
        return self.rounds[index]

    def take(self, line: EventLine) -> None:
        event = line.event
        if line.role == "agent":
            self.coverage.take(line)
        elif line.role == "supervisor":
            self.is_supervised = True
        if event is None:
            return
        kind = type(event)
        index: int | None = getattr(event, "round", None) if kind in _OF_ROUND else None
        if index is not None:
            if index >= 0:
                (self.rounds.get(index) or self.round(index)).take(line, event)
            return
        if kind in OF_CLOCKS:
            self.clocks.take(line)
        if line.role in ("agent", "supervisor"):
            self._take(line, event)

    def _take(self, line: EventLine, event: RunEvent) -> None:
        """A supervisor's event has the node that it is about, an agent's its own."""
        node, when = line.node, line.written_ns
        match event:
            case control_events.RunClosed():
                self.closed = event
            case control_events.AttemptStarted():
                self.history.started_ns = when
                self.history.job_id = event.job_id if is_job_id(event.job_id) else self.history.job_id
                self.history.nodes = event.nodes or self.history.nodes
            case control_events.AgentProcessEnded():
                self._agent_ended(event, when)
            case control_events.AgentRelaunched():
                self.relaunched.append((-1 if node is None else node, event.name))
                self.replaced_ends += [end for end in reversed(self.history.agent_ends) if end.name == event.name][:1]
            case control_events.NodeGivenUp() if event.node >= 0:
                name, reason = event.name or self.name_of(event.node), event.reason[:_MOST_REASON]
                loss = _seen_by_supervisor(node=event.node, host=name, cause=event.cause, reason=reason, seen_ns=when)
                self.given_up[event.node] = loss
            case of_agent.AgentStarted() if node is not None and node >= 0:
                self.agents.setdefault(node, AgentTimes(node, line.host)).started_ns.append(when)
            case of_agent.AgentEnded() if node is not None and node >= 0:
                self.agents.setdefault(node, AgentTimes(node, line.host)).ended_ns.append(when)
            case control_events.SignalReceived():
                self.history.notices += (event.signal,)
            case control_events.SignalDecided():
                self.history.meaning = event.meaning
            case control_events.VerdictReached():
                self.history.outcome, self.history.reason = self.history.outcome or event.outcome, event.reason
            case control_events.RequeueDecided():
                self.history.decision = f"{event.action}: {event.reason}"
            case control_events.AttemptEnded():
                self.history.ended_ns, self.history.outcome = when, event.outcome or self.history.outcome
                self.history.exit_code = event.exit_code
            case of_agent.AgentFailed() if node is not None:
                why = event.error[:_MOST_WORDS]
                self.own_reasons.setdefault(node, []).append(f"{why} ({event.where})" if event.where else why)
            case of_agent.StartRefused() if node is not None:
                self.refusals[node] = event.reason[:_MOST_REASON]
            case of_agent.UserCommandEnded() if event.reason:
                output = tuple(text[:_MOST_WORDS] for text in event.output[-_MOST_LINES:])
                reason = event.reason[:_MOST_WORDS]
                failed = read_incident(CommandFailure, line, event, reason=reason, output=output)
                self.history.commands += (failed,)
            case of_agent.CheckpointCommitted():
                before = self.history.committed
                self.history.committed = event if before is None or event.step >= before.step else before
            case of_agent.CheckpointNotCommitted():
                self.not_committed = max(self.not_committed, (when, event), key=lambda one: one[0])
            case control_events.NodeMissing() if event.node >= 0:
                self.missing.add(event.node)
            case of_agent.OutputLost():
                self.history.output_lost += (read_incident(OutputLoss, line, event, node=line.node or 0),)
            case of_agent.FilesystemRefused() | control_events.LinkLost():
                self.history.outages += (read_outage(line, event),)

    def _agent_ended(self, event: control_events.AgentProcessEnded, when: int) -> None:
        code, name, node = event.code, event.name, event.node
        if not event.started and name:
            self.unstarted.setdefault(name, event.detail)
        if code is None and not event.detail:
            return
        if name in self.history.nodes and node < 0:
            node = self.history.nodes.index(name)
        end = FailedAgent(node=max(node, -1), name=name, code=code, seen_ns=when, detail=event.detail)
        self.history.agent_ends += (end,)

    def name_of(self, node: int) -> str:
        return self.history.nodes[node] if 0 <= node < len(self.history.nodes) else f"node {node}"

    def build(self) -> AttemptHistory:
        # A node's own event stands in the round that it was in last; the coordinator's, in the one after it.
        named = {node for part in self.rounds.values() for node, loss in part.lost.items() if loss.left}
        for begun in self.rounds.values():
            begun.lost |= {node: loss for node, loss in begun.left.items() if node not in named}
        # The supervisor saw an exit code; the n-th of those goes with the n-th event of that node's agents.
        for node, reasons in self.own_reasons.items():
            ends = [end for end in self.history.agent_ends if end.node == node and end.code == ExitCode.WORKERS_FAILED]
            for end, why in zip(ends, reasons, strict=False):
                end.why = why
        bad_ends = self.bad_ends
        for end in self.history.agent_ends:
            if end.code != 0 and (end.code is not None or end in self.replaced_ends):
                bad_ends.setdefault(end.node, []).append(end)
        for begun in self.rounds.values():
            for node in begun.chosen if begun.nodes else ():
                begun.nodes.setdefault(node, RoundNode(node, self.name_of(node)))
        for node in bad_ends:
            mine = [index for index in sorted(self.rounds) if node in self.rounds[index].nodes]
            self.cut_short[node] = [index for index in mine[:-1] if not self.rounds[index].has_ended(node)]
        # A round that was opened but never became final had no workers: it is only what came after the one before.
        clocks = self.history.clocks
        built = [self.rounds[index].build() for index in sorted(self.rounds)]
        rounds = [part for part in built if part.nodes or part.broken]
        for part in rounds:
            part.clocks = clocks.around(
                [(one.node, one.ended_uptime_ns) for one in part.failures if one.ended_uptime_ns]
            )
            self._complete(part)
        history = self.history
        history.outcome = history.outcome or self.closed.outcome
        history.reason = history.reason or self.closed.reason
        history.rounds = tuple(rounds)
        again = {node for node, agents in self.agents.items() if len(agents.started_ns) > 1}
        history.relaunched = tuple(name for node, name in self.relaunched if node in again)
        history.unstarted = tuple(self.unstarted.items())
        for node, reason in self.refusals.items():
            if node in self.given_up:
                self.given_up[node] = replace(self.given_up[node], cause=START_REFUSED, reason=reason)
        given_up = (*self.given_up.values(), *self._never_joined())
        history.given_up = tuple(sorted(given_up, key=lambda one: one.node))
        history.notices = tuple(dict.fromkeys(history.notices))
        history.outages = attributed(history.outages, history.nodes)
        history.commands = tuple(sorted(history.commands, key=lambda one: (one.reported_ns, one.node)))
        last, lacking = history.committed, self.not_committed[1]
        is_later = lacking is not None and (last is None or lacking.step is None or lacking.step > last.step)
        history.not_committed = lacking if is_later else None
        history.agents = tuple(agents for _, agents in sorted(self.agents.items()))
        for agents in history.agents:
            agents.started_ns.sort()
            agents.ended_ns.sort()
        return history

    def _never_joined(self) -> list[NodeLoss]:
        lasted = (self.history.ended_ns or 0) - (self.history.started_ns or 0)
        known = {*self.coverage.heard, *self.given_up}
        silent = [node for node in sorted(self.missing) if node not in known and lasted >= _NEVER_JOINED_NS]
        never = partial(_seen_by_supervisor, cause="never_joined", reason="its agent was started but never reported")
        return [never(node=node, host=self.name_of(node), seen_ns=self.history.ended_ns or 0) for node in silent]

    def _complete(self, part: RoundHistory) -> None:
        after = self.rounds.get(part.index + 1)
        part.lost_nodes = (*map(self._named, part.lost_nodes), *self._dead_agents(part))
        # What follows from the loss of a member is a consequence.
        nodes = {*(after.explained if after is not None else ())}
        nodes |= {*self.closed.explained} if self.closed.round == part.index + 1 else set()
        part.failures = tuple(
            replace(one, failure_class=FailureClass.SYMPTOM)
            if one.node in nodes and one.failure_class is not FailureClass.STOPPED_BY_US
            else one
            for one in part.failures
        )
        if not part.broken:
            return
        if after is not None and (after.frozen_reason or after.nodes):
            reason = after.frozen_reason or after.history.reason
            action = "restart" if reason.startswith("restart") else "continue"
            most = self.rounds[part.index].max_restarts
            part.decision = RestartRecord(
                action=action, reason=reason, restarts_used=after.restarts_used, max_restarts=most
            )
        elif self.closed.reason:
            part.decision = RestartRecord(action="close", reason=self.closed.reason)

    def _named(self, loss: NodeLoss) -> NodeLoss:
        host = loss.host or self.name_of(loss.node)
        ends = self.bad_ends.get(loss.node, [])
        # Its agent may have died and been started again before: each end goes with a round of its own.
        earlier = [index for index in self.cut_short.get(loss.node, ()) if index < loss.round]
        if len(earlier) >= len(ends) or loss.left:
            return replace(loss, host=host)
        detail = _end_text(ends[len(earlier)])
        given_up = self.given_up.get(loss.node)
        is_back = any(index > loss.round and loss.node in part.nodes for index, part in self.rounds.items())
        if given_up is not None and given_up.reason != ends[len(earlier)].detail and not is_back:
            detail += f"; given up after that: {given_up.reason}"
        return replace(loss, host=host, detail=detail)

    def _dead_agents(self, part: RoundHistory) -> Iterator[NodeLoss]:
        """No clocks compared: the n-th round of a node without an end goes with the n-th bad end of its agent."""
        known = {loss.node for loss in part.lost_nodes}
        for node in part.nodes if self.bad_ends else ():
            for index, end in zip(self.cut_short.get(node.node, ()), self.bad_ends.get(node.node, ()), strict=False):
                if index == part.index and node.node not in known:
                    died = partial(_seen_by_supervisor, detail=_end_text(end), agent_only=True)
                    yield died(round=part.index, node=node.node, host=node.host, seen_ns=end.seen_ns)


def _end_text(end: FailedAgent) -> str:
    if end.code is None:
        return end.detail or "its agent ended"
    if end.code == UNHEALTHY_CODE:
        return "its agent took it out: a health check failed"
    if end.code == REFUSED_CODE:
        return "its agent left: the filesystem of the run directory refused it, or did not answer"
    if end.why:
        return f"its agent failed: {end.why}"
    name = signal_name(signal_of(end.code))
    return f"its agent was ended by {name}" if name else f"its agent ended with code {end.code}"
