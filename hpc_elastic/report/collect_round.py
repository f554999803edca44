"""One round, put together from its events in any order of files; and how far these events can be trusted to be all.

`EventCoverage` finds the nodes whose files report all their failures in a round, so that no rank's folder has to be
looked into for more: of a thousand nodes and a hundred rounds there are a million, each a round trip to the file
server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.failures.classify import signal_name, signal_of
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import (
    InProcessRestart,
    NodeLoss,
    NodeTimes,
    RankStatus,
    Replacement,
    RoundHistory,
    RoundNode,
    StackGroup,
    WorkerEnd,
    read_incident,
)
from hpc_elastic.run import agent_events as of_agent
from hpc_elastic.run import control_events
from hpc_elastic.run.event_reader import EVENTS, EventLine
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.progress import MOST_NAMED, ProgressSource, RankHeartbeat


class EventCoverage(Struct):
    """Fed with each file's events in their order.

    An agent reports failed workers after the end of all. So it has reported all that failed once its file goes on after
    that with another round, or with the agent's own end, and no line is missing in between.
    """

    heard: set[int] = field(default_factory=set)
    missing: dict[int, int] = field(default_factory=dict)
    _unsure: dict[int, set[int]] = field(default_factory=dict)
    _next: int = 0
    _is_whole: bool = True
    _has_ended: bool = False
    _place: tuple[int, int] | None = None

    def begin_file(self) -> None:
        """Another writer's lines follow; call it after the last file, too."""
        self._close(is_complete=False)
        self._next = 0

    def miss(self) -> None:
        self._is_whole = False

    def take(self, line: EventLine) -> None:
        event, number, node = line.event, line.number, line.node
        if number != self._next:
            self._is_whole = False
            if number is not None and number > self._next >= 0 and node is not None:
                self.missing[node] = self.missing.get(node, 0) + number - self._next
        self._next = -1 if number is None else number + 1
        # `isinstance` takes five times as long where it says no. What each node writes in each round stands first.
        if type(event) is of_agent.WorkersStarted or type(event) is of_agent.WorkersStopping:
            return
        if type(event) is of_agent.RoundFinal:
            self._close(is_complete=True)
            if node is not None:
                self._place = event.round, node
                self.heard.add(node)
        elif type(event) is of_agent.WorkersStopped or type(event) is of_agent.WorkersSucceeded:
            self._has_ended = self._place is not None and self._place[0] == event.round
        elif event is None:
            if line.name in EVENTS:
                self.miss()
        elif type(event) is of_agent.AgentEnded:
            self._close(is_complete=True)
        elif type(event) is of_agent.AgentStarted and node is not None:
            self.heard.add(node)

    def unsure(self, index: int) -> Set[int]:
        """The nodes that may have more failures of a round than they have reported."""
        return self._unsure.get(index, frozenset())

    def _close(self, *, is_complete: bool) -> None:
        if self._place is not None and not (is_complete and self._has_ended and self._is_whole):
            index, node = self._place
            self._unsure.setdefault(index, set()).add(node)
        self._place, self._has_ended, self._is_whole = None, False, True


_FRAMES = 20
_WORDS = 300


