"""Events of an attempt that did not end it: outages, lost output, failed commands, restarts within the processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.report.clocks import SUPERVISOR
from hpc_elastic.run.agent_events import FilesystemRefused, StreamLoss
from hpc_elastic.run.coordinator_events import LinkLost
from hpc_elastic.run.event_reader import EventLine
from hpc_elastic.run.events import RunEvent

_SAME_MOMENT_NS = 2_000_000_000
_SLACK_NS = 10_000_000_000
"""So far may two hosts' clocks be apart, and so long may it take until an agent's end is seen."""
_WORDS = 300
_Incident = TypeVar("_Incident", bound=Struct)


class OutageKind(str, Enum):
    FILESYSTEM = "filesystem"
    LINK = "link"
    """No packet of a node came through; the node answered through the files."""


class Outage(Struct, frozen=True, kw_only=True):
    kind: OutageKind
    node: int
    host: str
    seconds: float
    since_ns: int
    """The clock of `observer`'s host."""
    observer: int
    over: bool = True
    error: str = ""
    path: str = ""


def read_outage(line: EventLine, event: FilesystemRefused | LinkLost) -> Outage:
    kind = OutageKind.LINK if isinstance(event, LinkLost) else OutageKind.FILESYSTEM
    since = line.written_ns - int(event.seconds * 1e9) if event.since_ns is None else event.since_ns
    texts = {name: getattr(event, name, "")[:_WORDS] for name in ("error", "path")}
    found = read_incident(Outage, line, event, kind=kind, since_ns=since, observer=SUPERVISOR, **texts)
    return replace(found, observer=found.node if line.by is None else line.by)


def attributed(outages: Sequence[Outage], nodes: Sequence[str]) -> tuple[Outage, ...]:
    """The outages in order, with each link's put down to the node whose link it was.

    A node that hears none of its peers any more has lost its own link: they have not all lost theirs at one moment.
    """
    links = [one for one in outages if one.kind is OutageKind.LINK]
    found = [one for one in outages if one.kind is not OutageKind.LINK]
    while links:
        first = links[0]
        near = (one for one in links if abs(one.since_ns - first.since_ns) <= _SAME_MOMENT_NS)
        same = [one for one in near if one.observer == first.observer]
        links = [one for one in links if one not in same]
        silent = {one.node for one in same}
        if len(silent) > 1 and silent >= set(range(len(nodes))) - {first.observer} and 0 <= first.observer < len(nodes):
            longest = max(same, key=lambda one: one.seconds)
            same = [replace(longest, node=first.observer, host=nodes[first.observer])]
        found += same
    return tuple(sorted(found, key=lambda one: (one.since_ns, one.node)))


def refused_hosts(outages: Collection[Outage], *, at_ns: int | None = None) -> tuple[str, ...]:
    """The hosts, by their short names, that the filesystem refused; `at_ns`: at about that time, as the clocks are."""
    refused = [one for one in outages if one.kind is OutageKind.FILESYSTEM and one.host]
    if at_ns is not None:
        refused = [one for one in refused if -_SLACK_NS <= at_ns - one.since_ns <= round(one.seconds * 1e9) + _SLACK_NS]
    return tuple(dict.fromkeys(one.host.partition(".")[0] for one in refused))


class OutputLoss(Struct, frozen=True, kw_only=True):
    host: str = ""
    node: int = 0
    reason: str = ""
    not_in_files: int = 0
    not_in_job_log: int = 0
    reported_ns: int = field(default=0, name="told_ns")
    streams: tuple[StreamLoss, ...] = ()


class CommandFailure(Struct, frozen=True, kw_only=True):
    command: str
    host: str
    node: int
    reason: str
    code: int
    seconds: float
    reported_ns: int = field(name="told_ns")
    about: str = ""
    output: tuple[str, ...] = ()
    log: str = ""


class InProcessRestart(Struct, frozen=True, kw_only=True):
    reported_ns: int = field(name="told_ns")
    node: int
    iteration: int = 0
    """The one that began; where a process gave up, the one that it was in."""
    seconds: float = 0.0
    world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration before, and what happened there."""
    joined: tuple[int, ...] = ()
    """Ranks in the iteration before whose places fresh processes took."""
    gave_up: str = ""
    """Why no further restart was tried; empty: one was."""


def read_incident(record: type[_Incident], line: EventLine, event: RunEvent, **known: Any) -> _Incident:
    """The record of an event, whose fields of the same name it takes; `known` are those that differ."""
    node = SUPERVISOR if line.node is None or line.role == "supervisor" else line.node
    found = {"host": line.host, "node": node, "reported_ns": line.written_ns}
    names = record.__struct_fields__
    found |= {name: getattr(event, name) for name in names if hasattr(event, name)}
    return record(**{name: value for name, value in {**found, **known}.items() if name in names})
