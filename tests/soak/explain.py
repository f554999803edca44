"""Looks a fault up in what the run itself tells, its report and its events: who, when, which class. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.faults import NATURES, Effect, Fault, Kind

EARLIER = 5.0
"""A lost node was seen for the last time before it was lost."""
LATER = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was done, to whom, and until when the run may tell it. Times in seconds of the machine's wall clock."""

    fault: Fault
    node: str
    pid: int
    at: float
    until: float
    went_on: bool
    """The same round trained on."""
    host_dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All that the run says of itself."""

    report: Mapping[str, Any]
    """report.json's object, of all attempts."""
    events: Sequence[Mapping[str, Any]]


def explanation(asked: Asked, told: Told) -> str:
    """What the run says of the fault; empty where it says nothing that fits."""
    for find in _FINDERS[asked.fault.kind]:
        found = find(asked, told)
        if found:
            return found
    if asked.went_on and NATURES[asked.fault.kind].effect is not Effect.RESTART:
        return "trained on in the same round"
    return ""


def _in_time(asked: Asked, ns: int | None, *, earlier: float = 0.2) -> bool:
    return ns is not None and asked.at - earlier <= ns / 1e9 <= asked.until + LATER


def _clock(ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(ns / 1e9))


def _rounds(told: Told) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for attempt in told.report["attempts"]:
        for part in attempt["rounds"]:
            yield attempt, part


def _worker_failed(asked: Asked, told: Told) -> str:
    for attempt, part in _rounds(told):
        for failure in part["failures"]:
            for member in failure["members"]:
                if (member["host"], member["pid"]) != (asked.node, asked.pid):
                    continue
                if not _in_time(asked, member["ended_ns"], earlier=1.0):
                    continue
                what = failure["first"]["failure_class"]
                where = f"attempt {attempt['number']} round {part['index']}"
                rank = f"rank {member['global_rank']} on {member['host']}"
                return f"{_clock(member['ended_ns'])} {rank}: {what}, exit code {member['exitcode']} ({where})"
    return ""


def _hang(asked: Asked, told: Told) -> str:
    found = _worker_failed(asked, told)
    return found if "hang" in found else ""


def _agent_ended(asked: Asked, told: Told) -> str:
    for attempt in told.report["attempts"]:
        for ended in attempt["agents_ended"]:
            if ended["name"] == asked.node and _in_time(asked, ended["seen_ns"]):
                how = ended["detail"] or f"code {ended['code']}"
                return f"{_clock(ended['seen_ns'])} agent on {ended['name']} ended: {how}"
    return ""


def _node_lost(asked: Asked, told: Told) -> str:
    for attempt, part in _rounds(told):
        for lost in part["lost_nodes"]:
            if lost["host"] == asked.node and _in_time(asked, lost["seen_ns"], earlier=EARLIER):
                why = lost["left"] or "lost"
                where = f"attempt {attempt['number']} round {part['index']}"
                return f"{_clock(lost['seen_ns'])} node {lost['host']} {why} ({where})"
    return ""


def _event(*names: str) -> Callable[[Asked, Told], str]:
    """An event of one of these names about the node that was hit."""

    def find(asked: Asked, told: Told) -> str:
        for event in told.events:
            if event["event"] not in names or not _in_time(asked, event["t"]):
                continue
            if asked.node and asked.node not in (event.get("host"), event.get("name")):
                continue
            reason = event.get("reason") or event.get("detail") or ""
            return f"{_clock(event['t'])} {event['event']} {event.get('host', '')}: {reason}"
        return ""

    return find


def _attempt_ended(*signals: str) -> Callable[[Asked, Told], str]:
    def find(asked: Asked, told: Told) -> str:
        for attempt in told.report["attempts"]:
            if not attempt["ended_ns"] or not _in_time(asked, attempt["ended_ns"]):
                continue
            reason = attempt["reason"] or ""
            if any(signal in reason for signal in signals) or set(signals) & set(map(_name, attempt["notices"])):
                words = f"attempt {attempt['number']} {attempt['outcome']}"
                return f"{_clock(attempt['ended_ns'])} {words}: {reason}"
        return ""

    return find


def _decided(*meanings: str) -> Callable[[Asked, Told], str]:
    """A signal of which the run found out that it meant one of these."""

    def find(asked: Asked, told: Told) -> str:
        for event in told.events:
            if event["event"] == "signal_decided" and event.get("meaning") in meanings and _in_time(asked, event["t"]):
                return f"{_clock(event['t'])} {event['meaning']}: {event.get('reason', '')}"
        return ""

    return find


def _name(notice: Any) -> str:
    return str(notice.get("signal", "")) if isinstance(notice, Mapping) else str(notice)


_LOST = (_node_lost, _event("spare_lost", "node_left", "node_lost"), _agent_ended)
_FINDERS: dict[Kind, tuple[Callable[[Asked, Told], str], ...]] = {
    Kind.WORKER_KILLED: (_worker_failed,),
    Kind.WORKER_SEGFAULT: (_worker_failed,),
    Kind.WORKER_EXCEPTION: (_worker_failed,),
    Kind.WORKER_HANG: (_hang,),
    Kind.AGENT_KILLED: (_agent_ended, _node_lost),
    Kind.SRUN_KILLED: (_agent_ended,),
    Kind.NODE_OFF: _LOST,
    Kind.BATCH_HOST_OFF: _LOST,
    Kind.LINK_CUT: (*_LOST, _event("hang")),
    Kind.BLINK: (*_LOST, _event("hang")),
    Kind.FREEZE: (*_LOST, _event("hang")),
    Kind.HICCUP: (*_LOST, _event("hang")),
    Kind.SLURMD_STOPPED: (),
    Kind.SLURMCTLD_STOPPED: (),
    Kind.STEPD_KILLED: (_agent_ended,),
    Kind.TIME_LIMIT: (
        _decided("time limit", "requeue"),
        _attempt_ended("SIGUSR2"),
    ),
    Kind.REQUEUE: (
        _decided("requeue"),
        _attempt_ended("SIGTERM"),
    ),
    Kind.PREEMPTION: (
        _decided("preemption"),
        _attempt_ended("SIGTERM", "SIGUSR2"),
    ),
    Kind.DISK_FULL: (_event("worker_failed", "events_dropped", "output_lost"),),
}
