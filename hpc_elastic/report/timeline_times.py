"""When each node did what: the part of an attempt's history that only its picture needs. Read by `collect`.

Nanoseconds since the epoch by the wall clock of the node that told it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_elastic.light_dataclass import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """One node's part in one round, as its agent told it; None: it did not."""

    round: int
    node: int
    final_ns: int | None = None
    """The round was agreed upon, and its workers were about to be started."""
    started_ns: int | None = None
    stopping_ns: int | None = None
    ended_ns: int | None = None
    """The last of its workers was gone."""
    succeeded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTimes:
    """Beginnings and ends of the agents on one node, ascending: it may have been started several times."""

    node: int
    host: str
    started_ns: tuple[int, ...] = ()
    ended_ns: tuple[int, ...] = ()
    """By the agent's own word; one that was killed has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """All nodes' times in one attempt."""

    nodes: tuple[NodeTimes, ...] = ()
    """By node, then by round."""
    agents: tuple[AgentTimes, ...] = ()
    """By node."""


_FIELDS = {
    "round_final": "final_ns",
    "workers_started": "started_ns",
    "workers_stopping": "stopping_ns",
    "workers_stopped": "ended_ns",
    "workers_succeeded": "ended_ns",
}


@dataclass(slots=True)
class TimesBuilder:
    """Fed with an attempt's events in any order of files."""

    _nodes: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    _succeeded: set[tuple[int, int]] = field(default_factory=set)
    _agents: dict[int, tuple[list[str], list[int], list[int]]] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """What an agent tells of itself; any other event tells nothing."""
        name, node, when = event.get("event"), _whole(event.get("node")), _whole(event.get("t"))
        if event.get("role") != "agent" or node is None or when is None or not isinstance(name, str):
            return
        if name in _FIELDS:
            index = _whole(event.get("round"))
            if index is None:
                return
            times = self._nodes.setdefault((node, index), {})
            # workers_stopped comes after workers_succeeded, too: the first word counts. A round may become final anew
            # for an agent that died in it and came back: there the first is the truth as well.
            times.setdefault(_FIELDS[name], when)
            if name == "workers_succeeded":
                self._succeeded.add((node, index))
        elif name in ("agent_started", "agent_ended"):
            hosts, started, ended = self._agents.setdefault(node, ([], [], []))
            hosts.append(str(event.get("host") or ""))
            (started if name == "agent_started" else ended).append(when)

    def build(self) -> AttemptTimes:
        """What was told."""
        return AttemptTimes(
            nodes=tuple(
                NodeTimes(node=node, round=index, succeeded=(node, index) in self._succeeded, **times)
                for (node, index), times in sorted(self._nodes.items())
            ),
            agents=tuple(
                AgentTimes(node=node, host=hosts[0], started_ns=tuple(sorted(started)), ended_ns=tuple(sorted(ended)))
                for node, (hosts, started, ended) in sorted(self._agents.items())
            ),
        )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