class RoundBuilder(Struct):
    """Fed with events by `take`, and with what the error files say."""

    history: RoundHistory
    """It is filled in: what needs nothing of other events, by `take`."""
    known: dict[int, RoundNode] = field(default_factory=dict)
    """Each node's last one. All rounds share it: most are like the one before, and are kept once."""
    nodes: dict[int, RoundNode] = field(default_factory=dict)
    times: dict[int, NodeTimes] = field(default_factory=dict)
    failures: dict[int, WorkerFailure] = field(default_factory=dict)
    reported: dict[int, WorkerFailure] = field(default_factory=dict)
    lost: dict[int, NodeLoss] = field(default_factory=dict)
    left: dict[int, NodeLoss] = field(default_factory=dict)
    """Nodes that took themselves out, as the coordinator reports it."""
    rank_statuses: dict[int, RankStatus] = field(default_factory=dict)
    others: defaultdict[str, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Further fields of the history, each with its values by what they are put in order by."""
    stacks: dict[tuple[str, str, tuple[str, ...]], list[int]] = field(default_factory=dict)
    threads: dict[tuple[str, str, tuple[str, ...]], list[int]] = field(default_factory=dict)
    frozen_reason: str = ""
    chosen: tuple[int, ...] = ()
    """Its members, as the coordinator reports them: an agent that is killed soon loses its own event of it."""
    explained: tuple[int, ...] = ()
    """Nodes whose failures in the round before follow from the loss of a member."""
    restarts_used: int | None = None
    max_restarts: int | None = None

    def facts(self, attempt: int, rank: int) -> WorkerFailure:
        """A rank's facts by the events: for an error file that no agent completed."""
        if (reported := self.reported.get(rank)) is not None:
            return replace(reported, attempt=attempt)
        place = WorkerFailure(attempt=attempt, round=self.history.index, global_rank=rank)
        node = next((node for node in self.nodes.values() if rank in node.ranks), None)
        return replace(place, host=node.host, node=node.node, local_rank=node.ranks.index(rank)) if node else place

    def has_ended(self, node: int) -> bool:
        return node in self.times and self.times[node].ended_ns is not None

    def take(self, line: EventLine, event: RunEvent) -> None:
        node, when = -1 if line.node is None else line.node, line.written_ns
        # What each node writes in each round stands first.
        if type(event) is of_agent.RoundFinal:
            place = self.known.get(node)
            if place is None or place != (node, line.host, event.ranks, event.group_rank):
                place = self.known[node] = RoundNode(node, line.host, event.ranks, event.group_rank)
            self.nodes[node] = place
            times = self._times(node)
            times.final_ns = when if times.final_ns is None else times.final_ns
            self.history.world_size, self.max_restarts = event.world_size, event.max_restarts
        elif type(event) is of_agent.WorkersStarted:
            times = self._times(node)
            times.started_ns = when if times.started_ns is None else times.started_ns
            if event.started_fresh:
                name = line.host or f"node {node}"
                self.others["fresh_starts"][name] = name, event.started_fresh[:_WORDS]
        elif type(event) is of_agent.WorkersStopping:
            if event.reason not in self.history.stopping_reasons:
                self.history.stopping_reasons += (event.reason,)
            times = self._times(node)
            times.stopping_ns = when if times.stopping_ns is None else times.stopping_ns
        elif type(event) is of_agent.WorkersStopped:
            for end in event.ends:
                values = (end.exitcode, end.ended_ns, end.ended_uptime_ns, end.stopped, end.logged)
                self.others["ends"][end.rank] = WorkerEnd(end.rank, node, *values)
            if event.progress is not None:
                self.history.progress[node] = event.progress
            if event.orphans:
                orphans = [f"{line.host or f'node {node}'}: {one[:_WORDS]}" for one in event.orphans]
                self.history.orphans += tuple(one for one in orphans if one not in self.history.orphans)
            times = self._times(node)
            times.ended_ns = when if times.ended_ns is None else times.ended_ns
        else:
            self._take_rarer(line, event, when, node)

    def _take_rarer(self, line: EventLine, event: RunEvent, when: int, node: int) -> None:
        host = line.host
        match event:
            case of_agent.WorkersSucceeded():
                times = self._times(node)
                times.ended_ns = when if times.ended_ns is None else times.ended_ns
                times.succeeded = True
            case of_agent.WorkerFailed():
                is_machine = event.failure_class == FailureClass.INFRASTRUCTURE
                self.reported[event.global_rank] = WorkerFailure.from_event(
                    event,
                    round=self.history.index,
                    host=host,
                    node=node,
                    ended_ns=event.ended_ns or when,
                    category=Category.INFRASTRUCTURE if is_machine else Category.WORKER,
                    signal=signal_name(signal_of(event.exitcode)),
                )
            case control_events.NodeLost():
                self.lost[node] = self._loss(line, age=event.age, observer=line.by)
            case control_events.NodeLeft():
                self.left[node] = self._loss(line, left=event.reason or "no reason was given", observer=line.by)
            case of_agent.HealthCheckFailed():
                self.lost[node] = self._loss(line, left=event.reason, observer=node)
            case of_agent.PlatformFailure():
                self.others["own_failures"][node] = self._loss(line, broke=event.reason, observer=node)
            case control_events.RoundOpened():
                self.history.reason = event.reason
            case control_events.RoundFrozen():
                self.frozen_reason, self.restarts_used = event.reason, event.restarts_used
                self.chosen, self.explained = event.nodes, event.explained
            case control_events.NodeReplaced():
                gone = event.replaces_node
                names = {"host": host or f"node {node}", "replaces_host": event.replaces_host or f"node {gone}"}
                known = {**names, "node": node, "group_rank": -1 if event.group_rank is None else event.group_rank}
                self.others["replaced"][gone] = read_incident(Replacement, line, event, **known)
            case of_agent.InProcessRestarted():
                self.history.in_process += (read_incident(InProcessRestart, line, event, node=node),)
            case of_agent.InProcessGaveUp():
                why = event.reason or "no reason was given"
                self.history.in_process += (read_incident(InProcessRestart, line, event, node=node, gave_up=why),)
            case of_agent.HangSuspected():
                self.history.suspected_ns, self.history.suspicion = max(
                    (self.history.suspected_ns, self.history.suspicion), (when, event.reason[:_WORDS])
                )
            case of_agent.SlowRankFound() | of_agent.SlowRankEnded() | of_agent.RunSlowed() | of_agent.RunSlowEnded():
                self._take_slowness(event)
            case of_agent.StacksTaken():
                self._take_stacks(event, when, node)
            case of_agent.RanksObserved():
                for one in event.ranks:
                    texts = ("call", "at", "line", "operation", "key", "peer")
                    cut = {name: getattr(one, name)[:_WORDS] for name in texts}
                    self.others["activities"][one.rank] = replace(one, names=one.names[:MOST_NAMED], **cut)
                if event.sockets:
                    self.others["sockets"][node] = event

    def _take_slowness(self, event: RunEvent) -> None:
        """Its end, where its agent reported one, takes the place of its beginning."""
        ranks, run = self.others["slow_ranks"], self.others["slow_run"]
        match event:
            case of_agent.SlowRankFound(slow=slow):
                ranks[slow.since_ns, slow.rank] = of_agent.SlowRankEnded(round=event.round, slow=slow)
            case of_agent.SlowRankEnded(slow=slow):
                ranks[slow.since_ns, slow.rank] = event
            case of_agent.RunSlowed(pace=pace):
                run[pace.since_ns] = of_agent.RunSlowEnded(round=event.round, pace=pace)
            case of_agent.RunSlowEnded(pace=pace):
                run[pace.since_ns] = event

    def _loss(self, line: EventLine, **known: Any) -> NodeLoss:
        node = -1 if line.node is None else line.node
        return NodeLoss(round=self.history.index, node=node, host=line.host, seen_ns=line.written_ns, **known)

    def _times(self, node: int) -> NodeTimes:
        """Of each time the first counts: a round may become final again for an agent that died in it and came back."""
        times = self.times.get(node)
        if times is None:
            times = self.times[node] = NodeTimes(self.history.index, node)
        return times

    def _take_stacks(self, event: of_agent.StacksTaken, when: int, node: int) -> None:
        for status in rank_statuses(event.beats, node=node, when=when):
            self.rank_statuses[status.rank] = status
        for main in event.groups:
            if main.ranks:
                self.stacks.setdefault(("", "", main.stack[-_FRAMES:]), []).extend(main.ranks)
        for other in event.threads:
            if other.ranks:
                self.threads.setdefault((other.name[:_WORDS], "", other.stack[-_FRAMES:]), []).extend(other.ranks)
        states = {one.rank: one.state[:_WORDS] for one in event.states}
        for rank in event.silent:
            self.stacks.setdefault(("", states.get(rank, ""), ()), []).append(rank)

    def build(self) -> RoundHistory:
        history = self.history
        known: dict[str, dict[int, Any]] = {"nodes": self.nodes, "times": self.times, "lost_nodes": self.lost}
        known |= {"failures": {**self.reported, **self.failures}, "rank_statuses": self.rank_statuses}
        for name, values in {**known, **self.others}.items():
            setattr(history, name, tuple(values[key] for key in sorted(values)))
        if not history.broken:
            history.ends = ()
        history.in_process = tuple(sorted(history.in_process, key=lambda one: (one.iteration, one.reported_ns)))
        history.started_ns = min((one.final_ns for one in history.times if one.final_ns is not None), default=None)
        lasted = [one.ended_ns - one.final_ns for one in history.times if one.ended_ns and one.final_ns]
        history.seconds = max((time / 1e9 for time in lasted if time >= 0), default=None)
        history.stacks, history.threads = _stack_groups(self.stacks), _stack_groups(self.threads)
        return history


def _stack_groups(found: dict[tuple[str, str, tuple[str, ...]], list[int]]) -> tuple[StackGroup, ...]:
    return tuple(
        StackGroup(ranks=tuple(sorted(ranks)), stack=stack, name=name, state=state)
        for (name, state, stack), ranks in sorted(found.items(), key=lambda item: (len(item[1]), min(item[1])))
    )


def rank_statuses(beats: Iterable[RankHeartbeat], *, node: int, when: int) -> list[RankStatus]:
    return [
        RankStatus(
            rank=beat.rank,
            node=node,
            step=beat.step,
            counted_steps=None if beat.source is ProgressSource.COLLECTIVES else beat.counted_steps,
            section=beat.section[:64],
            age=beat.age if 0 <= beat.age < 1e9 else 0.0,
            reported_ns=when,
        )
        for beat in beats
        if beat.count
    ]
