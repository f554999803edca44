"""What came and went without ending anything by itself: a filesystem that refused, a network link that was lost.

What of the workers' output never reached its files or the job log, as the agents told it.

Restarts within the processes of a round, as the restart group reported them to its agents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.report.clocks import SUPERVISOR
from hpc_elastic.report.collect_values import integer, integer_or, text_of, whole_numbers
from hpc_elastic.report.fold import rank_ranges

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


class Outage(Struct, frozen=True, kw_only=True):
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


_MOST_STREAMS = 1000


class StreamLoss(Struct, frozen=True, kw_only=True):
    """Of one worker's stdout or stderr, in bytes."""

    round: int
    rank: int
    stream: str
    not_in_file: int
    not_in_job_log: int


class OutputLoss(Struct, frozen=True, kw_only=True):
    """What one node lost in one episode."""

    host: str
    node: int
    reason: str
    not_in_files: int
    not_in_job_log: int
    told_ns: int
    """When, by the node's clock."""
    streams: tuple[StreamLoss, ...]


def read_loss(event: Mapping[str, Any], when: int) -> OutputLoss:
    """From an agent's event ``output_lost``; what is not as it should be is left out."""
    streams = event.get("streams")
    found = []
    for item in streams[:_MOST_STREAMS] if isinstance(streams, list) else []:
        if isinstance(item, dict) and isinstance(item.get("rank"), int):
            found.append(
                StreamLoss(
                    round=_count(item.get("round")),
                    rank=item["rank"],
                    stream=str(item.get("stream"))[:16],
                    not_in_file=_count(item.get("not_in_file")),
                    not_in_job_log=_count(item.get("not_in_job_log")),
                )
            )
    return OutputLoss(
        host=str(event.get("host"))[:256],
        node=_count(event.get("node")),
        reason=str(event.get("reason"))[:256],
        not_in_files=_count(event.get("not_in_files")),
        not_in_job_log=_count(event.get("not_in_job_log")),
        told_ns=when,
        streams=tuple(found),
    )


def describe_losses(losses: Sequence[OutputLoss]) -> list[str]:
    """For a person: at most one line for the files, and one for the job log."""
    lines = []
    files = [loss for loss in losses if loss.not_in_files]
    if files:
        reasons = ", ".join(list(dict.fromkeys(loss.reason for loss in files))[:3])
        ranks = [one.rank for loss in files for one in loss.streams if one.not_in_file]
        lines.append(_line(sum(loss.not_in_files for loss in files), ranks, "are in no file", reasons))
    dropped = sum(loss.not_in_job_log for loss in losses)
    if dropped:
        ranks = [one.rank for loss in losses for one in loss.streams if one.not_in_job_log]
        lines.append(_line(dropped, ranks, "are not in the job log", "the job log could not keep up"))
    return lines


def losses_json(losses: Sequence[OutputLoss]) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "host": loss.host,
            "node": loss.node,
            "reason": loss.reason,
            "not_in_files": loss.not_in_files,
            "not_in_job_log": loss.not_in_job_log,
            "told_ns": loss.told_ns,
            "streams": [
                {
                    "round": one.round,
                    "rank": one.rank,
                    "stream": one.stream,
                    "not_in_file": one.not_in_file,
                    "not_in_job_log": one.not_in_job_log,
                }
                for one in loss.streams
            ],
        }
        for loss in losses
    ]


def _line(count: int, ranks: Sequence[int], what: str, why: str) -> str:
    named = sorted(set(ranks))
    whose = f" of rank{'s' if len(named) > 1 else ''} {rank_ranges(named)}" if named else ""
    return f"{count} bytes of the output{whose} {what}: {why}"


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


_SHOWN = 3
_MOST_NAMED = 4


class InProcessRestart(Struct, frozen=True, kw_only=True):
    """The function started again in the processes that were left, or a process gave up."""

    told_ns: int
    """When, by the node's clock."""
    node: int
    iteration: int
    """That began; of a process that gave up, the one that it was in."""
    seconds: float = 0.0
    """From the fault to the function's start."""
    world_size: int = 0
    interruptions: tuple[tuple[int, str], ...] = ()
    """Rank in the iteration before, and what happened there."""
    joined: tuple[int, ...] = ()
    """Ranks in the iteration before whose places fresh processes took."""
    gave_up: str = ""
    """Why no further restart was tried; empty: one was."""


def read_restart(event: Mapping[str, Any], when: int, node: int) -> InProcessRestart:
    """From an agent's event ``ring_restarted`` or ``ring_gave_up``; what is not as it should be is left out."""
    seconds = event.get("seconds")
    pairs = event.get("interruptions")
    found = []
    for pair in pairs if isinstance(pairs, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and (rank := integer(pair[0])) is not None:
            found.append((rank, text_of(pair[1])[:64]))
    return InProcessRestart(
        told_ns=when,
        node=node,
        iteration=integer_or(integer(event.get("iteration")), 0),
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        world_size=integer_or(integer(event.get("world_size")), 0),
        interruptions=tuple(found),
        joined=tuple(whole_numbers(event.get("joined"))),
        gave_up=(text_of(event.get("reason")) or "no reason was given") if event.get("event") == "ring_gave_up" else "",
    )


def describe_restart(restart: InProcessRestart) -> str:
    """One clause, as in ``iteration 2 after 0.12 s: EXCEPTION on rank 1``."""
    if restart.gave_up:
        return f"the in-process restart group gave up: {restart.gave_up}"
    kinds: dict[str, list[int]] = {}
    for rank, kind in restart.interruptions:
        kinds.setdefault(kind, []).append(rank)
    named = [f"{kind} on rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}" for kind, ranks in kinds.items()]
    told = "; ".join(named[:_MOST_NAMED]) or "a fault"
    fresh = f"; fresh process in place of rank{'s' * (len(restart.joined) > 1)} {rank_ranges(restart.joined)}"
    return f"iteration {restart.iteration} after {restart.seconds:.2f} s: {told}{fresh if restart.joined else ''}"


def in_process_lines(restarts: Sequence[InProcessRestart], *, everything: bool) -> list[str]:
    """The last ones in their order, and how many there were. Several ranks that gave up in one iteration are one line.

    Args:
        restarts: Of one round, in the order of time.
        everything: Whether all are to be shown.
    """
    lines = list(dict.fromkeys(describe_restart(restart) for restart in restarts))
    if everything or len(lines) <= _SHOWN:
        return lines
    done = [restart for restart in restarts if not restart.gave_up]
    total = sum(restart.seconds for restart in done)
    return [f"{len(done)} restarts within the processes, {total:.2f} s in all; the last:", *lines[1 - _SHOWN :]]


def in_process_json(restarts: Sequence[InProcessRestart]) -> list[dict[str, Any]]:
    """For report.json."""
    return [
        {
            "iteration": restart.iteration,
            "seconds": restart.seconds,
            "world_size": restart.world_size,
            "interruptions": [{"rank": rank, "interruption": kind} for rank, kind in restart.interruptions],
            "joined": list(restart.joined),
            "gave_up": restart.gave_up or None,
            "told_ns": restart.told_ns,
            "node": restart.node,
        }
        for restart in restarts
    ]
