"""One round, put together from its events in any order of files; and how far these events can be trusted to be all.

`EventCoverage` finds the nodes whose files report all their failures in a round, so that no rank's folder has to be
looked into for more: of a thousand nodes and a hundred rounds there are a million, each a round trip to the file
server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.codec import readable_items
from hpc_elastic.failures.classify import signal_name, signal_of
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
from hpc_elastic.run.agent_events import OwnEnd, WorkerFailed
from hpc_elastic.run.event_reader import integer, integer_or, names_of, read_event, seconds_of, text_of, whole_numbers
from hpc_elastic.run.heartbeats import RankHeartbeat

_ENDS = ("workers_stopped", "workers_succeeded")


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

    def take(self, name: str, number: object, node: int | None, index: int | None) -> None:
        """Note an agent's event.

        Args:
            name: Its name.
            number: Its place in its file, ``n``.
            node: Whose it is.
            index: Of the round.
        """
        if number != self._next:
            self._miss_until(number, node)
        self._next = number + 1 if isinstance(number, int) else -1
        if name == "round_final":
            self._close(is_told=True)
            if node is not None and index is not None:
                self._place = index, node
                self.heard.add(node)
        elif name in _ENDS:
            self._has_ended = self._place is not None and self._place[0] == index
        elif name == "agent_ended":
            self._close(is_told=True)
        elif name == "agent_started" and node is not None:
            self.heard.add(node)

    def is_sure_of(self, index: int, node: int) -> bool:
        """Whether every file of that node's that has events of the round has all of them."""
        return node not in self._unsure.get(index, ())

    def _miss_until(self, number: object, node: int | None) -> None:
        self._is_whole = False
        if isinstance(number, int) and number > self._next >= 0 and node is not None:
            self.missing[node] = self.missing.get(node, 0) + number - self._next

    def _close(self, *, is_told: bool) -> None:
        if self._place is not None and not (is_told and self._has_ended and self._is_whole):
            index, node = self._place
            self._unsure.setdefault(index, set()).add(node)
        self._place, self._has_ended, self._is_whole = None, False, True


