"""One attempt with all its times on an axis that all hosts share, every stay's ends known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.report.clocks import SUPERVISOR, Moment
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.order import moment_of_failure, moment_of_loss
from hpc_elastic.report.timeline_clocks import node_offsets
from hpc_elastic.report.timeline_spans import Stay, make_stays, round_extents
from hpc_elastic.report.timeline_times import NodeTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """A round on the common axis."""

    attempt: int
    round: int
    start_ns: int
    end_ns: int
    trained_ns: tuple[int, int] | None
    """From when to when all its workers ran; None: they never did all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """An attempt on the axis."""

    number: int
    start_ns: int
    end_ns: int


NOT_SEEN_NS = 1_000_000
"""A row that is shifted by no more looks the same."""


class PlacedAttempt:
    """One attempt with all its times on the common axis."""

    def __init__(self, attempt: AttemptHistory) -> None:
        self.attempt = attempt
        self._hosts = {agents.node: agents.host for agents in attempt.times.agents}
        self._hosts.update({node.node: node.host for item in attempt.rounds for node in item.nodes})
        self.offsets = node_offsets(attempt.times.nodes, clocks=attempt.clocks)
        self._shifts = {node: o.offset_ns for node, o in self.offsets.items() if abs(o.offset_ns) > NOT_SEEN_NS}
        self.losses: dict[int, dict[int, NodeLoss]] = {}
        for item in attempt.rounds:
            for loss in item.lost_nodes:
                shift = self.loss_at(loss) - loss.gone_ns
                self.losses.setdefault(loss.node, {})[item.index] = replace(loss, seen_ns=loss.seen_ns + shift)
        self.agent_starts = {
            agents.node: [self.at(agents.node, when) for when in agents.started_ns] for agents in attempt.times.agents
        }
        self.agent_ends = {
            agents.node: [self.at(agents.node, when) for when in agents.ended_ns] for agents in attempt.times.agents
        }
        self._times: dict[int, list[NodeTimes]] = {}
        for told in attempt.times.nodes:
            self._times.setdefault(told.node, []).append(self._shifted(told))
        self.start_ns, self.end_ns = self._extent()
        self.stays = {
            node: make_stays(
                times,
                agent_starts=self.agent_starts.get(node, []),
                losses=self.losses.get(node, {}),
                end_ns=self.end_ns,
            )
            for node, times in self._times.items()
        }
        self.by_round: dict[int, dict[int, Stay]] = {}
        for node, stays in self.stays.items():
            for stay in stays:
                self.by_round.setdefault(stay.round, {})[node] = stay
        self.extents = round_extents(stay for stays in self.stays.values() for stay in stays)

    def name(self, node: int) -> str:
        """The node's name: Slurm's, or else what its agent calls its host."""
        names = self.attempt.nodes
        if 0 <= node < len(names) and names[node]:
            return names[node]
        return self._hosts.get(node) or f"node {node}"

    def at(self, node: int, when_ns: int) -> int:
        """A node's time on the common axis."""
        likely = self.attempt.clocks.likely(node, when_ns)
        return when_ns - self._shifts.get(node, 0) if likely is None else likely

    def failure_at(self, failure: WorkerFailure) -> int:
        """When it happened, on the common axis."""
        return self._known(moment_of_failure(failure, self.attempt.clocks), self.at(failure.node, failure.ended_ns))

    def loss_at(self, loss: NodeLoss) -> int:
        """When it was lost: the last sign of it."""
        # Its own word is by its own clock; its coordinator's is by a clock that is taken for right.
        guess = self.at(loss.node, loss.seen_ns) if loss.left or loss.broke else loss.gone_ns
        return self._known(moment_of_loss(loss, self.attempt.clocks), guess)

    def _seen_by_supervisor(self, when_ns: int | None) -> int | None:
        likely = when_ns and self.attempt.clocks.likely(SUPERVISOR, when_ns)
        return when_ns and (likely or self._known(self.attempt.clocks.moment(SUPERVISOR, when_ns), when_ns))

    @staticmethod
    def _known(moment: Moment, otherwise_ns: int) -> int:
        return otherwise_ns if moment.bound_ns is None else moment.at_ns

    def _shifted(self, told: NodeTimes) -> NodeTimes:
        if told.node not in self._shifts and told.node not in self.attempt.clocks.set_nodes:
            return told
        values = (told.final_ns, told.started_ns, told.stopping_ns, told.ended_ns)
        final, started, stopping, ended = (None if when is None else self.at(told.node, when) for when in values)
        return NodeTimes(
            round=told.round,
            node=told.node,
            final_ns=final,
            started_ns=started,
            stopping_ns=stopping,
            ended_ns=ended,
            succeeded=told.succeeded,
        )

    def _extent(self) -> tuple[int, int]:
        attempt = self.attempt
        told: list[int | None] = [self._seen_by_supervisor(when) for when in (attempt.started_ns, attempt.ended_ns)]
        for whens in (*self.agent_starts.values(), *self.agent_ends.values()):
            told += whens
        for items in self._times.values():
            for item in items:
                told += (item.final_ns, item.started_ns, item.stopping_ns, item.ended_ns)
        for part in attempt.rounds:
            told += [self.failure_at(failure) for failure in part.failures if failure.ended_ns]
            told += [loss.seen_ns for losses in self.losses.values() for loss in losses.values()]
            told += [self.at(status.node, status.told_ns) for status in part.rank_statuses]
        told += [self._seen_by_supervisor(end.seen_ns) for end in attempt.agent_ends]
        known = [when for when in told if when]
        return (min(known), max(known)) if known else (0, 0)

    @property
    def span(self) -> AttemptSpan:
        """From the first that is known of it to the last."""
        return AttemptSpan(number=self.attempt.number, start_ns=self.start_ns, end_ns=self.end_ns)

    @property
    def rounds(self) -> list[RoundTimes]:
        """All rounds."""
        return [self._round_times(item) for item in self.attempt.rounds]

    def _round_times(self, item: RoundHistory) -> RoundTimes:
        """From when to when all of a round's workers ran: till the first stopped, failed or was lost."""
        there = self.by_round.get(item.index, {})
        stays = {node.node: there[node.node] for node in item.nodes if node.node in there}
        start, end = self.extents.get(item.index, (self.end_ns, self.end_ns))
        trained = None
        if stays and len(stays) == len(item.nodes):
            ends = [stay.stopping_ns for stay in stays.values()]
            ends += [self.failure_at(failure) for failure in item.failures if failure.ended_ns]
            begin = max(stay.running_ns for stay in stays.values())
            if min(ends) > begin:
                trained = (begin, min(ends))
        return RoundTimes(attempt=self.attempt.number, round=item.index, start_ns=start, end_ns=end, trained_ns=trained)


def place_attempts(history: RunHistory) -> list[PlacedAttempt]:
    """The attempts of which anything is known."""
    placed = []
    axes: dict[str, tuple[int, int]] = {}
    for attempt in history.attempts:
        clocks = attempt.clocks.on_axis_of(axes.get(attempt.clocks.host))
        part = PlacedAttempt(replace(attempt, clocks=clocks))
        axes |= {part.name(node): axis for node, axis in clocks.axes().items()}
        placed.append(part)
    return [part for part in placed if part.end_ns]
