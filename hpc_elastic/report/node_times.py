"""When each node did what, by its own wall clock, and how far that clock is off: what the picture and merged logs need.

Where offsets were measured they are used, with their bounds. Elsewhere clocks are trusted, but for one that contradicts
the others: all nodes learn within a minute at most that a round is final, so a clock that shows that later, or earlier,
in every round by more than that is set wrong by about as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct, field

from hpc_elastic.report.clocks import CLOCK_EVENTS, Clocks, ClocksBuilder, HostOffset
from hpc_elastic.run import agent_events as of_agent
from hpc_elastic.run.event_reader import EventLine, read_events
from hpc_elastic.run.event_types import RunEvent, name_of
from hpc_elastic.run.paths import AttemptPaths


class NodeTimes(NamedTuple):
    """One node's part in one round, as its agent reported it; None: it did not."""

    round: int
    node: int
    final_ns: int | None = None
    """The round was agreed upon, and its workers were about to be started."""
    started_ns: int | None = None
    stopping_ns: int | None = None
    ended_ns: int | None = None
    succeeded: bool = False


class AgentTimes(Struct, frozen=True, kw_only=True):
    """Beginnings and ends of the agents on one node, ascending: it may have been started several times."""

    node: int
    host: str
    started_ns: tuple[int, ...] = ()
    ended_ns: tuple[int, ...] = ()


class AttemptTimes(Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeTimes, ...] = ()
    agents: tuple[AgentTimes, ...] = ()


_FIELDS: Mapping[type[RunEvent], str] = {
    of_agent.RoundFinal: "final_ns",
    of_agent.WorkersStarted: "started_ns",
    of_agent.WorkersStopping: "stopping_ns",
    of_agent.WorkersStopped: "ended_ns",
    of_agent.WorkersSucceeded: "ended_ns",
}


class TimesBuilder(Struct):
    """Fed with what agents report of themselves, in any order of files."""

    _nodes: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    _agents: dict[int, tuple[list[str], list[int], list[int]]] = field(default_factory=dict)

    def take(self, line: EventLine) -> None:
        event, node, when = line.event, line.node, line.written_ns
        if event is None or node is None or node < 0 or when < 0:
            return
        place = _FIELDS.get(type(event))
        if place is not None:
            index: int = event.round  # type: ignore[attr-defined]
            if index < 0:
                return
            times = self._nodes.setdefault((node, index), {})
            # workers_stopped comes after workers_succeeded, too: the first of them counts. A round may become final
            # again for an agent that died in it and came back: there the first is the truth as well.
            times.setdefault(place, when)
            if isinstance(event, of_agent.WorkersSucceeded):
                times["succeeded"] = True
        elif isinstance(event, (of_agent.AgentStarted, of_agent.AgentEnded)):
            hosts, started, ended = self._agents.setdefault(node, ([], [], []))
            hosts.append(line.host)
            (started if isinstance(event, of_agent.AgentStarted) else ended).append(when)

    def build(self) -> AttemptTimes:
        return AttemptTimes(
            nodes=tuple(NodeTimes(index, node, **times) for (node, index), times in sorted(self._nodes.items())),
            agents=tuple(
                AgentTimes(node=node, host=hosts[0], started_ns=tuple(sorted(started)), ended_ns=tuple(sorted(ended)))
                for node, (hosts, started, ended) in sorted(self._agents.items())
            ),
        )


SUSPECT_NS = 90 * 1_000_000_000
"""A node that learns late, behind caches that are trusted for a minute, is not taken for one with a wrong clock."""


def node_offsets(times: Iterable[NodeTimes], *, clocks: Clocks) -> dict[int, HostOffset]:
    """Node index → how far its wall clock is off in one attempt; a node that is not there is trusted."""
    found = dict(clocks.offsets)
    rounds: dict[int, dict[int, int]] = {}
    for item in times:
        if item.final_ns is not None:
            known = found.get(item.node)
            rounds.setdefault(item.round, {})[item.node] = item.final_ns - (known.offset_ns if known else 0)
    deviations: dict[int, list[int]] = {}
    for finals in rounds.values():
        if len(finals) < 2:
            continue
        middle = _median_low(finals.values())
        for node, when in finals.items():
            deviations.setdefault(node, []).append(when - middle)
    for node, values in deviations.items():
        least, most = min(values), max(values)
        is_wrong = least > SUSPECT_NS or most < -SUSPECT_NS
        if node not in found and node != clocks.reference and is_wrong and most - least < SUSPECT_NS:
            bound = max(1_000_000_000, most - least)
            found[node] = HostOffset(offset_ns=_median_low(values), bound_ns=bound, measured=False)
    return found


def read_offsets_ns(attempt: AttemptPaths) -> dict[int, int]:
    """Node → how far its wall clock is ahead, nanoseconds; a node that is not there is trusted.

    Where the agents measured it, so far; else what the rounds show. A clock that may as well be right, within the
    measurement's bound, is trusted: on a busy host a correction would turn around what agreeing clocks have in order.
    """
    times: dict[tuple[int, int], NodeTimes] = {}
    clocks = ClocksBuilder()
    for line in read_events(attempt.events, names={*CLOCK_EVENTS, name_of(of_agent.RoundFinal)}):
        if isinstance(line.event, of_agent.RoundFinal):
            if line.node is not None and line.written_ns:
                index = line.event.round
                times.setdefault((index, line.node), NodeTimes(round=index, node=line.node, final_ns=line.written_ns))
        else:
            clocks.take(line)
    offsets = node_offsets(times.values(), clocks=clocks.build())
    return {node: offset.offset_ns for node, offset in offsets.items() if abs(offset.offset_ns) > offset.bound_ns}


def _median_low(values: Iterable[int]) -> int:
    """`statistics` takes longer to import than a small run's report to be made."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
