"""One round, put together from its events in any order of files; and how far these events can be trusted to be all.

`EventCoverage` finds the nodes whose files report all their failures in a round, so that no rank's folder has to be
looked into for more: of a thousand nodes and a hundred rounds there are a million, each a round trip to the file
server.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.failures.classify import signal_name, signal_of
from hpc_elastic.failures.peers import Sockets
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.history import (
    NodeLoss,
    RankStatus,
    Replacement,
    RestartRecord,
    RoundHistory,
    RoundNode,
    StackGroup,
    WorkerEnd,
)
from hpc_elastic.report.incidents import InProcessRestart, read_restart
from hpc_elastic.run.activities import MOST_NAMED, Activity
from hpc_elastic.run.agent_events import (
    AgentEnded,
    AgentStarted,
    HangSuspected,
    HealthCheckFailed,
    InProcessGaveUp,
    InProcessRestarted,
    PlatformFailure,
    RanksObserved,
    RoundFinal,
    StacksTaken,
    WorkerFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersStopping,
    WorkersSucceeded,
)
from hpc_elastic.run.coordinator_events import (
    NodeLeft,
    NodeLost,
    NodeReplaced,
    RestartDecided,
    RoundFrozen,
    RoundOpened,
)
from hpc_elastic.run.event_reader import EVENTS, EventLine
from hpc_elastic.run.event_types import RunEvent
from hpc_elastic.run.heartbeats import Progress, ProgressSource, RankHeartbeat


class EventCoverage(Struct):
    """Fed with each file's events in their order.

    An agent reports failed workers after the end of all. So it has reported all that failed once its file goes on after
    that with another round, or with the agent's own end, and no line is missing in between.
    """

    heard: set[int] = field(default_factory=set)
    """Nodes whose agents wrote any event."""
    missing: dict[int, int] = field(default_factory=dict)
    """How many lines of a node's files are missing."""
    _unsure: dict[int, set[int]] = field(default_factory=dict)
    _next: int = 0
    _is_whole: bool = True
    """No line since the round began is missing."""
    _has_ended: bool = False
    _place: tuple[int, int] | None = None
    """Round and node of the file's last events."""

    def begin_file(self) -> None:
        """What follows is another writer's; call it after the last file, too."""
        self._close(is_told=False)
        self._next = 0

    def miss(self) -> None:
        """An event could not be read."""
        self._is_whole = False

    def take(self, line: EventLine) -> None:
        """Note an agent's event."""
        event, number = line.event, line.number
        if number != self._next:
            self._miss_until(number, line.node)
        self._next = -1 if number is None else number + 1
        match event:
            case None:
                if line.name in EVENTS:
                    self.miss()
            case RoundFinal():
                self._close(is_told=True)
                if line.node is not None:
                    self._place = event.round, line.node
                    self.heard.add(line.node)
            case WorkersStopped() | WorkersSucceeded():
                self._has_ended = self._place is not None and self._place[0] == event.round
            case AgentEnded():
                self._close(is_told=True)
            case AgentStarted() if line.node is not None:
                self.heard.add(line.node)

    def is_sure_of(self, index: int, node: int) -> bool:
        """Whether every file of that node's that has events of the round has all of them."""
        return node not in self._unsure.get(index, ())

    def _miss_until(self, number: int | None, node: int | None) -> None:
        self._is_whole = False
        if number is not None and number > self._next >= 0 and node is not None:
            self.missing[node] = self.missing.get(node, 0) + number - self._next

    def _close(self, *, is_told: bool) -> None:
        if self._place is not None and not (is_told and self._has_ended and self._is_whole):
            index, node = self._place
            self._unsure.setdefault(index, set()).add(node)
        self._place, self._has_ended, self._is_whole = None, False, True


ROUND_EVENTS: frozenset[type[RunEvent]] = frozenset(
    {
        RoundOpened, RoundFrozen, RoundFinal, WorkerFailed, NodeLost, NodeLeft, NodeReplaced, HealthCheckFailed,
        PlatformFailure, InProcessRestarted, InProcessGaveUp, WorkersStopping, WorkersSucceeded, WorkersStopped,
        RestartDecided, StacksTaken, RanksObserved, WorkersStarted, HangSuspected,
    }
)  # fmt: skip
"""What `RoundBuilder.take` learns from."""
_FRAMES = 20
_WORDS = 300


