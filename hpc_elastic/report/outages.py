"""What came and went without ending anything by itself: a filesystem that refused, a network link that was lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hpc_elastic.report.clocks import SUPERVISOR
from hpc_elastic.report.collect_values import integer, integer_or, text_of

_SAME_MOMENT_NS = 2_000_000_000
_SLACK_NS = 10_000_000_000
"""So far may two hosts' clocks be apart, and so long may it take until an agent's end is seen."""
_MOST_NAMES = 4
_WORDS = 300


class OutageKind(str, Enum):
    """What was out."""

    FILESYSTEM = "filesystem"
    """The filesystem of the run directory refused a node."""
    LINK = "link"
    """No packet of a node came through; the node answered through the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One time of it, on one node."""

    kind: OutageKind
    node: int
    """Its index; `clocks.SUPERVISOR` for the supervisor."""
    host: str
    seconds: float
    since_ns: int
    """By the clock of `observer`'s host."""
    observer: int
    over: bool = True
    """Whether it ended before its observer did."""
    error: str = ""
    """What the filesystem said."""
    path: str = ""
    """What it refused first."""


def read_outage(kind: OutageKind, event: Mapping[str, Any], when: int) -> Outage:
    """From an event ``filesystem_refused`` or ``link_lost``."""
    seconds = event.get("seconds")
    lasted = float(seconds) if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9 else 0.0
    node = integer_or(integer(event.get("node")), SUPERVISOR)
    if event.get("role") == "supervisor":
        node = SUPERVISOR
    return Outage(
        kind=kind,
        node=node,
        host=text_of(event.get("host")),
        seconds=lasted,
        since_ns=integer_or(integer(event.get("since_ns")), when - int(lasted * 1e9)),
        observer=integer_or(integer(event.get("by")), node),
        over=event.get("over") is not False,
        error=text_of(event.get("error"))[:_WORDS],
        path=text_of(event.get("path"))[:_WORDS],
    )


def attributed(outages: Sequence[Outage], nodes: Sequence[str]) -> tuple[Outage, ...]:
    """The outages in order, with each link's put down to the node whose link it was.

    A node that hears none of its peers any more has lost its own link: they have not all lost theirs at one moment.
    """
    links = [one for one in outages if one.kind is OutageKind.LINK]
    found = [one for one in outages if one.kind is not OutageKind.LINK]
    while links:
        first = links[0]
        same = [
            one
            for one in links
            if one.observer == first.observer and abs(one.since_ns - first.since_ns) <= _SAME_MOMENT_NS
        ]
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


def describe_outages(outages: Sequence[Outage], clock: Callable[[int], str]) -> list[tuple[str, str]]:
    """For a person: what was out, and for how long; for each error, with the path in a line of its own, and each link.

    Args:
        outages: As `attributed` gives them.
        clock: A time in nanoseconds → the time of day.
    """
    lines = []
    by_error: dict[str, list[Outage]] = {}
    by_link: dict[str, list[Outage]] = {}
    for one in outages:
        groups, key = (by_link, one.host) if one.kind is OutageKind.LINK else (by_error, one.error)
        groups.setdefault(key or f"node {one.node}", []).append(one)
    for error, found in by_error.items():
        longest = max(found, key=lambda one: one.seconds)
        hosts = list(dict.fromkeys("the supervisor" if one.node == SUPERVISOR else one.host for one in found))
        often = max(sum(1 for one in found if (one.node, one.host) == (other.node, other.host)) for other in found)
        times = f"{often} times, at most" if often > 1 else "for"
        lasts = "" if all(one.over for one in found) else ", to the end"
        when = f"{times} {longest.seconds:.0f} s from {clock(found[0].since_ns)} on{lasts}"
        lines.append(("filesystem", f"refused {_names(hosts)} {when}: {error}"))
        lines += [("", longest.path)] if longest.path else []
    for host, found in by_link.items():
        count = "once" if len(found) == 1 else f"{len(found)} times"
        lasts = "" if found[-1].over else "; it was not back at the end"
        in_all = f"{sum(one.seconds for one in found):.0f} s{' in all' if len(found) > 1 else ''}"
        first = clock(found[0].since_ns)
        lines.append(("network", f"{host}: network link lost {count}, {in_all}, first at {first}{lasts}"))
    return lines


def outages_json(outages: Sequence[Outage]) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "kind": one.kind.value,
            "node": one.node if one.node != SUPERVISOR else None,
            "host": one.host,
            "since_ns": one.since_ns,
            "seconds": one.seconds,
            "over": one.over,
            "error": one.error or None,
            "path": one.path or None,
        }
        for one in outages
    ]


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) == 1:
        return hosts[0]
    shown = list(hosts[:_MOST_NAMES]) + ([f"{len(hosts) - _MOST_NAMES} more"] if len(hosts) > _MOST_NAMES else [])
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