ROUND_EVENTS = frozenset(
    {
        "round_opened", "round_frozen", "round_final", "worker_failed", "node_lost", "node_left", "node_replaced",
        "health_check_failed", "platform_failure", "ring_restarted", "ring_gave_up", "workers_stopping",
        "workers_succeeded", "workers_stopped", "restart_decision", "stacks_taken",
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
    own: dict[int, NodeLoss] = field(default_factory=dict)
    succeeded: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Nodes that reported the end of their workers."""
    stopping: dict[str, None] = field(default_factory=dict)
    frozen_reason: str = ""
    """Why it could begin: what was decided about the failures of the round before."""
    restarts_used: int | None = None
    decision: RestartRecord | None = None
    decided_ns: int = -1
    rank_statuses: dict[int, RankStatus] = field(default_factory=dict)
    stacks: dict[tuple[str, str, tuple[str, ...]], list[int]] = field(default_factory=dict)
    """(name, state, stack) of a `StackGroup` → ranks."""
    threads: dict[tuple[str, str, tuple[str, ...]], list[int]] = field(default_factory=dict)

    def facts(self, attempt: int, rank: int) -> WorkerFailure:
        """What is known of a rank from the events: for an error file that no agent completed."""
        if (reported := self.reported.get(rank)) is not None:
            return replace(reported, attempt=attempt)
        place = WorkerFailure(attempt=attempt, round=self.index, global_rank=rank)
        node = next((node for node in self.nodes.values() if rank in node.ranks), None)
        return replace(place, host=node.host, node=node.node, local_rank=node.ranks.index(rank)) if node else place

    def take(self, name: str, event: Mapping[str, Any], when: int, node: int, host: str) -> None:
        """Fill in what one of `ROUND_EVENTS` says.

        Args:
            name: The event's name.
            event: Its fields.
            when: Its time.
            node: The node that it is about: of an agent's own event that node, of a coordinator's the one it names.
            host: That node's.
        """
        loss = partial(NodeLoss, round=self.index, node=node, host=host, seen_ns=when)
        reason = text_of(event.get("reason"))
        match name:
            case "round_opened":
                self.reason = reason
            case "round_frozen":
                self.frozen_reason, self.restarts_used = reason, integer(event.get("restarts_used"))
            case "round_final":
                group_rank = integer_or(integer(event.get("group_rank")), -1)
                place = RoundNode(node, host, tuple(whole_numbers(event.get("ranks"))), group_rank)
                self.nodes[node] = self.known.setdefault(place, place)
                self.final_ns[node] = when
                self.started_ns = when if self.started_ns is None else min(self.started_ns, when)
                self.world_size = integer(event.get("world_size"))
            case "worker_failed":
                self._take_failure(event, when, node, host)
            case "node_lost":
                self.lost[node] = loss(age=seconds_of(event.get("age")), observer=integer(event.get("by")))
            case "node_left":
                self.left[node] = loss(left=reason or "no reason was given", observer=integer(event.get("by")))
            case "health_check_failed":
                self.lost[node] = loss(left=reason, observer=node)
            case "platform_failure":
                self.own[node] = loss(broke=reason, observer=node)
            case "node_replaced":
                gone = integer_or(integer(event.get("replaces_node")), -1)
                self.replaced[gone] = Replacement(
                    node=node,
                    host=host or f"node {node}",
                    replaces_node=gone,
                    replaces_host=text_of(event.get("replaces_host")) or f"node {gone}",
                    group_rank=integer_or(integer(event.get("group_rank")), -1),
                )
            case "ring_restarted" | "ring_gave_up":
                self.in_process.append(read_restart(event, when, node))
            case "workers_stopping":
                self.stopping[reason] = None
            case "workers_succeeded" | "workers_stopped":
                if name == "workers_succeeded":
                    self.succeeded.add(node)
                else:
                    self._take_ends(event, node)
                    if node in self.ended:
                        return
                self.ended.add(node)
                begin = self.final_ns.get(node)
                if begin is not None and when >= begin:
                    self.seconds = max(self.seconds or 0.0, (when - begin) / 1e9)
            case "restart_decision":
                if when >= self.decided_ns:  # a new coordinator may have decided again: the last decision holds
                    self.decided_ns = when
                    used, most = integer(event.get("restarts_used")), integer(event.get("max_restarts"))
                    action = text_of(event.get("action"))
                    self.decision = RestartRecord(action=action, reason=reason, restarts_used=used, max_restarts=most)
            case "stacks_taken":
                self._take_stacks(event, when, node)

    def _take_failure(self, event: Mapping[str, Any], when: int, node: int, host: str) -> None:
        found = read_event({"ended_ns": when, **event, "event": "worker_failed"})
        if not isinstance(found, WorkerFailed):
            return
        failure = WorkerFailure.from_event(found, round=self.index, host=host, node=node)
        is_machine = failure.failure_class is FailureClass.INFRASTRUCTURE
        category = Category.INFRASTRUCTURE if is_machine else Category.WORKER
        self.reported[found.rank] = replace(failure, category=category, signal=signal_name(signal_of(failure.exitcode)))

    def _take_ends(self, event: Mapping[str, Any], node: int) -> None:
        for end in readable_items(OwnEnd, event.get("ends")):
            self.ends[end.rank] = WorkerEnd(
                end.rank, node, end.exitcode, end.ended_ns, end.ended_uptime_ns, end.stopped
            )

    def _take_stacks(self, event: Mapping[str, Any], when: int, node: int) -> None:
        for status in rank_statuses(readable_items(RankHeartbeat, event.get("beats")), node=node, when=when):
            self.rank_statuses[status.rank] = status
        for into, key in ((self.stacks, "groups"), (self.threads, "threads")):
            for group in _dicts(event.get(key)):
                if numbers := whole_numbers(group.get("ranks")):
                    name = text_of(group.get("name"))[:_WORDS]
                    into.setdefault((name, "", names_of(group.get("stack"))[-_FRAMES:]), []).extend(numbers)
        states = {integer(one.get("rank")): text_of(one.get("state"))[:_WORDS] for one in _dicts(event.get("states"))}
        for rank in whole_numbers(event.get("silent")):
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
            replaced=tuple(self.replaced[node] for node in sorted(self.replaced)),
            lost_nodes=tuple(self.lost[node] for node in sorted(self.lost)),
            own_failures=tuple(self.own[node] for node in sorted(self.own)),
            succeeded_nodes=frozenset(self.succeeded),
            stopping_reasons=tuple(self.stopping),
            decision=self.decision,
            rank_statuses=tuple(self.rank_statuses[rank] for rank in sorted(self.rank_statuses)),
            stacks=_stack_groups(self.stacks),
            threads=_stack_groups(self.threads),
        )


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
            section=text_of(beat.section)[:64],
            age=beat.age if 0 <= beat.age < 1e9 else 0.0,
            told_ns=when,
        )
        for beat in beats
        if beat.count
    ]


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