class RoundBuilder(Struct):
    """Fed with events by `take`, and with what the error files say."""

    index: int
    known: dict[RoundNode, RoundNode] = field(default_factory=dict)
    """Of all rounds: most are like the one before, and a thousand nodes of a hundred rounds are kept once."""
    reason: str = ""
    started_ns: int | None = None
    seconds: float | None = None
    world_size: int | None = None
    nodes: dict[int, RoundNode] = field(default_factory=dict)
    final_ns: dict[int, int] = field(default_factory=dict)
    failures: dict[int, WorkerFailure] = field(default_factory=dict)
    reported: dict[int, WorkerFailure] = field(default_factory=dict)
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    lost: dict[int, NodeLoss] = field(default_factory=dict)
    left: dict[int, NodeLoss] = field(default_factory=dict)
    """Nodes that took themselves out, as the coordinator reports it."""
    replaced: dict[int, Replacement] = field(default_factory=dict)
    in_process: list[InProcessRestart] = field(default_factory=list)
    fresh_starts: dict[str, str] = field(default_factory=dict)
    own: dict[int, NodeLoss] = field(default_factory=dict)
    succeeded: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Nodes that reported the end of their workers."""
    stopping: dict[str, None] = field(default_factory=dict)
    stopping_ns: dict[int, int] = field(default_factory=dict)
    frozen_reason: str = ""
    """Why it could begin: what was decided about the failures of the round before."""
    explained: tuple[int, ...] = ()
    """Nodes whose failures in the round before follow from the loss of a member."""
    restarts_used: int | None = None
    decision: RestartRecord | None = None
    decided_ns: int = -1
    progress: dict[int, Progress] = field(default_factory=dict)
    rank_statuses: dict[int, RankStatus] = field(default_factory=dict)
    activities: dict[int, Activity] = field(default_factory=dict)
    sockets: dict[int, Sockets] = field(default_factory=dict)
    stacks: dict[tuple[str, str, tuple[str, ...]], list[int]] = field(default_factory=dict)
    """(name, state, stack) of a `StackGroup` → ranks."""
    threads: dict[tuple[str, str, tuple[str, ...]], list[int]] = field(default_factory=dict)
    suspicion: tuple[int, str] = (0, "")
    orphans: dict[str, None] = field(default_factory=dict)

    def facts(self, attempt: int, rank: int) -> WorkerFailure:
        """What is known of a rank from the events: for an error file that no agent completed."""
        if (reported := self.reported.get(rank)) is not None:
            return replace(reported, attempt=attempt)
        place = WorkerFailure(attempt=attempt, round=self.index, global_rank=rank)
        node = next((node for node in self.nodes.values() if rank in node.ranks), None)
        return replace(place, host=node.host, node=node.node, local_rank=node.ranks.index(rank)) if node else place

    def take(self, line: EventLine, event: RunEvent) -> None:
        """Fill in what one of `ROUND_EVENTS` says."""
        node, host, when = -1 if line.node is None else line.node, line.host, line.written_ns
        match event:  # what each node writes in each round stands first
            case RoundFinal():
                place = RoundNode(node, host, event.ranks, event.group_rank)
                self.nodes[node] = self.known.setdefault(place, place)
                self.final_ns[node] = when
                self.started_ns = when if self.started_ns is None else min(self.started_ns, when)
                self.world_size = event.world_size
            case WorkersStarted():
                if event.started_fresh:
                    self.fresh_starts[host or f"node {node}"] = event.started_fresh[:_WORDS]
            case WorkersStopping():
                self.stopping[event.reason] = None
                self.stopping_ns.setdefault(node, when)
            case WorkersStopped():
                for end in event.ends:
                    self.ends[end.rank] = WorkerEnd(
                        end.rank, node, end.exitcode, end.ended_ns, end.ended_uptime_ns, end.stopped, end.logged
                    )
                if event.progress is not None:
                    self.progress[node] = event.progress
                self.orphans |= dict.fromkeys(f"{host or f'node {node}'}: {one[:_WORDS]}" for one in event.orphans)
                if node not in self.ended:
                    self._take_end(when, node)
            case WorkersSucceeded():
                self.succeeded.add(node)
                self._take_end(when, node)
            case WorkerFailed():
                self._take_failure(event, when, node, host)
            case NodeLost() | NodeLeft() | HealthCheckFailed() | PlatformFailure():
                self._take_loss(event, line, NodeLoss(round=self.index, node=node, host=host, seen_ns=when))
            case RoundOpened():
                self.reason = event.reason
            case RoundFrozen():
                self.frozen_reason, self.restarts_used = event.reason, event.restarts_used
                self.explained = event.explained
            case NodeReplaced():
                gone = event.replaces_node
                self.replaced[gone] = Replacement(
                    node=node,
                    host=host or f"node {node}",
                    replaces_node=gone,
                    replaces_host=event.replaces_host or f"node {gone}",
                    group_rank=-1 if event.group_rank is None else event.group_rank,
                )
            case InProcessRestarted() | InProcessGaveUp():
                self.in_process.append(read_restart(line, event, node))
            case RestartDecided():
                if when >= self.decided_ns:  # a new coordinator may have decided again: the last decision holds
                    self.decided_ns = when
                    self.decision = RestartRecord(
                        action=event.action,
                        reason=event.reason,
                        restarts_used=event.restarts_used,
                        max_restarts=event.max_restarts,
                    )
            case HangSuspected():
                self.suspicion = max(self.suspicion, (when, event.reason[:_WORDS]))
            case StacksTaken():
                self._take_stacks(event, when, node)
            case RanksObserved():
                for found in event.ranks:
                    self.activities[found.rank] = _cut(found)
                if event.sockets:
                    self.sockets[node] = Sockets(network=event.network, ranks=event.sockets)

    def _take_loss(
        self, event: NodeLost | NodeLeft | HealthCheckFailed | PlatformFailure, line: EventLine, loss: NodeLoss
    ) -> None:
        match event:
            case NodeLost():
                self.lost[loss.node] = replace(loss, age=event.age, observer=line.by)
            case NodeLeft():
                self.left[loss.node] = replace(loss, left=event.reason or "no reason was given", observer=line.by)
            case HealthCheckFailed():
                self.lost[loss.node] = replace(loss, left=event.reason, observer=loss.node)
            case PlatformFailure():
                self.own[loss.node] = replace(loss, broke=event.reason, observer=loss.node)

    def _take_failure(self, event: WorkerFailed, when: int, node: int, host: str) -> None:
        ended = event.ended_ns or when
        failure = WorkerFailure.from_event(event, round=self.index, host=host, node=node, ended_ns=ended)
        is_machine = failure.failure_class is FailureClass.INFRASTRUCTURE
        category = Category.INFRASTRUCTURE if is_machine else Category.WORKER
        self.reported[event.rank] = replace(failure, category=category, signal=signal_name(signal_of(failure.exitcode)))

    def _take_end(self, when: int, node: int) -> None:
        """All workers of a node have ended."""
        self.ended.add(node)
        begin = self.final_ns.get(node)
        if begin is not None and when >= begin:
            self.seconds = max(self.seconds or 0.0, (when - begin) / 1e9)

    def _take_stacks(self, event: StacksTaken, when: int, node: int) -> None:
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
        """What is known of the round."""
        failures = {**self.reported, **self.failures}
        return RoundHistory(
            index=self.index,
            reason=self.reason,
            started_ns=self.started_ns,
            seconds=self.seconds,
            world_size=self.world_size,
            nodes=tuple(self.nodes[node] for node in sorted(self.nodes)),
            failures=tuple(failures[rank] for rank in sorted(failures)),
            ends=tuple(self.ends[rank] for rank in sorted(self.ends)) if failures or self.lost or self.own else (),
            in_process=tuple(sorted(self.in_process, key=lambda one: (one.iteration, one.told_ns))),
            fresh_starts=tuple(sorted(self.fresh_starts.items())),
            replaced=tuple(self.replaced[node] for node in sorted(self.replaced)),
            lost_nodes=tuple(self.lost[node] for node in sorted(self.lost)),
            own_failures=tuple(self.own[node] for node in sorted(self.own)),
            succeeded_nodes=frozenset(self.succeeded),
            stopping_reasons=tuple(self.stopping),
            stopping_ns=tuple(sorted(self.stopping_ns.items())),
            decision=self.decision,
            progress=dict(self.progress),
            rank_statuses=tuple(self.rank_statuses[rank] for rank in sorted(self.rank_statuses)),
            activities=tuple(self.activities[rank] for rank in sorted(self.activities)),
            sockets=tuple(self.sockets[node] for node in sorted(self.sockets)),
            stacks=_stack_groups(self.stacks),
            threads=_stack_groups(self.threads),
            suspected_ns=self.suspicion[0],
            suspicion=self.suspicion[1],
            orphans=tuple(self.orphans),
        )


def _cut(found: Activity) -> Activity:
    """As short as an agent writes it."""
    texts = {name: getattr(found, name)[:_WORDS] for name in ("call", "at", "line", "operation", "key", "peer")}
    return replace(found, names=found.names[:MOST_NAMED], **texts)


def _stack_groups(found: dict[tuple[str, str, tuple[str, ...]], list[int]]) -> tuple[StackGroup, ...]:
    """The rarest first."""
    return tuple(
        StackGroup(ranks=tuple(sorted(ranks)), stack=stack, name=name, state=state)
        for (name, state, stack), ranks in sorted(found.items(), key=lambda item: (len(item[1]), min(item[1])))
    )


def rank_statuses(beats: Iterable[RankHeartbeat], *, node: int, when: int) -> list[RankStatus]:
    """Workers' last heartbeats, as an event or a node's file lists them."""
    return [
        RankStatus(
            rank=beat.rank,
            node=node,
            step=beat.step,
            counted_steps=None if beat.source is ProgressSource.COLLECTIVES else beat.counted_steps,
            section=beat.section[:64],
            age=beat.age if 0 <= beat.age < 1e9 else 0.0,
            told_ns=when,
        )
        for beat in beats
        if beat.count
    ]
