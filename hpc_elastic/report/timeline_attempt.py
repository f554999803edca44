"""One attempt with all its times on an axis that all hosts share, every stay's ends known."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_elastic.light_dataclass import dataclass
from hpc_elastic.report.history import AttemptHistory, NodeLoss, RoundHistory, RunHistory
from hpc_elastic.report.timeline_clocks import ClockOffset, node_offsets
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


class PlacedAttempt:
    """One attempt with all its times on the common axis."""

    def __init__(self, attempt: AttemptHistory, measured: Mapping[str, ClockOffset]) -> None:
        self.attempt = attempt
        self._hosts = {agents.node: agents.host for agents in attempt.times.agents}
        self._hosts.update({node.node: node.host for item in attempt.rounds for node in item.nodes})
        known = {item.node for item in attempt.times.nodes} | set(self._hosts)
        names = {node: self.name(node) for node in known}
        self.offsets = node_offsets(attempt.times.nodes, hosts=names, measured=measured)
        self.losses: dict[int, dict[int, NodeLoss]] = {}
        for item in attempt.rounds:
            for loss in item.lost_nodes:
                self.losses.setdefault(loss.node, {})[item.index] = loss
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
        offset = self.offsets.get(node)
        return when_ns if offset is None else when_ns - offset.offset_ns

    def _shifted(self, told: NodeTimes) -> NodeTimes:
        if told.node not in self.offsets:
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
        told: list[int | None] = [attempt.started_ns, attempt.ended_ns]
        for whens in (*self.agent_starts.values(), *self.agent_ends.values()):
            told += whens
        for items in self._times.values():
            for item in items:
                told += (item.final_ns, item.started_ns, item.stopping_ns, item.ended_ns)
        for part in attempt.rounds:
            told += [self.at(failure.node, failure.ended_ns) for failure in part.failures]
            told += [loss.seen_ns for loss in part.lost_nodes]
            told += [self.at(word.node, word.told_ns) for word in part.words]
        told += [end.seen_ns for end in attempt.agent_ends]
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
            ends += [self.at(failure.node, failure.ended_ns) for failure in item.failures if failure.ended_ns]
            begin = max(stay.running_ns for stay in stays.values())
            if min(ends) > begin:
                trained = (begin, min(ends))
        return RoundTimes(attempt=self.attempt.number, round=item.index, start_ns=start, end_ns=end, trained_ns=trained)


def place_attempts(history: RunHistory, measured: Mapping[str, ClockOffset] | None = None) -> list[PlacedAttempt]:
    """The attempts of which anything is known.

    Args:
        history: The run.
        measured: Host name → its clock's offset, where offsets were measured.
    """
    placed = [PlacedAttempt(attempt, measured or {}) for attempt in history.attempts]
    return [part for part in placed if part.end_ns]
